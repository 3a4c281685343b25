package executor

import (
	"bytes"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/privilege"
	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// noRoot opens nothing as root.
type noRoot struct{ fakeSpawner }

func (*noRoot) OpenFile(path string, _ bool) (*os.File, error) {
	return nil, &fs.PathError{Op: "open", Path: path, Err: unix.EACCES}
}

// An attacker that has taken over an executor owns its state directory. When the executor is started again as root, a
// link there does not lead root to another file: the journal, the audit file and the identity are not opened with root's
// rights.
func TestStateDirectoryLeadsNowhere(t *testing.T) {
	testkit.Root(t, "can be led to other files")
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	state, victim := filepath.Join(dir, "state"), filepath.Join(dir, "victim")
	own := rights{user: privilege.User{Name: "x", UID: 1234567, GID: 1234567}}
	defer own.close()
	s := config.Executor{Manager: "127.0.0.1:1", StateDir: state, AuditFile: filepath.Join(state, "audit.log"), IdentityDir: filepath.Join(state, "identity")}
	if err := own.makeDirectories(&s); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(state); err != nil || st.Sys().(*syscall.Stat_t).Uid != own.user.UID {
		t.Fatalf("state directory %v, %v", st, err)
	}
	secret := bytes.Repeat([]byte("root's"), 100)
	if err := os.WriteFile(victim, secret, 0o600); err != nil {
		t.Fatal(err)
	}
	attempts := map[string]func() error{
		"n-0.journal": func() error { _, err := own.openJournal(&s, "n", slog.New(slog.DiscardHandler)); return err },
		"audit.log":   func() error { _, err := own.auditOpener(&noRoot{})(s.AuditFile); return err },
		"identity":    func() error { _, err := own.opener(&noRoot{})(s.IdentityDir); return err },
	}
	for name, open := range attempts {
		link := filepath.Join(state, name)
		if err := errors.Join(os.Symlink(victim, link), os.Lchown(link, int(own.user.UID), int(own.user.GID))); err != nil {
			t.Fatal(err)
		}
		if err := open(); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("%s, a link to root's file: %v, want that it is not permitted", name, err)
		}
		if err := os.Remove(link); err != nil {
			t.Fatal(err)
		}
	}
	if b, err := os.ReadFile(victim); err != nil || !bytes.Equal(b, secret) {
		t.Errorf("root's file has %d bytes, %v, want %d", len(b), err, len(secret))
	}
	// The user's own files are opened, even if the user cannot reach them by their paths.
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	j, err := own.openJournal(&s, "n", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	j.Close()
	f, err := own.auditOpener(&noRoot{})(s.AuditFile)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	for _, name := range []string{"n-0.journal", "audit.log"} {
		if st, err := os.Stat(filepath.Join(state, name)); err != nil || st.Sys().(*syscall.Stat_t).Uid != own.user.UID {
			t.Errorf("%s: %v, %v, want a file of the user", name, st, err)
		}
	}
}

// An executor whose own filter cannot be installed does not start if a complete sandbox is required.
func TestNoFilter(t *testing.T) {
	none := errors.New("no filters here")
	var log bytes.Buffer
	for mode, want := range map[sandbox.Mode]error{sandbox.Require: none, sandbox.On: nil, sandbox.Off: nil} {
		log.Reset()
		if err := unfiltered(none, mode, slog.New(slog.NewTextHandler(&log, nil))); !errors.Is(err, want) || (want == nil) != (log.Len() > 0) {
			t.Errorf("%v: %v; the log: %q", mode, err, &log)
		}
		if err := unfiltered(privilege.ErrArchitecture, mode, slog.New(slog.DiscardHandler)); err != nil {
			t.Errorf("%v, on an architecture without filters: %v", mode, err)
		}
		if err := unfiltered(nil, mode, slog.New(slog.DiscardHandler)); err != nil {
			t.Errorf("%v, with a filter: %v", mode, err)
		}
	}
}
