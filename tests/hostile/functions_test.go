package hostile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
)

const function = "function"

// lease takes a lease for eve. It is released at the end of the attack.
func (c *cluster) lease(o client.LeaseOptions) *client.Lease {
	c.Helper()
	if o.Library == "" && o.Code == nil {
		o.Library = c.library
	}
	if o.Memory == 0 {
		o.Memory = 64 << 20
	}
	l, err := c.eve.Lease(c.within(patience), o)
	if err != nil {
		c.Fatalf("lease: %v", err)
	}
	c.Cleanup(func() { l.Release(context.Background()) })
	return l
}

// call invokes a function of testdata and returns its text.
func (c *cluster) call(l *client.Lease, name, arg string) (string, error) {
	c.Helper()
	f, err := l.Function(name)
	if err != nil {
		c.Fatal(err)
	}
	out := make([]byte, 4096)
	n, err := f.Invoke(c.within(patience), []byte(arg), out)
	return string(out[:n]), err
}

// asks returns an attack that invokes one function. The function's text is what the attacker got.
func asks(name, attackName, expect string, arg func(*cluster) string) attack {
	return attack{function, attackName, expect, func(c *cluster) string {
		got, err := c.call(c.lease(client.LeaseOptions{}), name, arg(c))
		if err != nil {
			return fmt.Sprintf("the function did not come back: %v", err)
		}
		return got
	}}
}

func text(s string) func(*cluster) string { return func(*cluster) string { return s } }

func lines(s ...string) func(*cluster) string { return text(strings.Join(s, "\n")) }

// inside returns paths in the cluster's directory, one a line.
func inside(names ...string) func(*cluster) string {
	return func(c *cluster) string {
		var paths []string
		for _, n := range names {
			paths = append(paths, c.in(n))
		}
		return strings.Join(paths, "\n")
	}
}

func executorPID(c *cluster) string { return fmt.Sprint(c.executor.cmd.Process.Pid) }

// calls returns an attack that makes system calls by their numbers.
func calls(name string, list ...string) attack {
	return asks("makes_calls", name, "EPERM or ENOSYS", lines(list...))
}

func sys(name string, number int, args ...any) string {
	return strings.TrimSpace(fmt.Sprintln(append([]any{name, number}, args...)...))
}

