package spawner

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// What /proc reports of a process's files, and of its end. For the check in a whole system see
// TestUnreachableWorkerIsReplaced in client, on verbs.
func TestDeviceState(t *testing.T) {
	name := filepath.Join(t.TempDir(), deviceFile+"7")
	if got := deviceState(os.Getpid()); got != wire.DeviceClosed {
		t.Errorf("before it is open: %d", got)
	}
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	if got := deviceState(os.Getpid()); got != wire.DeviceOpen {
		t.Errorf("while it is open: %d", got)
	}
	f.Close()
	if got := deviceState(os.Getpid()); got != wire.DeviceClosed {
		t.Errorf("after it was closed: %d", got)
	}
	// The descriptors of an ending process were closed by its end and not by a function.
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	proc := fmt.Sprintf("/proc/%d", cmd.Process.Pid)
	for !exiting(proc) { // it is not reaped before Wait
	}
	if got := deviceState(cmd.Process.Pid); got != wire.DeviceUnknown {
		t.Errorf("after its end: %d", got)
	}
	if got := deviceState(0); got != wire.DeviceUnknown {
		t.Errorf("of no process: %d", got)
	}
}

func TestProcessFlags(t *testing.T) {
	for stat, want := range map[string]uint64{
		"12 (a) S 1 2 3 4 5 4194308 7\n":      4194308,
		"12 (a b) 9) R 1 2 3 4 5 0 7 8 9 10":  0,
		"12 (rfaas-w1) Z 1 2 3 4 5 4227084 7": 4227084,
	} {
		if got, err := processFlags(stat); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", stat, got, err, want)
		}
	}
	for _, stat := range []string{"", "12 a S 1 2 3 4 5 6 7", "12 (a) S 1 2 3", "12 (a) S 1 2 3 4 5 x"} {
		if got, err := processFlags(stat); err == nil {
			t.Errorf("%q: %d", stat, got)
		}
	}
}
