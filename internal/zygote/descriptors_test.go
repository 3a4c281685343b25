package zygote

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// An executor that has no descriptors left starts no worker, and its workers continue, even if only the descriptors for the
// control group of a new worker are missing.
func TestNoDescriptorsForAWorker(t *testing.T) {
	freezing(t, func(t *testing.T, z *Zygote) {
		c := startClient(t)
		there := lease(t, z, c, nil)
		code := sealedFile(t, testLibrary(t))
		var before unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Fatal(err)
		}
		started, failed := 0, 0
		for room := range uint64(40) {
			spec, _ := c.spec(t, code)
			open, err := os.ReadDir("/proc/self/fd")
			if err != nil {
				t.Fatal(err)
			}
			few := unix.Rlimit{Cur: uint64(len(open)) + room, Max: before.Max}
			if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
				t.Fatal(err)
			}
			w, err := z.Spawn(t.Context(), spec)
			if rerr := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); rerr != nil {
				t.Fatal(rerr)
			}
			if err != nil {
				failed++
			} else {
				started++
				w.Kill()
				<-w.Done()
			}
			select {
			case err := <-z.Failed():
				t.Fatalf("with room for %d descriptors everything has ended: %v", room, err)
			default:
			}
		}
		if failed == 0 || started == 0 {
			t.Errorf("%d workers have started, %d have not", started, failed)
		}
		there.mustCall(t, fnEcho, []byte("x"))
	})
}
