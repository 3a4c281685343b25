package slurm

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// traces has what executors of a cluster might leave on its nodes.
type traces struct {
	c      *cluster
	groups []string        // prefixes of the names of their control groups, one for each process namespace
	places map[string]bool // directories of secrets, and whether they existed
}

// traces returns the traces of the executors that run.
func (c *cluster) traces() *traces {
	c.t.Helper()
	tr := &traces{c: c, places: map[string]bool{"/run/rfaas": false, filepath.Join(os.Getenv("HOME"), ".rfaas"): false}}
	for place := range tr.places {
		_, err := os.Stat(place)
		tr.places[place] = err == nil
	}
	for _, pid := range processes("executor\x00--listen") {
		env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if space, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)); err == nil && bytes.Contains(env, []byte("RFAAS_SECRET_FILE="+c.files)) {
			tr.groups = append(tr.groups, "rfaas-"+strings.Trim(space, "pid:[]")+".")
		}
	}
	slices.Sort(tr.groups)
	if tr.groups = slices.Compact(tr.groups); len(tr.groups) == 0 {
		c.t.Fatal("no executor of the cluster is found by its environment")
	}
	c.t.Logf("executors in %d process namespaces have %d control groups", len(tr.groups), len(tr.made()))
	return tr
}

// made returns the control groups of the executors. Groups that are older than the cluster are those of executors of an earlier test, which were killed
// in a namespace whose number the kernel has used again.
func (tr *traces) made() (found []string) {
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && slices.ContainsFunc(tr.groups, func(prefix string) bool { return strings.HasPrefix(e.Name(), prefix) }) {
			if st, err := e.Info(); err == nil && st.ModTime().After(tr.c.began) {
				found = append(found, path)
			}
		}
		return nil // other control groups may vanish during the walk
	})
	return found
}

// gone waits until nothing of the executors is left: no control group, no secret, and no temporary file on their nodes.
func (tr *traces) gone(nodes int) {
	c := tr.c
	c.t.Helper()
	wait(c.t, "no control group is left", func() bool { return len(tr.made()) == 0 })
	for place, was := range tr.places {
		if _, err := os.Stat(place); (err == nil) != was {
			c.t.Errorf("%s is there: %v; before: %v", place, err == nil, was)
		}
	}
	_ = filepath.WalkDir(c.files, func(path string, e fs.DirEntry, err error) error {
		if err == nil && strings.Contains(e.Name(), "secret") && path != filepath.Join(c.files, "secret") {
			c.t.Errorf("%s is left", path)
		}
		return nil
	})
	for i := range nodes {
		node := fmt.Sprint("n", i+1)
		if left := c.must(node, "sh", "-c", `find "$TMPDIR" /dev/shm -mindepth 1`); left != "" {
			c.t.Errorf("files are left on %s:\n%s", node, left)
		}
	}
}
