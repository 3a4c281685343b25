package capi

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/agent"
)

// leadUnder starts a client from a shell that has run a script.
func leadUnder(t *testing.T, script string, env ...string) *led {
	t.Helper()
	return leadBy(t, exec.Command("bash", "-c", script+` && exec "$@"`, "bash", agentProgram(t), built(t, "build/functions/echo.so"), "1", "0"), env...)
}

// proc returns a field of a file of the agent in /proc, without surrounding spaces.
func proc(t *testing.T, pid int, file, field string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, field); ok {
			return strings.TrimSpace(rest)
		}
	}
	t.Fatalf("no %q in %s:\n%s", field, file, b)
	return ""
}

// An agent does not inherit the settings of the process that starts it.
func TestAgentInheritsNoSettings(t *testing.T) {
	crosses(t)
	soft := func(line string) string { return strings.Fields(line)[0] }
	same := func(field string) func(*testing.T, int) {
		return func(t *testing.T, pid int) {
			if f := strings.Fields(proc(t, pid, "limits", field)); f[0] != f[1] {
				t.Errorf("%s: %v: the soft limit is not the hard one", field, f)
			}
		}
	}
	for name, test := range map[string]struct {
		script string
		check  func(t *testing.T, agent int)
	}{
		"few files":           {"ulimit -Sn 32", same("Max open files")},
		"small address space": {"ulimit -Sv 600000", same("Max address space")},
		"little data":         {"ulimit -Sd 60000", same("Max data size")},
		"short files":         {"ulimit -Sf 4000000", same("Max file size")},
		"a second of time":    {"ulimit -St 1", same("Max cpu time")},
		"no more than a second of time": {"ulimit -t 1", func(t *testing.T, pid int) {
			if l := soft(proc(t, pid, "limits", "Max cpu time")); l != "1" {
				t.Errorf("%s s of processor time", l)
			}
		}},
		"small stacks": {"ulimit -Ss 256", func(t *testing.T, pid int) {
			l := soft(proc(t, pid, "limits", "Max stack size"))
			if n, err := strconv.Atoi(l); l != "unlimited" && (err != nil || n < 8<<20) {
				t.Errorf("stacks of %s bytes", l)
			}
		}},
		"one CPU": {"taskset -p -c $(taskset -p -c $$ | sed 's/.*: *//; s/[-,].*//') $$ >/dev/null", func(t *testing.T, pid int) {
			tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
			if err != nil {
				t.Fatal(err)
			}
			most := proc(t, os.Getpid(), "status", "Cpus_allowed_list:") // or fewer than the node's cpuset
			for _, task := range tasks {
				if got := proc(t, pid, "task/"+task.Name()+"/status", "Cpus_allowed_list:"); len(got) < len(most) {
					t.Errorf("thread %s may run on the CPUs %s only, this process on %s", task.Name(), got, most)
				}
			}
		}},
		"open umask": {"umask 0", func(t *testing.T, pid int) {
			if m := proc(t, pid, "status", "Umask:"); m != "0077" {
				t.Errorf("umask %s, want 0077", m)
			}
		}},
		"a directory": {"cd " + t.TempDir(), func(t *testing.T, pid int) {
			if d, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid)); err != nil || d != "/" {
				t.Errorf("it is in %s, %v", d, err)
			}
		}},
		"first victim": {"echo 300 > /proc/self/oom_score_adj", func(t *testing.T, pid int) {
			if s := proc(t, pid, "oom_score_adj", ""); s != "0" {
				t.Errorf("its score is %s", s)
			}
		}},
		"low priority": {"renice -n 5 $$ >/dev/null", func(t *testing.T, pid int) {
			if os.Getuid() != 0 {
				return // an ordinary user may not raise it again
			}
			stat := proc(t, pid, "stat", "")
			if nice := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])[16]; nice != "0" {
				t.Errorf("its nice value is %s", nice)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			env, socket, _ := agentCluster(t)
			c := leadUnder(t, test.script, env...)
			c.do("init", "session", "open", "calls 100")
			pid := agentStatus(t, socket).PID
			test.check(t, pid)
			c.do("calls 100", "release", "close")
		})
	}
}

// The agent inherits no variable that changes how its loader, its allocator or its runtime behaves. It inherits all others.
func TestAgentInheritsNoRuntimeSettings(t *testing.T) {
	crosses(t)
	refused := []string{"LD_PRELOAD=libm.so.6", "LD_BIND_NOW=1", "MALLOC_ARENA_MAX=1", "GLIBC_TUNABLES=glibc.malloc.arena_max=1", "GOGC=10",
		"GOMEMLIMIT=200MiB", "GOMAXPROCS=2", "GODEBUG=madvdontneed=1", "GOTRACEBACK=crash"}
	kept := []string{"LD_LIBRARY_PATH=/usr/lib", "GOOGLE=1", "RFAAS_AGENT_LINGER=11s"}
	env, socket, _ := agentCluster(t)
	c := lead(t, 1, 0, slices.Concat(env, refused, kept)...)
	c.do("init", "session")
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", agentStatus(t, socket).PID))
	if err != nil {
		t.Fatal(err)
	}
	has := strings.Split(string(b), "\x00")
	for _, v := range refused {
		name, _, _ := strings.Cut(v, "=")
		if slices.ContainsFunc(has, func(h string) bool { return strings.HasPrefix(h, name+"=") }) {
			t.Errorf("the agent has inherited %s", name)
		}
	}
	for _, v := range kept {
		if !slices.Contains(has, v) {
			t.Errorf("the agent has not inherited %s", v)
		}
	}
}

// If no agent can run within the limits, the program's error names the limit and says what to do.
func TestAgentCannotRun(t *testing.T) {
	crosses(t)
	for name, test := range map[string]struct{ script, want string }{
		"few files":           {"ulimit -n 32", "open files is 32 files, want at least 64: raise it (ulimit -n)"},
		"small address space": {"ulimit -v 600000", "address space is 600000 KiB, want at least 2097152: raise it (ulimit -v)"},
		"little data":         {"ulimit -d 60000", "data is 60000 KiB, want at least 262144: raise it (ulimit -d)"},
	} {
		t.Run(name, func(t *testing.T) {
			env, socket, _ := agentCluster(t)
			c := leadUnder(t, test.script, env...)
			c.do("init")
			if a := c.ask("session"); a.status == 0 || !strings.Contains(a.text, test.want) || !strings.Contains(a.text, "rfaas-agent --socket") {
				t.Errorf("status %d: %s", a.status, a.text)
			}
			lead(t, 1, 0, env...).do("init", "session", "open", "calls 100", "release") // starts the agent
			if agentStatus(t, socket).PID == 0 {
				t.Error("no agent")
			}
			c.do("session", "open", "calls 100", "release", "close")
		})
	}
}

// When the kernel kills an agent for its processor time, another agent starts, and no lease is lost.
func TestAgentRunsOutOfTime(t *testing.T) {
	crosses(t)
	env, socket, _ := agentCluster(t)
	c := leadUnder(t, "ulimit -t 1", env...)
	c.do("init", "session", "open", "calls 10")
	first := agentStatus(t, socket).PID
	for last := first; last == first; {
		last = agentAt(socket)
	}
	c.do("calls 10", "renew", "calls 10", "release", "close")
}

// agentAt makes the agent at a socket work, and returns its process; 0 if none listens.
func agentAt(socket string) int {
	s, err := agent.Ask(context.Background(), socket)
	if err != nil {
		return 0
	}
	return s.PID
}
