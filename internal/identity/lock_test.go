package identity

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func issued(t *testing.T) (*Cluster, string) {
	t.Helper()
	c, _, _ := testCluster(t, ann())
	dir := filepath.Join(t.TempDir(), "node")
	if err := c.IssueNode(dir, []string{"node7"}, time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	return c, dir
}

func serialIn(t *testing.T, dir string) uint64 {
	t.Helper()
	l, err := OpenRevocations(dir)
	if err != nil {
		t.Fatal(err)
	}
	return l.Serial
}

// A command that finds the directory locked gives up, and names the process that holds the lock.
func TestLockIsBounded(t *testing.T) {
	c, dir := issued(t)
	lock, err := lockDir(dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	c.patience = 50 * time.Millisecond
	_, _, err = c.RenewNode(dir, 2*time.Hour, 10*time.Hour, noon)
	if err == nil {
		t.Fatal("a locked directory was renewed")
	}
	for _, text := range []string{"lock " + dir, fmt.Sprintf("process %d (", os.Getpid()), "repeat the command"} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("the error does not contain %q: %v", text, err)
		}
	}
	lock.Close()
	if _, renewed, err := c.RenewNode(dir, 2*time.Hour, 10*time.Hour, noon); err != nil || !renewed {
		t.Errorf("without the lock: %v, %v", renewed, err)
	}
}

// The list of revoked credentials is read under the lock of the directory, so that a command that waited for the lock neither writes an older
// list than the one before it, nor issues a certificate for a node that was revoked meanwhile.
func TestListIsReadUnderTheLock(t *testing.T) {
	c, dir := issued(t)
	old, err := ReadCertificate(dir)
	if err != nil {
		t.Fatal(err)
	}
	lock, err := lockDir(dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	looked, done := make(chan struct{}), make(chan error)
	go func() {
		list, err := c.Revocations() // as RenewNode looks before it waits
		if err != nil || len(list.Entries) > 0 {
			t.Error(list, err)
		}
		close(looked)
		done <- c.issueNode(dir, []string{"node7"}, time.Hour, noon, func(list *RevocationList) error {
			if held, err := lockDir(dir, 0); err == nil {
				held.Close()
				t.Error("the directory is not locked")
			}
			if len(list.Entries) != 1 {
				t.Errorf("the list has %d entries", len(list.Entries))
			}
			return nil
		})
	}()
	<-looked
	l, _, err := c.Revoke(noon, Revocation{Kind: RevokedNode, ID: NodeSerial(old)})
	if err != nil {
		t.Fatal(err)
	}
	lock.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got := serialIn(t, dir); got != l.Serial {
		t.Errorf("the directory has list %d, and %d was valid", got, l.Serial)
	}
}

// Each new file has the owner and the mode of the file that it replaces. A key becomes readable for its owner alone.
func TestRenewalKeepsOwners(t *testing.T) {
	c, dir := issued(t)
	uid, gid := os.Getuid(), os.Getgid()
	if uid == 0 {
		uid, gid = 12345, 54321
	}
	modes := map[string]fs.FileMode{fileNode: 0o640, fileNodeKey: 0o440, fileRevoked: 0o600}
	want := map[string]fs.FileMode{fileNode: 0o640, fileNodeKey: 0o400, fileRevoked: 0o600, fileCA: 0o644}
	for _, name := range []string{fileNode, fileNodeKey, fileRevoked, fileCA} {
		path := filepath.Join(dir, name)
		if err := os.Chown(path, uid, gid); err != nil {
			t.Fatal(err)
		}
		if mode, ok := modes[name]; ok {
			if err := os.Chmod(path, mode); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, renewed, err := c.RenewNode(dir, 2*time.Hour, 10*time.Hour, noon); err != nil || !renewed {
		t.Fatal(renewed, err)
	}
	for name, mode := range want {
		st, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		sys := st.Sys().(*syscall.Stat_t)
		if st.Mode().Perm() != mode || int(sys.Uid) != uid || int(sys.Gid) != gid {
			t.Errorf("%s has mode %v and belongs to %d:%d, want %v and %d:%d", name, st.Mode().Perm(), sys.Uid, sys.Gid, mode, uid, gid)
		}
	}
}

// The next command removes temporary files that a killed one has left, and no others.
func TestStagedFilesAreRemoved(t *testing.T) {
	c, dir := issued(t)
	other := []string{filepath.Join(dir, "."+fileNodeKey+"-mine"), filepath.Join(dir, "node.key-1234")}
	left, err := stage(filepath.Join(dir, fileNodeKey), []byte("key"), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	list, err := stage(filepath.Join(c.dir, fileRevoked), []byte("list"), 0o644)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range other {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.IssueNode(dir, []string{"node7"}, time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Revoke(noon); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{left, list} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	for _, path := range other {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
}
