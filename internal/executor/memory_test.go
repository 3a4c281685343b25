package executor

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// sharedMemory is the anonymous shared memory that a process maps, by inode; nil when there is no such process.
func sharedMemory(pid int) map[string]bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil
	}
	all := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) >= 6 && strings.HasPrefix(f[5], "/dev/zero") && strings.HasSuffix(f[1], "s") {
			all[f[4]] = true
		}
	}
	return all
}

// ourChildren returns the processes that this process and its spawners have started, by id.
func ourChildren(t *testing.T) map[int]string {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	names, parents := map[int]string{}, map[int]int{}
	for _, dir := range dirs {
		text, err := os.ReadFile(dir + "/stat") // pid (name) state parent
		if err != nil {
			continue
		}
		begin, end := strings.Index(string(text), "("), strings.LastIndex(string(text), ")")
		rest := strings.Fields(string(text[end+1:]))
		if len(rest) > 1 {
			pid, _ := strconv.Atoi(filepath.Base(dir))
			names[pid] = string(text[begin+1 : end])
			parents[pid], _ = strconv.Atoi(rest[1])
		}
	}
	all := map[int]string{}
	for pid, parent := range parents {
		if parent == os.Getpid() || parents[parent] == os.Getpid() {
			all[pid] = names[pid]
		}
	}
	return all
}

// What the zygote has ready of memory is of the next worker with such a channel: not of one with another channel, nor of the zygote or
// the guard afterwards. On shm it has none.
func TestRealSpareMemory(t *testing.T) {
	r := newReal(t, "--pool", "0", "--cache-time", "0s")
	zygote := 0
	for pid, name := range ourChildren(t) {
		if name == "rfaas-zygote" {
			zygote = pid
		}
	}
	before := sharedMemory(zygote)
	if before == nil {
		t.Fatal("no zygote")
	}
	spare := func() (list []string) {
		for inode := range sharedMemory(zygote) {
			if !before[inode] {
				list = append(list, inode)
			}
		}
		return list
	}
	h, _ := r.deploy(compile(t, realSource, "-shared", "-fPIC"))
	// lease runs a worker with a channel of that depth, shows its process to look, and ends it.
	lease := func(depth int, look func(pid int)) {
		ch, err := r.endpoint.NewChannel(depth, 4096)
		if err != nil {
			t.Fatal(err)
		}
		defer ch.Close()
		blob, err := ch.Offer()
		if err != nil {
			t.Fatal(err)
		}
		l, err := r.ask(h, blob)
		if err != nil {
			t.Fatal(err)
		}
		if err := ch.Connect(l.Workers[0].Blob); err != nil {
			t.Fatal(err)
		}
		r.call(ch, 1)
		look(int(l.Workers[0].Pid))
		r.call(ch, 1)
		if _, err := r.Release(r.ctx(), &control.ReleaseRequest{LeaseId: l.LeaseId}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the worker ends", func() bool { return gone(l.Workers[0].Pid) })
	}
	lease(1, func(int) {})
	if realProvider() == dataplane.SHM {
		lease(1, func(int) {})
		if all := sharedMemory(zygote); !maps.Equal(all, before) {
			t.Errorf("the zygote has the memory %v, and had %v", all, before)
		}
		return
	}
	var old, next []string
	eventually(t, "the zygote has memory ready", func() bool { old = spare(); return len(old) == 2 })
	lease(2, func(pid int) {
		for inode := range sharedMemory(pid) {
			if slices.Contains(old, inode) {
				t.Errorf("a worker with another channel has the memory %s", inode)
			}
		}
	})
	eventually(t, "the zygote has other memory ready", func() bool {
		next = spare()
		return len(next) == 2 && !slices.Contains(old, next[0])
	})
	lease(2, func(worker int) {
		for _, inode := range next {
			if !sharedMemory(worker)[inode] {
				t.Errorf("the worker has the memory %v, not %s", sharedMemory(worker), inode)
			}
			eventually(t, "nobody else has the worker's memory", func() bool {
				for pid, name := range ourChildren(t) {
					if pid != worker && sharedMemory(pid)[inode] {
						t.Logf("%s has %s", name, inode)
						return false
					}
				}
				return true
			})
		}
	})
}
