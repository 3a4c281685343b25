package zygote

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// taken is the result of takes_cpus.
type taken struct {
	errno unix.Errno
	mask  uint64
	cores float64 // CPU time for the time that passed
}

func (l *leased) takeCPUs(t *testing.T, threads uint32) taken {
	t.Helper()
	b := l.mustCall(t, fnTakesCPUs, binary.LittleEndian.AppendUint32(nil, threads))
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	return taken{unix.Errno(word(0)), word(1), float64(word(2)) / float64(word(3))}
}

// A worker with one CPU stays on it and uses no more CPU time than it has, whatever it requests and however many
// threads it starts. Its cpuset ensures that or, without one, the filter, which refuses to change CPUs. Pooled workers
// behave in the same way.
func TestWorkerStaysOnItsCPUs(t *testing.T) {
	none := filepath.Join(t.TempDir(), "cgroup")
	if err := os.WriteFile(none, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, file := range map[string]string{"control groups": "", "filter": none} {
		for _, warm := range []bool{false, true} {
			t.Run(map[bool]string{false: "cold, ", true: "warm, "}[warm]+name, func(t *testing.T) {
				testSandbox = confined
				testSandbox.ownGroups, testSandbox.Processes = file, 1000
				defer func() { testSandbox = Sandbox{} }()
				z := startZygote(t)
				if warm {
					if err := z.KeepPool(1, Spec{Provider: "shm", GIDIndex: -1, CPUs: []int{0, 1}}); err != nil {
						t.Fatal(err)
					}
					eventually(t, "a worker waits", func() bool { return z.Waiting() == 1 })
				}
				w := lease(t, z, startClient(t), func(s *Spec) { s.CPUs = []int{1} })
				if w.Steps().Pooled != warm {
					t.Fatalf("steps %+v", w.Steps())
				}
				cpuset := w.group.HoldsCPUs()
				if file == "" && !cpuset {
					testkit.Lacks(t, "no cpuset")
				}
				one := w.takeCPUs(t, 1)
				many := w.takeCPUs(t, 512)
				for n, got := range map[int]taken{1: one, 512: many} {
					if got.mask != 1<<1 && (n > 1 || got.mask != 0) { // one thread may have had no turn on a node that is busy
						t.Errorf("%d threads ran on CPUs %#x, want CPU 1 alone", n, got.mask)
					}
					if refused := got.errno == unix.EPERM; refused == cpuset {
						t.Errorf("sched_setaffinity to all CPUs: %v", got.errno)
					}
				}
				// One thread gets at most its whole CPU. More threads get no more.
				if many.cores > 1.1 {
					t.Errorf("512 threads used %.2f CPUs, one thread %.2f", many.cores, one.cores)
				}
			})
		}
	}
}