func functionAttacks() []attack {
	none := text("")
	list := []attack{
		asks("reads_paths", "read the node's secrets", "not in sight",
			lines("/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh", "/root", "/home", "/var/lib", "/var/log", "/var/spool", "/run", "/boot", "/etc/slurm", "/etc/munge")),
		asks("reads_paths", "read the identities and keys of the cluster", "not in sight",
			inside("node-a/node.key", "node-a", "cluster", "executor-secret", "resource-manager-secret", "ann.token", ".")),
		asks("reads_paths", "read the journal and the ledger", "not in sight", inside("executor-state", "resource-manager-state")),
		{function, "read another tenant's /tmp", "not in sight", readsOthersTmp},
		asks("reads_memory", "read /proc of the first process, parent, executor", "EACCES or not in sight", executorPID),
		asks("creates_everywhere", "create files outside of /tmp", "EROFS or EACCES", none),
		asks("writes_paths", "write to /sys, /proc/sys, control groups", "not in sight or EROFS", lines("/sys/kernel/mm/transparent_hugepage/enabled",
			"/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/cgroup.procs", "/sys/fs/cgroup/cpuset/cgroup.procs", "/sys/class/net", "/proc/sys/kernel/core_pattern",
			"/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger", "/proc/1/oom_score_adj", "/proc/self/uid_map", "/proc/self/setgroups")),
		asks("fills_tmp", "fill /tmp with bytes and names", "64 MiB and 16384 names", none),
		asks("reads_paths", "open device files", "not in sight", lines("/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/dev/kvm", "/dev/fuse",
			"/dev/net/tun", "/dev/infiniband", "/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm", "/dev/vhost-net", "/dev/userfaultfd",
			"/dev/sda", "/dev/vda", "/dev/console", "/dev/disk")),
		asks("makes_setuid_root", "make a file setuid root", "EPERM", none),
		asks("makes_devices", "make device files", "EPERM", none),
		asks("runs_setuid", "run a setuid program as root", "not root", text("/usr/bin/su")),
		asks("environment", "read the executor's environment", "not there", text(variable)),
		asks("descriptors", "use descriptors of the executor", "only its own", text("9")),
		asks("device", "open the RDMA device again", "not in sight", none),

		asks("opens_socket", "socket AF_INET", "EPERM", text(fmt.Sprint(unix.AF_INET, unix.SOCK_STREAM, 0))),
		asks("opens_socket", "socket AF_INET6", "EPERM", text(fmt.Sprint(unix.AF_INET6, unix.SOCK_DGRAM, 0))),
		asks("opens_socket", "socket AF_UNIX", "EPERM", text(fmt.Sprint(unix.AF_UNIX, unix.SOCK_STREAM, 0))),
		asks("opens_socket", "socket AF_NETLINK", "EPERM", text(fmt.Sprint(unix.AF_NETLINK, unix.SOCK_RAW, 0))),
		asks("opens_socket", "socket AF_PACKET", "EPERM", text(fmt.Sprint(unix.AF_PACKET, unix.SOCK_RAW, 3))),
		asks("opens_socket", "socket AF_VSOCK", "EPERM", text(fmt.Sprint(unix.AF_VSOCK, unix.SOCK_STREAM, 0))),
		asks("opens_socket", "socket AF_ALG", "EPERM", text(fmt.Sprint(unix.AF_ALG, unix.SOCK_SEQPACKET, 0))),
		asks("network", "send, bind, connect to abstract names by a pair", "EPERM", none),
		asks("squats", "squat the abstract name of a client", "EPERM", none),
		asks("attaches_filter", "attach a packet filter to a socketpair", "EPERM", none),

		asks("traces", "ptrace the first process, parent, child", "EPERM", none),
		asks("copies_memory", "copy memory of the first process, parent, executor", "EPERM", executorPID),
		{function, "kill the executor and every process in reach", "nobody else dies", killsAll},
		asks("processes", "see or signal the executor", "ESRCH", executorPID),
		asks("takes_ids", "become root, take capabilities", "EPERM", none),
		asks("privileges", "clone into the executor, keep groups, raise limits", "EPERM", none),
		asks("makes_spaces", "make namespaces by unshare and clone", "EPERM", none),
		asks("enters_spaces", "enter namespaces of others", "EPERM", none),
		asks("mounts", "mount, unmount, open_tree, fsopen", "EPERM", none),
		asks("changes_root", "chroot, pivot_root, escape by ..", "EPERM", none),
		{function, "reach a System V segment of the node", "EINVAL", reachesSegment},
		{function, "leave a double-forked child behind", "ended with its worker", leavesBehind},

		calls("bpf", sys("bpf", unix.SYS_BPF, 0, "page", 128)),
		calls("perf_event_open", sys("perf_event_open", unix.SYS_PERF_EVENT_OPEN, "page", 0, -1, -1, 0)),
		calls("io_uring", sys("io_uring_setup", unix.SYS_IO_URING_SETUP, 1, "page"), sys("io_uring_enter", unix.SYS_IO_URING_ENTER, 0, 0, 0, 0),
			sys("io_uring_register", unix.SYS_IO_URING_REGISTER, 0, 0, 0, 0)),
		calls("userfaultfd", sys("userfaultfd", unix.SYS_USERFAULTFD, 1)),
		calls("keys", sys("keyctl", unix.SYS_KEYCTL, 0, -3, 0), sys("add_key", unix.SYS_ADD_KEY, "page", "page", "page", 1, -3),
			sys("request_key", unix.SYS_REQUEST_KEY, "page", "page", "page", -3)),
		calls("kernel modules", sys("init_module", unix.SYS_INIT_MODULE, "page", 1, "page"), sys("finit_module", unix.SYS_FINIT_MODULE, 1, "page", 0),
			sys("delete_module", unix.SYS_DELETE_MODULE, "page", 0)),
		calls("kexec and reboot", sys("kexec_load", unix.SYS_KEXEC_LOAD, 0, 0, 0, 0), sys("kexec_file_load", unix.SYS_KEXEC_FILE_LOAD, 0, 0, 0, 0, 0),
			sys("reboot", unix.SYS_REBOOT, 0xfee1dead, 672274793, 0)),
		calls("personality", sys("personality", unix.SYS_PERSONALITY, 0x0400000), sys("personality", unix.SYS_PERSONALITY, 0x0040000)),
		calls("clock, host name, swap, accounting", sys("clock_settime", unix.SYS_CLOCK_SETTIME, 0, "page"), sys("settimeofday", unix.SYS_SETTIMEOFDAY, "page", 0),
			sys("sethostname", unix.SYS_SETHOSTNAME, "page", 1), sys("swapon", unix.SYS_SWAPON, "page", 0), sys("acct", unix.SYS_ACCT, 0),
			sys("syslog", unix.SYS_SYSLOG, 3, "page", 64), sys("quotactl", unix.SYS_QUOTACTL, 0, 0, 0, 0)),
		calls("handles, fanotify, pidfd_getfd, kcmp", sys("open_by_handle_at", unix.SYS_OPEN_BY_HANDLE_AT, 1, "page", 0), sys("fanotify_init", unix.SYS_FANOTIFY_INIT, 0, 0),
			sys("pidfd_getfd", unix.SYS_PIDFD_GETFD, 1, 0, 0), sys("kcmp", unix.SYS_KCMP, 1, 1, 0, 0, 0), sys("seccomp", unix.SYS_SECCOMP, 0, 0, 0)),
		asks("calls", "other system calls that computing does not need", "EPERM or ENOSYS", none),

		asks("takes_huge_pages", "take huge pages: memfd, mmap, System V", "EPERM", none),
		asks("dumps_core", "leave a core file", "RLIMIT_CORE is 0", none),
		asks("raises_hard_limits", "raise hard limits", "EPERM", none),
		{function, "open a hundred thousand descriptors", "far fewer than the executor", opensDescriptors},
		{function, "fork without end", "sandbox-processes", forks},
		{function, "fork without end, as the user of a token", "sandbox-processes", forksAsUser},
		asks("takes_priority", "schedule in real time", "EPERM", none),
		asks("lowers_nice", "nice below 0", "EPERM", none),
		{function, "512 threads on all processors", "processors and time of its one core", spreads},
		{function, "run on while cached, by a SIGCONT timer", "no processor time", wakesItself},
		{function, "burn processor time in a forked child", "billed", burnsInChild},

		eats("private memory beyond the limit", "eats_memory", "200"),
		eats("shared memory beyond the limit", "eats_shared_memory", "200"),
		eats("memory of a memfd beyond the limit", "eats_shared_memory", "200 memfd"),
		eats("System V memory beyond the limit", "eats_shared_memory", "200 segment"),
		eats("memory in children beyond the limit", "eats_in_children", "8 30"),
		{function, "memory of a large channel", "reserved, or refused", touchesChannel},

		{function, "forge the page against the call limit", "ended by the limit", forgesPage},
		{function, "forge lines of the log by a death and by output", "no line, no control character", forgesLog},
		{function, "print without end", "executor stays idle and small", prints},
		{function, "close all descriptors", "harms its own lease alone", breaksItself("closes_all")},
		{function, "overwrite its queues", "harms its own lease alone", breaksItself("overwrites_queues")},
		{function, "a constructor that hangs", "no lease, its core is free again", hangsInConstructor},
		{function, "a library that is a compression bomb", "memory of the executor bounded", bombs},
		{function, "garbage and truncated libraries", "refused", garbage},
	}
	return list
}

