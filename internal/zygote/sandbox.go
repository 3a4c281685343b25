package zygote

import (
	"context"
	"log/slog"
	"os"
	"strings"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Sandbox says how workers are to be confined. The zero value does not.
type Sandbox struct {
	Mode  sandbox.Mode
	Paths []string // absolute; what workers see read-only besides the system's
	// Environment is what workers keep of the executor's variables besides those for computing; a name may end in *.
	Environment []string
	UIDs        sandbox.Range // for workers whose Spec has no UID; needs root
	UIDFile     string        // shared with others that give out UIDs on this node; "": none
	// Processes is how many processes and threads a worker may have; 0: no limit.
	Processes uint32

	// Files is how many open files each process of a worker may have; 0: as many as the executor.
	Files uint32

	without   uint32 // parts that tests leave out
	ownGroups string // file in the place of /proc/self/cgroup, for tests
}

const maxSandboxPaths = 64 // DP_SANDBOX_PATHS_MAX

// paths are the settings' and those in which the executor's own libraries are looked for.
func (s *Sandbox) paths() []string {
	list := s.Paths
	for dir := range strings.SplitSeq(os.Getenv("LD_LIBRARY_PATH"), ":") {
		if strings.HasPrefix(dir, "/") {
			list = append(list[:len(list):len(list)], dir)
		}
	}
	return list[:min(len(list), maxSandboxPaths)]
}

// Lacks says what of a complete sandbox a worker program cannot give here, and why; "" if nothing. It starts the program and ends
// it again; ctx bounds that.
func Lacks(ctx context.Context, path string, uids sandbox.Range) (string, error) {
	z, err := Start(ctx, Config{Path: path, Log: slog.New(slog.DiscardHandler), Sandbox: Sandbox{Mode: sandbox.On, UIDs: uids}})
	if err != nil {
		return "", err
	}
	return z.Lacks(), z.Close()
}

// canGiveUID says whether workers can be other users than the executor.
func (z *Zygote) canGiveUID() bool {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.cfg.Sandbox.Mode != sandbox.Off && z.parts&wire.PartUID != 0
}

// groupMemory is the limit of a worker's control group, which also counts what is not the function's: its channel, the pages
// of tables and libraries. 0: none.
func (s *Spec) groupMemory() uint64 {
	const overhead = 32 << 20
	if s.MemoryLimit == 0 || s.MemoryLimit > 1<<62 || s.ChannelMemory > 1<<62 {
		return 0
	}
	return s.MemoryLimit + s.ChannelMemory + overhead
}
