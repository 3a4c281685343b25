package executor

import (
	"context"
	"net"
	"os"
	"time"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// Worker is a running worker process, implemented by *zygote.Worker.
type Worker interface {
	Blob() []byte
	PID() int
	// Done is closed when the process is reaped; Exit is valid afterwards.
	Done() <-chan struct{}
	Exit() zygote.Exit
	Steps() zygote.Steps // durations of its start
	// State of the worker, also after its end.
	OutputTail() []byte
	Running() string
	Counters() zygote.Counters
	// ClientGone reports whether the client's process has ended, also while a function runs. On verbs it is always false: there the
	// worker exits as soon as it runs no function.
	ClientGone() bool
	// CPUTime returns the CPU time that the kernel reports for the worker, with its child processes where there are
	// control groups.
	CPUTime() (time.Duration, bool)
	// Stop lets the running call finish, kills the worker when ctx ends, and blocks until the process is reaped.
	Stop(ctx context.Context) error
	// Finish is Stop after all calls that the client has sent.
	Finish(ctx context.Context) error
	// Suspend freezes the process. Resume lets it serve the same client again. The first Resume of a late worker (zygote.Spec.Late) connects it to
	// its client and changes its Blob. Stop and Finish also end a suspended worker.
	Suspend(ctx context.Context) error
	Resume(ctx context.Context, clientBlob []byte) error
	// ExpectLease makes the next call of the worker the init call of another lease. Suspend does so too.
	ExpectLease()
	// Claimable returns what a claim needs to resume a suspended worker, instead of Resume. The caller closes it. Claimed records that another lease
	// has claimed the worker. counted is what the worker had counted for the lease before.
	Claimable() (claim.Worker, error)
	Claimed(counted zygote.Counters)
	// Connect hands the worker its client's connection on provider tcp, and the hello that was read from it.
	Connect(c *net.TCPConn, hello []byte) error
	// CallLimit returns how long the present call may run; 0: no limit.
	CallLimit() time.Duration
	// EndCall ends a worker whose call exceeds its limit and reports where it was. It blocks until the process is
	// killed.
	EndCall(limit time.Duration)
	// Kill kills the process without waiting.
	Kill()
}

// Spawner starts workers, implemented by *zygote.Zygote. Tests use a fake.
type Spawner interface {
	// Spawn starts a worker. It blocks until the worker has connected to its client and loaded its code. After an
	// error, it returns when the worker's process and resources are gone.
	Spawn(ctx context.Context, s zygote.Spec) (Worker, error)
	// MakeSeed makes the init call of a lease in a process of its own, and keeps its memory.
	MakeSeed(ctx context.Context, s *zygote.SeedSpec) (*zygote.Seed, error)
	// Inspect returns the functions that a library exports. A *zygote.WorkerError of status DP_BAD_LIBRARY says why it cannot be used.
	Inspect(ctx context.Context, code *os.File) ([]string, error)
	// Symbols returns the names of functions at offsets in a library, "" for unknown ones. A separate process reads the
	// library.
	Symbols(ctx context.Context, code *os.File, offsets []uint64) ([]string, error)
	// FillsPages reports whether workers can start from a seed before all of it has been read.
	FillsPages() bool
	VerbsDevices() int
	// KeepPool keeps n pooled workers for each of the devices.
	KeepPool(n int, devices ...zygote.Spec) error
	Waiting() int       // number of pooled workers
	Runtimes() []string // their names
	// OpenFile opens a file that the administrator's settings name, for reading or appending.
	OpenFile(path string, appending bool) (*os.File, error)
	// Renew runs the program that renews this node's certificate as root, and returns a pipe with its output.
	Renew() (*os.File, error)
	// Connect connects to a unix socket that the administrator's settings name.
	Connect(path string) (net.Conn, error)
	// CannotStart returns why no worker can be started now, or nil. changed is closed when that may have changed.
	CannotStart() (changed <-chan struct{}, reason error)
	// Failed returns a channel that receives an error when no worker can be started any more and all have ended.
	Failed() <-chan error
	Close() error
}

// zygoteSpawner adapts a zygote to Spawner. Its Spawn is in grant.go.
type zygoteSpawner struct {
	*zygote.Zygote
	bundles *bundles // from which its workers get theirs
}

// exitClientGone is the exit status of a worker whose client disconnected (DP_EXIT_CLIENT_GONE of worker/message.h).
const exitClientGone = 91