func readsOthersTmp(c *cluster) string {
	const name = "of-ann"
	f, err := c.victim.Function("leaves_file")
	if err != nil {
		c.Fatal(err)
	}
	out := make([]byte, 4096)
	if n, err := f.Invoke(c.within(patience), []byte(name), out); err != nil || n > 0 {
		c.Fatalf("no file to look for: %s %v", out[:n], err)
	}
	got, err := c.call(c.lease(client.LeaseOptions{}), "finds_file", name)
	if err != nil {
		return err.Error()
	}
	return got
}

func killsAll(c *cluster) string {
	got, err := c.call(c.lease(client.LeaseOptions{}), "kills_all", executorPID(c))
	var e *client.Error
	if err != nil && !errors.As(err, &e) {
		return err.Error()
	}
	return got // the worker itself may be dead; harm() looks at the others
}

func reachesSegment(c *cluster) string {
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, 4096, unix.IPC_CREAT|0o666)
	if err != nil {
		c.Fatal(err)
	}
	defer unix.SysvShmCtl(id, unix.IPC_RMID, nil)
	got, err := c.call(c.lease(client.LeaseOptions{}), "ipc", fmt.Sprint(id))
	if err != nil {
		return err.Error()
	}
	return got
}

// named returns the id of a process with this name, or 0.
func named(name string) int {
	files, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, f := range files {
		if b, _ := os.ReadFile(f); string(b) == name+"\n" {
			var pid int
			fmt.Sscanf(f, "/proc/%d/", &pid)
			return pid
		}
	}
	return 0
}

