package agent

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// TestBadTables refuses tables that the client could change or cut while they are read, and names that are taken. The tables of a session end
// with it.
func TestBadTables(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := w.connect("RFAAS_EXECUTOR=" + x.address)
	if err := p.open(1, protocol.Session{}); err != nil {
		t.Fatal(err)
	}
	put := func(m protocol.Table, f *os.File) error {
		t.Helper()
		_, err := p.ask(protocol.OpTable, m.Encode, f)
		if f != nil {
			f.Close()
		}
		return err
	}
	good := protocol.Table{Session: 1, Size: 4096, Name: "good"}
	for _, c := range []struct {
		what string
		m    protocol.Table
		file *os.File
		text string
	}{
		{"no file", good, nil, `no descriptor of the table "good"`},
		{"not sealed", good, memory(t, 4096, 0), "want a sealed memory file"},
		{"can be written", good, memory(t, 4096, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW), "want a sealed memory file"},
		{"can be cut", good, memory(t, 4096, unix.F_SEAL_WRITE|unix.F_SEAL_GROW), "want a sealed memory file"},
		{"smaller", good, memory(t, 4095, sealed), "a file of 4095 bytes"},
		{"larger", good, memory(t, 4097, sealed), "a file of 4097 bytes"},
		{"empty", protocol.Table{Session: 1, Name: "empty"}, memory(t, 0, sealed), "a file of 0 bytes"},
		{"session", protocol.Table{Session: 2, Size: 4096, Name: "good"}, memory(t, 4096, sealed), "unknown session 0x2"},
	} {
		if err := put(c.m, c.file); !isStatus(err, dataplane.StatusInvalid) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %q", c.what, err, c.text)
		}
	}
	if err := put(good, memory(t, 4096, sealed)); err != nil {
		t.Fatal(err)
	}
	if err := put(good, memory(t, 4096, sealed)); err != nil {
		t.Errorf("the same table again, as after the end of an agent: %v", err)
	}
	other := good
	other.Size = 8192
	if err := put(other, memory(t, 8192, sealed)); !isStatus(err, dataplane.StatusInvalid) || !strings.Contains(err.Error(), `has a table "good" already`) {
		t.Errorf("another table of the name: %v", err)
	}
	for i := 1; i < protocol.MaxTables; i++ {
		m := good
		m.Name = fmt.Sprint(i)
		if err := put(m, memory(t, 4096, sealed)); err != nil {
			t.Fatal(err)
		}
	}
	m := good
	m.Name = "one more"
	if err := put(m, memory(t, 4096, sealed)); !isStatus(err, dataplane.StatusInvalid) || !strings.Contains(err.Error(), "64 tables, the most") {
		t.Errorf("one table more: %v", err)
	}
	if _, err := p.ask(protocol.OpTableDrop, good.Encode, nil); err != nil {
		t.Error(err)
	}
	if _, err := p.ask(protocol.OpTableDrop, good.Encode, nil); !isStatus(err, dataplane.StatusInvalid) || !strings.Contains(err.Error(), `no table "good"`) {
		t.Errorf("dropped twice: %v", err)
	}
	name := protocol.SessionName{Session: 1}
	p.must(protocol.OpClose, name.Encode, nil)
	if n := tableFiles(t); n != 0 {
		t.Errorf("%d files of tables are open after their session", n)
	}
}

// tableFiles counts the open memory files of this process that memory has made, except for shared pages.
func tableFiles(t *testing.T) (n int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		i, err := os.Stat("/proc/self/fd/" + e.Name())
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, "/memfd:page") && i.Size() <= 8192 {
			n++
		}
	}
	return n
}
