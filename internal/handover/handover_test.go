package handover

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// environment returns an environment that names a memory file with some bytes. Take closes the file.
func environment(t *testing.T, b []byte) []string {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(fd, b); err != nil {
		t.Fatal(err)
	}
	return []string{"A=1", Env + "=" + strconv.Itoa(fd), "B=2"}
}

// TestTake writes a state and reads it as the next program does.
func TestTake(t *testing.T) {
	pipe := make([]int, 2)
	if err := unix.Pipe2(pipe, 0); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	fd, err := Write(&State{Program: "v1", Control: &Listener{Socket: int32(pipe[0])}, Leases: []*Lease{{Id: 7}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Pwrite(fd, []byte("x"), 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("the state can be written: %v", err)
	}
	s, rest, err := Take([]string{"A=1", Env + "=" + strconv.Itoa(fd)})
	if err != nil || s.GetProgram() != "v1" || s.GetLeases()[0].GetId() != 7 || len(rest) != 1 {
		t.Fatalf("%v, %v, %v", s, rest, err)
	}
	if flags, err := unix.FcntlInt(uintptr(pipe[0]), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("a descriptor of the state would leak into other programs: %#x, %v", flags, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
		t.Error("the state is still open")
	}
	if s, rest, err := Take([]string{"A=1"}); s != nil || len(rest) != 1 || err != nil {
		t.Errorf("without a state: %v, %v, %v", s, rest, err)
	}
}

// TestTakeRefuses reads states that are damaged or of another version.
func TestTakeRefuses(t *testing.T) {
	good, err := encode(&State{Program: "v1", Incarnation: make([]byte, 16)})
	if err != nil {
		t.Fatal(err)
	}
	changed := func(at int) []byte {
		b := bytes.Clone(good)
		b[at]++
		return b
	}
	open, err := encode(&State{Control: &Listener{Socket: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		content []byte
		text    string
	}{
		"empty":         {nil, "not the state"},
		"other file":    {changed(0), "not the state"},
		"other version": {changed(len(magic)), fmt.Sprintf("has version %d, this program reads version %d", Version+1, Version)},
		"length":        {changed(len(magic) + 4), "its header says"},
		"checksum":      {changed(len(magic) + 12), "damaged"},
		"content":       {changed(len(good) - 1), "damaged"},
		"cut off":       {good[:len(good)-1], "its header says"},
		"descriptor":    {open, "descriptor 1048576"},
	} {
		s, rest, err := Take(environment(t, c.content))
		if s != nil || err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, %v, want %q", name, s, err, c.text)
		}
		if len(rest) != 2 {
			t.Errorf("%s: environment %q", name, rest)
		}
	}
	var other *VersionError
	if _, _, err := Take(environment(t, changed(len(magic)))); !errors.As(err, &other) || other.Got != Version+1 {
		t.Errorf("another version: %v", err)
	}
	for _, value := range []string{"x", "-1", "0", "1048576"} {
		if s, _, err := Take([]string{Env + "=" + value}); s != nil || err == nil {
			t.Errorf("descriptor %q: %v, %v", value, s, err)
		}
	}
}

// TestReadable looks at files that cannot take over, and at this program, which can.
func TestReadable(t *testing.T) {
	if !bytes.HasSuffix(readable, []byte{Version, ';'}) {
		t.Fatalf("the mark %q is not that of version %d", readable, Version)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := Readable(self); err != nil {
		t.Error(err)
	}
	dir := t.TempDir()
	if err := Readable(dir); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a directory: %v", err)
	}
	if err := Readable(filepath.Join(dir, "missing")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	plain := filepath.Join(dir, "plain")
	for _, c := range []struct {
		content string
		mode    os.FileMode
		text    string
	}{
		{string(readable), 0o644, "cannot be executed"},
		{"#!/bin/sh\n", 0o755, "does not take over"},
		{strings.Repeat("x", 1<<20-5) + string(readable), 0o755, ""},
	} {
		os.Remove(plain)
		if err := os.WriteFile(plain, []byte(c.content), c.mode); err != nil {
			t.Fatal(err)
		}
		if err := Readable(plain); (err == nil) != (c.text == "") || err != nil && !strings.Contains(err.Error(), c.text) {
			t.Errorf("mode %v: %v, want %q", c.mode, err, c.text)
		}
	}
}

// TestClock puts times into a state and gets them back.
func TestClock(t *testing.T) {
	c := NewClock()
	for _, d := range []time.Duration{-time.Hour, -1, 0, time.Minute} {
		at := time.Now().Add(d)
		if got := NewClock().Get(c.Put(at)).Sub(at).Abs(); got > 10*time.Millisecond {
			t.Errorf("%v from now came back %v off", d, got)
		}
	}
	if c.Put(time.Time{}) != 0 || !c.Get(0).IsZero() {
		t.Error("the zero time changed")
	}
}

// The spawner of the earlier program stays, and refuses messages of another length. Whoever changes them must raise Version.
func TestVersionFollowsSpawner(t *testing.T) {
	if Version != 4 || wire.SpawnSize != 560 {
		t.Errorf("version %d with spawn messages of %d bytes: if their length has changed, raise Version, then correct this test", Version, wire.SpawnSize)
	}
}