func leavesBehind(c *cluster) string {
	const name = "hostile-child"
	l := c.lease(client.LeaseOptions{})
	if got, err := c.call(l, "leaves_behind", name); err != nil || got != "" {
		c.Fatalf("no child: %s %v", got, err)
	}
	if named(name) == 0 {
		c.Fatal("the child is not there: the attack shows nothing")
	}
	l.Release(c.within(patience))
	if pid := named(name); pid != 0 {
		unix.Kill(pid, unix.SIGKILL)
		return "a process outlives its lease"
	}
	return ""
}

func opensDescriptors(c *cluster) string {
	got, err := c.call(c.lease(client.LeaseOptions{}), "counts_descriptors", "100000")
	var n int
	fmt.Sscan(got, &n)
	switch {
	case err != nil:
		return err.Error()
	case n == 0:
		return "nothing was opened: the attack shows nothing"
	case n > mayOpen(c)/2: // workers must have a limit of their own
		return fmt.Sprintf("%d descriptors, and the executor may have %d", n, mayOpen(c))
	}
	return ""
}

func forks(c *cluster) string {
	got, err := c.call(c.lease(client.LeaseOptions{}), "fork_bomb", "2000")
	if err != nil {
		return err.Error()
	}
	return got
}

// forksAsUser attacks with a token that names a user id: its functions run as that user.
func forksAsUser(c *cluster) string {
	const uid = 1800000001 // unused on this node
	s := c.session(c.executor, c.token("user", "--uid", fmt.Sprint(uid)), -1)
	l, err := s.Lease(c.within(patience), client.LeaseOptions{Library: c.library, Memory: 64 << 20})
	if err != nil {
		c.Fatal(err)
	}
	defer l.Release(context.Background())
	got, err := c.call(l, "privileges", fmt.Sprint(uid))
	if err == nil {
		var more string
		more, err = c.call(l, "fork_bomb", "2000")
		got += more
	}
	if err != nil {
		return err.Error()
	}
	return got
}

// spreads attacks with a lease of one core. The function measures its processor time, the time that passed, and the processors that
// its threads ran on.
func spreads(c *cluster) string {
	got, err := c.call(c.lease(client.LeaseOptions{}), "spreads", "511 600")
	var used, wall float64
	var processors int
	if _, serr := fmt.Sscan(got, &used, &wall, &processors); err != nil || serr != nil {
		return fmt.Sprintf("no figures: %q %v", got, err)
	}
	const core = 1
	switch {
	case processors > core:
		return fmt.Sprintf("%d processors, %.1f cores' time", processors, used/wall)
	case used > 1.25*core*wall:
		return fmt.Sprintf("%.2f cores' time", used/wall)
	}
	return ""
}

