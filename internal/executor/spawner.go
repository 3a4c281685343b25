package executor

import (
	"context"
	"net"
	"os"
	"time"

	"github.com/rfaas-go/rfaas/internal/zygote"
)

// Worker is a running worker process, what a *zygote.Worker is.
type Worker interface {
	Blob() []byte
	PID() int
	// Done is closed when the process is reaped; Exit is valid afterwards.
	Done() <-chan struct{}
	Exit() zygote.Exit
	Steps() zygote.Steps // what its start took
	// What it does, before and after.
	OutputTail() []byte
	Running() string
	Counters() zygote.Counters
	// CPUTime is how much CPU time the kernel has seen the worker use, with its child processes where there are control groups.
	CPUTime() (time.Duration, bool)
	// Stop lets the running call finish, kills when ctx ends, and returns when the process is reaped.
	Stop(ctx context.Context) error
	// Finish is Stop after all the calls that the client has sent.
	Finish(ctx context.Context) error
	// Park keeps the process without work and stopped, Resume lets it serve the same client again; Blob is new then.
	Park(ctx context.Context) error
	Resume(ctx context.Context, clientBlob []byte) error
	// EndCall ends a worker whose call exceeds its limit, and says where it was; it returns when the process has been killed.
	EndCall(limit time.Duration)
	// Kill does not wait.
	Kill()
}

// Spawner starts workers, what a *zygote.Zygote does. Tests put a fake here.
type Spawner interface {
	// Spawn returns when the worker has connected to its client and loaded its code, or when nothing of it is left.
	Spawn(ctx context.Context, s zygote.Spec) (Worker, error)
	// Inspect returns the functions that a library exports. A *zygote.WorkerError of status DP_BAD_LIBRARY says why it cannot be used.
	Inspect(ctx context.Context, code *os.File) ([]string, error)
	// Symbols names places in a library by their offsets, "" where nothing is known. Each is read in a process of its own.
	Symbols(ctx context.Context, code *os.File, offsets []uint64) ([]string, error)
	VerbsDevices() int
	// KeepWarm keeps n workers ready for leases on each of the devices.
	KeepWarm(n int, devices ...zygote.Spec) error
	Waiting() int // of these
	// OpenFile opens a file that the administrator's settings name, to be read or appended to.
	OpenFile(path string, appending bool) (*os.File, error)
	// Connect connects to a unix socket that the administrator's settings name.
	Connect(path string) (net.Conn, error)
	// CannotStart returns why no worker can be started at present, nil if one can. changed is closed when that may have changed.
	CannotStart() (reason error, changed <-chan struct{})
	// Failed receives an error when no worker can be started any more, and all have ended.
	Failed() <-chan error
	Close() error
}

// zygoteSpawner makes a Spawner of a zygote.
type zygoteSpawner struct{ *zygote.Zygote }

func (z zygoteSpawner) Spawn(ctx context.Context, s zygote.Spec) (Worker, error) {
	w, err := z.Zygote.Spawn(ctx, s)
	if err != nil {
		return nil, err // and not a nil *zygote.Worker in an interface
	}
	return w, nil
}

// exitClientGone is the status of a worker whose client hung up (DP_EXIT_CLIENT_GONE of dp_worker.h).
const exitClientGone = 91
