package zygote

import (
	"context"
	"log/slog"
	"os"
	"strings"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Sandbox says how workers are confined. The zero value does not confine them.
type Sandbox struct {
	Mode    sandbox.Mode
	Paths   []string // absolute paths that workers can read besides the system's
	Bundles string   // absolute path of the directory with the bundles of leases; "": none. Also without confinement
	// Environment has the executor's variables that workers keep besides those for computing. A name may end in *.
	Environment []string
	UIDs        sandbox.Range // for workers whose Spec has no UID; needs root
	UIDFile     string        // lock file shared by all executors of this node; "": none
	// Processes is the largest number of processes and threads of a worker; 0: no limit.
	Processes uint32

	// Files is the largest number of open files of each process of a worker; 0: as many as the executor.
	Files uint32

	Idle bool // workers have idle priority. Also without confinement

	without   uint32 // parts that tests leave out
	ownGroups string // file to read instead of /proc/self/cgroup, for tests
}

const maxSandboxPaths = 64 // DP_SANDBOX_PATHS_MAX

// paths returns the paths of the settings and those in LD_LIBRARY_PATH.
func (s *Sandbox) paths() []string {
	list := s.Paths
	for dir := range strings.SplitSeq(os.Getenv("LD_LIBRARY_PATH"), ":") {
		if strings.HasPrefix(dir, "/") {
			list = append(list[:len(list):len(list)], dir)
		}
	}
	return list[:min(len(list), maxSandboxPaths)]
}

// Lacks returns which parts of a complete sandbox a worker program cannot provide on this node, and why; "" if none. It
// starts the program and ends it again; ctx bounds that.
func Lacks(ctx context.Context, path string, uids sandbox.Range) (string, error) {
	z, err := Start(ctx, Config{Path: path, Log: slog.New(slog.DiscardHandler), Sandbox: Sandbox{Mode: sandbox.On, UIDs: uids}})
	if err != nil {
		return "", err
	}
	return z.Lacks(), z.Close()
}

// canGiveUID reports whether workers can run as other users than the executor.
func (z *Zygote) canGiveUID() bool {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.cfg.Sandbox.Mode != sandbox.Off && z.parts&wire.PartUID != 0
}

// groupMemory returns the memory limit of a worker's control group. It includes the channel and the pages of tables and
// libraries. 0: no limit.
func (s *Spec) groupMemory() uint64 {
	overhead := uint64(32 << 20)
	if s.Provider == "ofi" {
		overhead += 64 << 20 // libfabric's tcp takes 35 MiB for buffers
	}
	if s.MemoryLimit == 0 || s.MemoryLimit > 1<<62 || s.ChannelMemory > 1<<62 {
		return 0
	}
	return s.MemoryLimit + s.ChannelMemory + overhead
}