// wakesItself releases a lease whose worker the executor caches. The worker must not run then: its processor time is compared with that of
// a thread of this test that spins for the same time.
func wakesItself(c *cluster) string {
	s := c.session(c.executor, c.token("eve"), 1)
	l, err := s.Lease(c.within(patience), client.LeaseOptions{Library: c.library, Memory: 64 << 20, Reuse: true})
	if err != nil {
		c.Fatal(err)
	}
	pid := l.Worker(0).PID()
	got, err := c.call(l, "wakes_itself", "")
	if err == nil && got == "" {
		err = l.Release(c.within(patience))
	}
	if err != nil || got != "" {
		l.Release(context.Background())
		c.Fatalf("%s %v", got, err)
	}
	before, err := processorTime(pid)
	if err != nil {
		return "" // the worker has ended with its lease
	}
	ours := spin(500 * time.Millisecond)
	after, err := processorTime(pid)
	if theirs := after - before; err == nil && theirs > ours/5 {
		unix.Kill(pid, unix.SIGKILL)
		return fmt.Sprintf("runs %v while this test runs %v", theirs, ours)
	}
	return ""
}

// burnsInChild uses processor time in a child that has left its parent. The tenant must be billed for it.
func burnsInChild(c *cluster) string {
	const ms = 500
	before := c.billed("eve")
	l := c.lease(client.LeaseOptions{})
	if got, err := c.call(l, "burns_in_child", fmt.Sprint(ms)); err != nil || got != "" {
		c.Fatalf("%s %v", got, err)
	}
	if err := l.Release(c.within(patience)); err != nil {
		c.Fatal(err)
	}
	micros := uint64(0)
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); { // 30 times the charge interval
		if micros = c.billed("eve") - before; micros >= ms*1000*8/10 {
			return ""
		}
	}
	return fmt.Sprintf("%d of %d ms are billed", micros/1000, ms)
}

// eats returns an attack that asks for more memory than the 64 MiB leased. It must be refused or end.
func eats(name, fn, arg string) attack {
	return attack{function, name, "refused or ended at the limit", func(c *cluster) string {
		got, err := c.call(c.lease(client.LeaseOptions{Bulk: -1}), fn, arg)
		if errors.Is(err, context.DeadlineExceeded) {
			return "it does not end"
		}
		if err != nil {
			return "" // it was ended
		}
		if strings.Contains(got, "MiB") {
			return got
		}
		return ""
	}}
}

// touchesChannel touches all pages of a large channel. The executor must have reserved that memory, or have refused the lease.
func touchesChannel(c *cluster) string {
	const leased, bulk = 16, 200 // MiB
	free := c.executor.metric("rfaas_executor_free_memory_bytes")
	l, err := c.eve.Lease(c.within(patience), client.LeaseOptions{Library: c.library, Memory: leased << 20, Bulk: bulk << 20})
	if err != nil {
		return "" // not granted
	}
	defer l.Release(context.Background())
	reserved := free - c.executor.metric("rfaas_executor_free_memory_bytes")
	got, err := c.call(l, "touches_channel", "")
	if err != nil {
		return "" // ended
	}
	var touched float64
	fmt.Sscan(got, &touched)
	if touched*(1<<20) > reserved+32<<20 {
		return fmt.Sprintf("%.0f MiB with %.0f MiB reserved", touched, reserved/(1<<20))
	}
	return ""
}

func forgesPage(c *cluster) string {
	const limit = 200 * time.Millisecond
	l := c.lease(client.LeaseOptions{CallLimit: limit})
	f, err := l.Function("forges_page")
	if err != nil {
		c.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*limit)
	defer cancel()
	out := make([]byte, 4096)
	n, err := f.Invoke(ctx, nil, out)
	switch {
	case err == nil:
		return string(out[:n])
	case ctx.Err() != nil:
		return fmt.Sprintf("runs on at 30 times its limit of %v", limit)
	}
	return ""
}

