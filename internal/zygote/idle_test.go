package zygote

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// With the setting Idle, workers have the policy SCHED_IDLE and the nice value 19, whether they are confined or not, and their session
// has the smallest weight. A confined worker's child cannot leave that session. Without the setting, nothing of this holds.
func TestIdlePriority(t *testing.T) {
	const policy, nice = 40, 18 // fields of /proc/PID/stat, from 0; the first two are cut off below
	for name, box := range map[string]Sandbox{"confined": confined, "confined, idle": confined, "not confined, idle": {}} {
		t.Run(name, func(t *testing.T) {
			testSandbox = box
			testSandbox.Idle = strings.HasSuffix(name, "idle")
			defer func() { testSandbox = Sandbox{} }()
			w := lease(t, startZygote(t), startClient(t), nil)
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", w.PID()))
			if err != nil {
				t.Fatal(err)
			}
			session, err := os.ReadFile(fmt.Sprintf("/proc/%d/autogroup", w.PID()))
			if errors.Is(err, fs.ErrNotExist) {
				session = nil // the kernel does not weigh sessions
			} else if err != nil {
				t.Fatal(err)
			}
			want := [2]string{"0", "0"}
			if testSandbox.Idle {
				want = [2]string{"5", "19"}
			}
			_, rest, _ := strings.Cut(string(b), ") ")
			f := strings.Fields(rest)
			if got := [2]string{f[policy-2], f[nice-2]}; got != want {
				t.Errorf("policy and nice value are %v, want %v", got, want)
			}
			if session != nil && !strings.HasSuffix(strings.TrimSpace(string(session)), " nice "+want[1]) {
				t.Errorf("the worker's session is %q, want nice value %s", session, want[1])
			}
			var refused unix.Errno
			if testSandbox.Idle && strings.HasPrefix(name, "confined") {
				refused = unix.EPERM
			}
			if got := unix.Errno(w.mustCall(t, fnNewSession, nil)[0]); got != refused {
				t.Errorf("setsid in a child: %v, want %v", got, refused)
			}
		})
	}
}
