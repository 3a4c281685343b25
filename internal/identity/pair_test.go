package identity

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// After each step of an interrupted renewal, a daemon has the old certificate, or the new one with its own key, and the
// next renewal completes.
func TestInterruptedRenewal(t *testing.T) {
	c, _, _ := testCluster(t, ann())
	crash := errors.New("crashed")
	for steps := 0; ; steps++ {
		dir := filepath.Join(t.TempDir(), "node")
		if err := c.IssueNode(dir, []string{"node7"}, time.Hour, noon); err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		n, err := OpenNode(dir, nil, slog.New(slog.NewTextHandler(&log, nil)), noon)
		if err != nil {
			t.Fatal(err)
		}
		old := n.Files(noon).Certificate.Leaf
		left := steps
		c.rename = func(from, to string) error {
			if left--; left < 0 {
				return crash
			}
			return os.Rename(from, to)
		}
		_, renewed, err := c.RenewNode(dir, 2*time.Hour, 10*time.Hour, noon)
		c.rename = os.Rename
		if err == nil {
			if !renewed || steps < 7 {
				t.Errorf("renewed is %v after %d steps", renewed, steps)
			}
			return
		}
		if !errors.Is(err, crash) {
			t.Fatal(err)
		}
		now := noon.Add(lookAgain)
		f := n.Files(now)
		if !f.Certificate.Leaf.Equal(old) {
			t.Errorf("after %d steps the daemon has a new certificate, although the renewal is not complete", steps)
		}
		if err := checkPairs(dir); err != nil {
			for _, name := range []string{"cannot reload the identity; the old files stay in use", ".crt and key ", ".key: "} {
				if !strings.Contains(log.String(), name) {
					t.Errorf("after %d steps the log does not contain %q: %s", steps, name, log.String())
				}
			}
		}
		if _, renewed, err := c.RenewNode(dir, 2*time.Hour, 10*time.Hour, noon); err != nil || !renewed {
			t.Errorf("renewed again after %d steps: %v, %v", steps, renewed, err)
		}
		if f := n.Files(now.Add(lookAgain)); f.Certificate.Leaf.Equal(old) {
			t.Errorf("the daemon does not use the certificate of the second renewal: %s", log.String())
		}
		if files, _ := filepath.Glob(filepath.Join(dir, ".*-*")); len(files) > 0 {
			t.Errorf("temporary files are left: %q", files)
		}
	}
}

// A certificate that is not due is reported if it does not belong to the key beside it. Neither file is changed.
func TestRenewMismatched(t *testing.T) {
	c, _, _ := testCluster(t, ann())
	for _, pair := range [][2]string{{fileNode, fileNodeKey}, {filePage, filePageKey}} {
		dir, other := filepath.Join(t.TempDir(), "node"), filepath.Join(t.TempDir(), "other")
		for _, d := range []string{dir, other} {
			if err := c.IssueNode(d, []string{"node7", "10.0.0.7"}, 10*time.Hour, noon); err != nil {
				t.Fatal(err)
			}
		}
		key, err := os.ReadFile(filepath.Join(other, pair[1]))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, pair[1]), key, 0o600); err != nil {
			t.Fatal(err)
		}
		_, renewed, err := c.RenewNode(dir, time.Hour, 20*time.Hour, noon)
		if err == nil || renewed {
			t.Fatalf("%s: renewed %v, %v", pair[1], renewed, err)
		}
		for _, text := range []string{filepath.Join(dir, pair[0]), filepath.Join(dir, pair[1]), "rfaas cluster node --out " + dir + " node7 10.0.0.7"} {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("the error does not contain %q: %v", text, err)
			}
		}
		if now, err := os.ReadFile(filepath.Join(dir, pair[1])); err != nil || !bytes.Equal(now, key) {
			t.Errorf("%s was changed", pair[1])
		}
	}
}

// Concurrent renewals of one directory leave pairs that belong together.
func TestConcurrentRenewals(t *testing.T) {
	c, _, _ := testCluster(t, ann())
	dir := filepath.Join(t.TempDir(), "node")
	if err := c.IssueNode(dir, []string{"node7"}, time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if err := c.IssueNode(dir, []string{"node7"}, time.Hour, noon); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if err := checkPairs(dir); err != nil {
		t.Error(err)
	}
}