func forgesLog(c *cluster) string {
	const line = "time=2000-01-01T00:00:00Z level=ERROR msg=forged"
	before := c.executor.logged()
	l := c.lease(client.LeaseOptions{})
	if _, err := c.call(l, "forges_death", line); err == nil {
		c.Errorf("the worker lives: the attack shows nothing")
	}
	l.Release(c.within(patience))
	said := c.executor.since(before)
	switch {
	case strings.Contains("\n"+said, "\n"+line) || strings.Contains(said, "\r"+line):
		return "a line of its own in the executor's log"
	case strings.ContainsFunc(said, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' }):
		return fmt.Sprintf("control characters in the executor's log: %q", said)
	}
	return ""
}

// prints measures the executor while a function prints, three times: a busy node makes one figure larger.
func prints(c *cluster) string {
	l, got := c.lease(client.LeaseOptions{}), ""
	for range 3 {
		grown, before := c.executor.peak(), c.executor.processorTime()
		began := time.Now()
		if _, err := c.call(l, "prints", "1000"); err != nil {
			return err.Error()
		}
		share := (c.executor.processorTime() - before).Seconds() / time.Since(began).Seconds()
		n := grown()
		if share <= 0.5 && n <= 32 {
			return ""
		}
		got += fmt.Sprintf("%.2f of a core and %d MiB of the executor; ", share, n)
	}
	return got
}

// breaksItself returns an attack on what a worker shares with its own client. The client's call must end.
func breaksItself(fn string) func(*cluster) string {
	return func(c *cluster) string {
		// A separate session: the attack may break it.
		s := c.session(c.executor, c.token("eve"), -1)
		l, err := s.Lease(c.within(patience), client.LeaseOptions{Library: c.library, Memory: 64 << 20})
		if err != nil {
			c.Fatal(err)
		}
		f, err := l.Function(fn)
		if err != nil {
			c.Fatal(err)
		}
		ctx := c.within(patience)
		out := make([]byte, 4096)
		f.Invoke(ctx, nil, out) // any end will do
		if ctx.Err() != nil {
			return "the call does not end"
		}
		l.Release(c.within(patience))
		s.Close()
		if got, err := c.call(c.lease(client.LeaseOptions{}), "answers", "next"); err != nil || got != "next" {
			return fmt.Sprintf("the next lease: %q %v", got, err)
		}
		return ""
	}
}

// freeCores returns how many cores the executor has free.
func (c *cluster) freeCores() float64 { return c.executor.metric("rfaas_executor_free_cores") }

func hangsInConstructor(c *cluster) string {
	source := c.in("hangs.c")
	if err := os.WriteFile(source, []byte("#include <stdint.h>\n__attribute__((constructor)) static void hang(void) { for (;;) {} }\n"+
		"uint32_t f(void *a, uint32_t n, void *r) { (void)a; (void)n; (void)r; return 0; }\n"), 0o600); err != nil {
		c.Fatal(err)
	}
	free := c.freeCores()
	l, err := c.eve.Lease(c.within(patience), client.LeaseOptions{Library: c.compile("hangs.so", source), Memory: 64 << 20})
	if err == nil {
		l.Release(context.Background())
		return "a lease"
	}
	if !until(func() bool { return c.freeCores() >= free }) {
		return fmt.Sprintf("its core stays taken: %.0f free, %.0f before", c.freeCores(), free)
	}
	return ""
}

func garbage(c *cluster) string {
	good, err := os.ReadFile(c.library)
	if err != nil {
		c.Fatal(err)
	}
	random := bytes.Repeat([]byte("\x7fELF\x02\x01\x01\x00rfaas"), 1000)
	mixed := bytes.Clone(good)
	for i := 64; i < len(mixed); i += 97 {
		mixed[i] ^= 0x5a
	}
	for name, code := range map[string][]byte{"no ELF": []byte("#!/bin/sh\nid\n"), "random": random, "half": good[:len(good)/2], "a header": good[:64], "mixed": mixed} {
		l, err := c.eve.Lease(c.within(patience), client.LeaseOptions{Code: code, Memory: 64 << 20})
		if err == nil {
			l.Release(context.Background())
			return name + " is taken for a library"
		}
	}
	return ""
}
