package others

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/daemon"
)

// overTCP makes calls through the client library over provider tcp, to a worker of an executor that it starts. Like grpc-tcp and http,
// they use the loopback device.
type overTCP struct {
	executor, library string
	verbs             bool
	largest           int // payload

	dir     string
	daemon  *daemon.Daemon
	session *client.Session
	echo    *client.Function
}

func (o *overTCP) start(ctx context.Context) (err error) {
	if o.verbs {
		return errVerbs
	}
	if o.dir, err = os.MkdirTemp("", "rfaas-bench"); err != nil {
		return err
	}
	secret := filepath.Join(o.dir, "secret")
	o.daemon, err = daemon.Start(ctx, o.executor, "--listen", "127.0.0.1:0", "--providers", "tcp", "--cores", "1", "--grace", "2s", "--secret-file", secret)
	if err != nil {
		return err
	}
	o.session, err = client.Connect(ctx, client.Options{Executor: o.daemon.Address, Provider: "tcp", SecretFile: secret})
	if err != nil {
		return err
	}
	l, err := o.session.Lease(ctx, client.LeaseOptions{Library: o.library, Bulk: int64(max(o.largest, 1)), WaitMode: client.Hot})
	if err != nil {
		return err
	}
	o.echo, err = l.Function("echo")
	return err
}

func (o *overTCP) stop() {
	if o.session != nil {
		_ = o.session.Close()
	}
	if o.daemon != nil {
		o.daemon.Stop()
	}
	os.RemoveAll(o.dir)
}

func (o *overTCP) batch(ctx context.Context, size, n int) (float64, []int64, error) {
	in, out := make([]byte, size), make([]byte, size)
	return timed(n, func() error {
		got, err := o.echo.Invoke(ctx, in, out)
		if err == nil && got != size {
			err = fmt.Errorf("%d bytes came back as %d", size, got)
		}
		return err
	})
}

func (o *overTCP) how() string {
	return "blocking calls of the Go client to a hot worker over a TCP connection, both in processes of their own"
}

// timed makes a fifth of n calls untimed, then up to n timed ones. It ends earlier, with at least batchLeast samples, if the batch
// takes longer than batchMost. It returns the mean in ns, and the samples.
func timed(n int, call func() error) (float64, []int64, error) {
	samples := make([]int64, 0, n)
	sum := 0.0
	for i, batch := -n/5, time.Now(); i < n && (i < batchLeast || time.Since(batch) < batchMost); i++ {
		began := time.Now()
		if err := call(); err != nil {
			return 0, nil, err
		}
		if i >= 0 {
			took := time.Since(began)
			samples = append(samples, int64(took))
			sum += float64(took)
		}
	}
	return sum / float64(len(samples)), samples, nil
}
