package privilege

import (
	"errors"
	"fmt"
	"math"
	"runtime"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/sys/unix"
)

// allowed are the system calls that a daemon makes once it serves: files, sockets, memory, threads, clocks, and devices
// through libibverbs. execve lets another version of the daemon take over; it has the same filter and rights, and no call
// makes a process for it. The list has no calls to access other processes' memory, change namespaces,
// mounts, credentials or keys, or use BPF, io_uring and modules. Frequent calls come first. Names that an architecture
// does not have are left out.
var allowed = []string{
	"futex", "read", "write", "epoll_pwait", "recvmsg", "sendmsg", "nanosleep", "clock_nanosleep", "sched_yield", "ppoll", "poll", "tgkill", "getpid", "gettid",
	"rt_sigreturn", "rt_sigprocmask", "rt_sigaction", "sigaltstack", "clock_gettime", "gettimeofday", "clock_getres", "time", "restart_syscall",
	"madvise", "mmap", "munmap", "mprotect", "mremap", "mincore", "msync", "brk", "mlock", "mlock2", "munlock", "mlockall", "munlockall", "mbind",
	"get_mempolicy", "set_mempolicy", "membarrier", "rseq", "memfd_create",
	"set_robust_list", "get_robust_list", "set_tid_address", "exit", "exit_group", "getppid", "getpgid", "getsid", "getpgrp", "sched_getaffinity",
	"sched_setaffinity", "sched_getparam", "sched_getscheduler", "getcpu", "getpriority", "getrusage", "times", "getrlimit", "prlimit64", "sysinfo", "uname",
	"getuid", "geteuid", "getgid", "getegid", "getgroups", "getresuid", "getresgid", "capget", "umask", "getrandom", "arch_prctl",
	"rt_sigpending", "rt_sigsuspend", "rt_sigtimedwait", "kill", "tkill", "pidfd_open", "pidfd_send_signal", "setitimer", "getitimer", "timer_create",
	"timer_settime", "timer_gettime", "timer_delete", "timerfd_create", "timerfd_settime", "timerfd_gettime", "signalfd4", "eventfd", "eventfd2",
	"openat", "openat2", "close", "close_range", "pread64", "pwrite64", "readv", "writev", "preadv", "pwritev", "preadv2", "pwritev2", "lseek", "fstat",
	"newfstatat", "statx", "faccessat", "faccessat2", "readlinkat", "getdents64", "fstatfs", "statfs", "fcntl", "flock", "fsync", "fdatasync",
	"sync_file_range", "ftruncate", "truncate", "fallocate", "fadvise64", "readahead", "getcwd", "mkdirat", "unlinkat", "linkat", "symlinkat", "renameat",
	"renameat2", "fchmod", "fchmodat", "utimensat", "dup", "dup2", "dup3", "pipe2", "sendfile", "splice", "tee", "copy_file_range", "pselect6", "select",
	"epoll_create1", "epoll_ctl", "epoll_wait", "epoll_create", "inotify_init1", "inotify_add_watch", "inotify_rm_watch",
	"open", "creat", "stat", "lstat", "access", "readlink", "getdents", "mkdir", "rmdir", "unlink", "link", "rename", "chmod", "pipe",
	"socket", "socketpair", "bind", "listen", "accept", "accept4", "connect", "getsockname", "getpeername", "getsockopt", "setsockopt", "shutdown",
	"sendto", "recvfrom", "sendmmsg", "recvmmsg",
	"execve", "wait4", "waitid",
}

// typing are the ioctl commands that type into a terminal. A process whose standard input is the terminal of root's
// shell could type into that shell.
var typing = []uint64{unix.TIOCSTI, unix.TIOCLINUX}

// noSuchCall makes callers fall back to an older call, because a filter cannot see the arguments of clone3.
const noSuchCall = seccomp.ActionErrno | seccomp.Action(unix.ENOSYS)

// ErrArchitecture means that the system call numbers of this architecture are not known here. Those of x86-64 and
// AArch64 are.
var ErrArchitecture = errors.New("not supported on this architecture")

// Filter installs a system call filter on all threads of the process. Other calls then fail with EPERM. It returns an
// error, and installs nothing, if the kernel or architecture (ErrArchitecture) does not support such a filter.
func Filter() error {
	info, err := arch.GetInfo("")
	if err != nil {
		return fmt.Errorf("install the system call filter: %w: %w", ErrArchitecture, err)
	}
	var names []string
	for _, name := range allowed {
		if _, ok := info.SyscallNames[name]; ok {
			names = append(names, name)
		}
	}
	equal := func(name string, value uint64) seccomp.NameWithConditions {
		return seccomp.NameWithConditions{Name: name, Conditions: seccomp.ArgumentConditions{{Argument: 0, Operation: seccomp.Equal, Value: value}}}
	}
	// The kernel reads only the low half of a command. A command is refused if its high half is neither zero nor the sign
	// extension of the low half.
	command := seccomp.ArgumentConditions{{Argument: 1, Operation: seccomp.LessOrEqual, Value: math.MaxUint32}}
	for _, c := range typing {
		command = append(command, seccomp.Condition{Argument: 1, Operation: seccomp.NotEqual, Value: c})
	}
	negative := seccomp.ArgumentConditions{{Argument: 1, Operation: seccomp.GreaterOrEqual, Value: math.MaxUint64 &^ math.MaxInt32}}
	some := []seccomp.NameWithConditions{
		{Name: "ioctl", Conditions: command}, {Name: "ioctl", Conditions: negative},
		// clone may make threads of this process, but no processes.
		{Name: "clone", Conditions: seccomp.ArgumentConditions{{Argument: 0, Operation: seccomp.BitsSet, Value: unix.CLONE_THREAD}}},
		{Name: "prctl", Conditions: seccomp.ArgumentConditions{{Argument: 0, Operation: seccomp.Equal, Value: unix.PR_SET_DUMPABLE},
			{Argument: 1, Operation: seccomp.Equal, Value: 0}}},
		equal("prctl", unix.PR_SET_NAME), equal("prctl", unix.PR_GET_NAME), equal("prctl", unix.PR_GET_DUMPABLE), equal("prctl", unix.PR_SET_VMA),
	}
	filter := seccomp.Filter{NoNewPrivs: true, Flag: seccomp.FilterFlagTSync, Policy: seccomp.Policy{
		DefaultAction: seccomp.ActionErrno,
		Syscalls: []seccomp.SyscallGroup{
			{Action: seccomp.ActionAllow, Names: names, NamesWithCondtions: some},
			{Action: noSuchCall, Names: []string{"clone3"}},
		},
	}}
	// LoadFilter forbids new privileges to its thread by one system call and loads the filter by another one, for which the kernel
	// requires the first on the same thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := seccomp.LoadFilter(filter); err != nil {
		return fmt.Errorf("install the system call filter: %w", err)
	}
	return nil
}
