package identity

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func openAudit(t *testing.T, cfg AuditConfig) *Audit {
	t.Helper()
	a, err := OpenAudit(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	return a
}

// readAudit reads a file of audit lines.
func readAudit(t *testing.T, path string) (lines []AuditEntry) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for text := range strings.Lines(string(b)) {
		var e AuditEntry
		dec := json.NewDecoder(strings.NewReader(text))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&e); err != nil || !strings.HasSuffix(text, "\n") {
			t.Errorf("%v: %q", err, text)
		}
		lines = append(lines, e)
	}
	return lines
}

// The file and its directory are created and accessible to their owner only.
func TestAuditFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "audit")
	openAudit(t, AuditConfig{Path: path})
	for file, mode := range map[string]os.FileMode{path: 0o600, filepath.Dir(path): 0o700} {
		if st, err := os.Stat(file); err != nil || st.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", file, st, err)
		}
	}
	if _, err := OpenAudit(AuditConfig{Path: filepath.Join(path, "x", "audit")}); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("below a file: %v", err)
	}
}

// The first of repeated refusals is written at once, and then one line a minute has their number. The counts of all
// lines add up to all refusals, even if there are too many callers to count separately.
func TestAuditCountsRefusals(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit")
	a := openAudit(t, AuditConfig{Path: path, Daemon: "executor", Now: func() time.Time { return noon }})
	for i := range 10000 { // one caller, from many ports
		a.Refused(&Error{Wrong, "wrong secret"}, "/x", fmt.Sprintf("10.0.0.1:%d", i), "", noon.Add(time.Duration(i)*time.Microsecond))
	}
	a.Refused(&Error{Expired, "late"}, "/x", "10.0.0.1:5", "ann", noon.Add(time.Second))
	a.Flush()
	lines := readAudit(t, path)
	if len(lines) != 2 || lines[0].Count != 1 || lines[0].Remote != "10.0.0.1:0" || lines[1].Reason != "expired" || lines[1].Who != "ann" || lines[1].Count != 1 {
		t.Fatalf("at once: %+v", lines)
	}
	if due := a.refusals.due(noon.Add(refusalsEvery-time.Nanosecond), false); len(due) != 0 {
		t.Errorf("too early: %+v", due)
	}
	due := a.refusals.due(noon.Add(refusalsEvery), false)
	if len(due) != 1 || due[0].Count != 9999 || due[0].Reason != "wrong" || !due[0].Since.Equal(noon.Add(time.Microsecond)) {
		t.Fatalf("after the interval: %+v", due)
	}
	// A caller is forgotten after an interval without refusals. Its next refusal is written at once.
	if due := a.refusals.due(noon.Add(2*refusalsEvery+time.Second), false); len(due) != 0 || len(a.refusals.of) != 0 {
		t.Errorf("left: %+v %v", due, a.refusals.of)
	}
	const callers = 3 * maxRefusals
	for i := range callers {
		for range 2 {
			a.Refused(&Error{Missing, "none"}, "/x", fmt.Sprintf("[2001:db8::%x]:1", i), "", noon)
		}
	}
	if n := len(a.refusals.of); n != maxRefusals+1 {
		t.Errorf("%d callers are told apart, want %d and one for all others", n, maxRefusals)
	}
	a.Close()
	var refused uint64
	for _, e := range readAudit(t, path) {
		if e.Reason == "missing" {
			refused += e.Count
		}
	}
	if refused != 2*callers {
		t.Errorf("%d refusals are in the lines, want %d", refused, 2*callers)
	}
}

// After the file was renamed or removed, the next line is in a new one.
func TestAuditRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit")
	a := openAudit(t, AuditConfig{Path: path})
	say := func(lease uint64) {
		a.Write(AuditEntry{Event: AuditGrant, Lease: lease})
		a.Flush()
	}
	say(1)
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	say(2)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	say(3)
	for file, want := range map[string]uint64{path + ".1": 1, path: 3} {
		if lines := readAudit(t, file); len(lines) != 1 || lines[0].Lease != want {
			t.Errorf("%s: %+v", file, lines)
		}
	}
}

// Callers do not wait for a file that cannot be written now. Lines that do not fit into the queue are dropped and
// counted, and a line reports their number.
func TestAuditNeverBlocks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	// Opened for reading too, so that the open does not wait for a reader. Nothing is read yet.
	a := openAudit(t, AuditConfig{Path: path, Open: func(path string) (*os.File, error) { return os.OpenFile(path, os.O_RDWR, 0) }})
	r, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var taken uint64
	detail := strings.Repeat("x", 1<<10)
	for a.Dropped() < 100 {
		if a.Write(AuditEntry{Event: AuditGrant, Lease: taken + 1, Detail: detail}) {
			taken++
		}
	}
	dropped := a.Dropped()
	read := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(r)
		read <- b
	}()
	a.Close()
	var told, lines uint64
	for text := range bytes.Lines(<-read) {
		var e AuditEntry
		if err := json.Unmarshal(text, &e); err != nil {
			t.Fatalf("%v: %q", err, text)
		}
		if e.Event == AuditDropped {
			told += e.Count
		} else if lines++; e.Lease != lines {
			t.Fatalf("line %d is of lease %d", lines, e.Lease)
		}
	}
	if lines != taken || told != dropped {
		t.Errorf("%d lines of %d, and %d dropped of %d", lines, taken, told, dropped)
	}
	if a.Write(AuditEntry{Event: AuditGrant}) {
		t.Error("a line is taken after the end")
	}
}

// Each line is in the log once. With a file, grants and releases are logged at the level debug only. While the file
// cannot be written, all lines are in the log.
func TestAuditInLogAndFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "audit")
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	say := func(a *Audit) string {
		out.Reset()
		a.Write(AuditEntry{Event: AuditGrant, Lease: 1<<63 + 1, Tenant: "ann"})
		a.Write(AuditEntry{Event: AuditKill, Lease: 1<<63 + 1, Reason: "late"})
		a.Flush()
		return out.String()
	}
	alone := openAudit(t, AuditConfig{Log: log})
	if s := say(alone); strings.Count(s, "msg=audit event=grant lease=9223372036854775809 tenant=ann") != 1 || strings.Count(s, "event=kill") != 1 {
		t.Errorf("without a file: %s", s)
	}
	fail := false
	both := openAudit(t, AuditConfig{Path: path, Log: log, Open: func(path string) (*os.File, error) {
		if fail {
			return nil, os.ErrPermission
		}
		return OpenAuditFile(path)
	}})
	if s := say(both); strings.Contains(s, "event=grant") || strings.Count(s, "event=kill") != 1 {
		t.Errorf("with a file: %s", s)
	}
	if lines := readAudit(t, path); len(lines) != 2 || lines[0].Lease != 1<<63+1 || lines[1].Reason != "late" {
		t.Errorf("the file: %+v", lines)
	}
	fail = true
	os.Remove(path)
	if s := say(both); strings.Count(s, "event=grant") != 1 || !strings.Contains(s, "cannot write the audit file") || !strings.Contains(s, path) {
		t.Errorf("with a file that fails: %s", s)
	}
	fail = false
	if s := say(both); strings.Contains(s, "event=grant") || !strings.Contains(s, "writing to the audit file again") {
		t.Errorf("with a file again: %s", s)
	}
}
