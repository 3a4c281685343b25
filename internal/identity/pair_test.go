package identity

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// killAtEnv makes TestKilledRenewal renew a directory and kill itself before a step.
const killAtEnv = "RFAAS_TEST_KILL_AT"

// renewUntil renews a node's directory in another process, which is killed before a step. It returns false if the renewal has fewer steps.
func renewUntil(t *testing.T, clusterDir, dir string, step int) (killed bool) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestKilledRenewal$", "-test.count=1")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d:%s:%s", killAtEnv, step, clusterDir, dir))
	out, err := cmd.CombinedOutput()
	if err == nil {
		return false
	}
	if st, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || st.Signal() != syscall.SIGKILL {
		t.Fatalf("step %d: %v: %s", step, err, out)
	}
	return true
}

// renewAndDie is the main function of the other process.
func renewAndDie(t *testing.T, how string) {
	words := strings.Split(how, ":")
	left, err := strconv.Atoi(words[0])
	if err != nil {
		t.Fatal(err)
	}
	c, err := OpenCluster(words[1])
	if err != nil {
		t.Fatal(err)
	}
	c.step = func() {
		if left--; left < 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	if _, renewed, err := c.RenewNode(words[2], 2*time.Hour, 10*time.Hour, noon); err != nil || !renewed {
		t.Fatal(renewed, err)
	}
}

// A renewal is one step: if it is killed at any point, a daemon that runs and one that starts have all old files or all new ones. The next renewal
// completes it.
func TestKilledRenewal(t *testing.T) {
	if how := os.Getenv(killAtEnv); how != "" {
		renewAndDie(t, how)
		return
	}
	c, _, clusterDir := testCluster(t, ann())
	before, after := 0, 0 // kills that left the old or the new files
	for steps := 0; ; steps++ {
		dir := filepath.Join(t.TempDir(), "node")
		if err := c.IssueNode(dir, []string{"node7"}, time.Hour, noon); err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		running, err := OpenNode(dir, nil, slog.New(slog.NewTextHandler(&log, nil)), noon)
		if err != nil {
			t.Fatal(err)
		}
		old := running.Files(noon)
		killed := renewUntil(t, clusterDir, dir, steps)
		started, err := OpenNode(dir, nil, nil, noon)
		if err != nil {
			t.Fatalf("killed before step %d: a daemon does not start: %v", steps, err)
		}
		f := started.Files(noon)
		isOld := f.Certificate.Leaf.Equal(old.Certificate.Leaf)
		if isOld != f.Page.Leaf.Equal(old.Page.Leaf) {
			t.Errorf("killed before step %d: only one of the two certificates is new", steps)
		}
		if g := running.Files(noon.Add(lookAgain)); !g.Certificate.Leaf.Equal(f.Certificate.Leaf) || !g.Page.Leaf.Equal(f.Page.Leaf) {
			t.Errorf("killed before step %d: a daemon that runs has other files than one that starts", steps)
		}
		if strings.Contains(log.String(), "cannot reload") {
			t.Errorf("killed before step %d: %s", steps, log.String())
		}
		if steps%2 == 0 {
			if err := Complete(dir); err != nil || isPending(dir) {
				t.Errorf("killed before step %d: not completed: %v", steps, err)
			}
		}
		if _, renewed, err := c.RenewNode(dir, 2*time.Hour, 10*time.Hour, noon); err != nil || renewed != isOld {
			t.Errorf("killed before step %d: renewed again: %v, %v", steps, renewed, err)
		}
		pair, err := tls.LoadX509KeyPair(filepath.Join(dir, fileNode), filepath.Join(dir, fileNodeKey)) // for programs that do not know filePending
		if err != nil || pair.Leaf.Equal(old.Certificate.Leaf) {
			t.Errorf("killed before step %d: after the next renewal: %v", steps, err)
		}
		if files, _ := filepath.Glob(filepath.Join(dir, ".*")); len(files) > 0 {
			t.Errorf("killed before step %d: left: %q", steps, files)
		}
		if !killed {
			break
		}
		if isOld {
			before++
		} else {
			after++
		}
	}
	if before < 8 || after < 7 {
		t.Errorf("%d kills left the old files and %d the new ones, want one kill for each file", before, after)
	}
}

// A revocation list that an administrator copies into the directory after a killed renewal is in force, and stays so.
func TestRevocationsAfterKilledRenewal(t *testing.T) {
	c, _, clusterDir := testCluster(t, ann())
	dir := filepath.Join(t.TempDir(), "node")
	if err := c.IssueNode(dir, []string{"node7"}, time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	for steps := 0; !isPending(dir); steps++ {
		if !renewUntil(t, clusterDir, dir, steps) {
			t.Fatal("the new files are never in force before they are in their places")
		}
	}
	if _, err := os.Stat(filepath.Join(dir, fileRevoked)); err != nil {
		t.Fatal(err)
	}
	id := strings.Repeat("ab", 16)
	list, _, err := c.Revoke(noon, Revocation{Kind: RevokedToken, ID: id})
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(clusterDir, fileRevoked))
	if err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(filepath.Join(dir, fileRevoked), text, 0o644, false); err != nil {
		t.Fatal(err)
	}
	for _, when := range []string{"before", "after"} {
		n, err := OpenNode(dir, nil, nil, noon)
		if err != nil {
			t.Fatal(err)
		}
		if revoked, err := n.Revoked.Has(RevokedToken, id, noon); !revoked || err != nil || n.Revoked.Serial(noon) != list.Serial {
			t.Errorf("%s the renewal was completed: revoked %t, serial %d: %v", when, revoked, n.Revoked.Serial(noon), err)
		}
		if _, _, err := c.RenewNode(dir, 2*time.Hour, 10*time.Hour, noon); err != nil {
			t.Fatal(err)
		}
	}
}

// A file that names no suffix is not followed, and its content is not shown.
func TestPendingMalformed(t *testing.T) {
	c, _, _ := testCluster(t, ann())
	for _, text := range []string{"", "secret", "{}", `{"suffix":"../secret","old":{"node.crt":""}}`, `{"suffix":"-1"}`, strings.Repeat(" ", maxPending) + `{"suffix":"1"}`} {
		dir := filepath.Join(t.TempDir(), "node")
		if err := c.IssueNode(dir, []string{"node7"}, time.Hour, noon); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, filePending), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenNode(dir, nil, nil, noon); err != nil {
			t.Errorf("%q: a daemon does not start: %v", text, err)
		}
		if err := c.IssueNode(dir, []string{"node7"}, time.Hour, noon); err == nil || !strings.Contains(err.Error(), "remove it") || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", text, err)
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
