package zygote

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// With the setting Idle, workers have the policy SCHED_IDLE and the nice value 19, whether they are confined or not. Without it they have neither.
func TestIdlePriority(t *testing.T) {
	const policy, nice = 40, 18 // fields of /proc/PID/stat, from 0; the first two are cut off below
	for name, box := range map[string]Sandbox{"confined": confined, "confined, idle": confined, "not confined, idle": {}} {
		t.Run(name, func(t *testing.T) {
			testSandbox = box
			testSandbox.Idle = strings.HasSuffix(name, "idle")
			defer func() { testSandbox = Sandbox{} }()
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", lease(t, startZygote(t), startClient(t), nil).PID()))
			if err != nil {
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
		})
	}
}
