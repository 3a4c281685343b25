package manager

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
)

// runCrowd is a manager with many executors, none of which is alive; it says when it is ready.
func runCrowd(dir, args string) error {
	n, err := strconv.Atoi(args)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	port, err := control.OpenPort(control.PortConfig{Listen: "unix:" + filepath.Join(dir, "m"+args), SecretFile: filepath.Join(dir, "secret")})
	if err != nil {
		return err
	}
	defer port.Close(context.Background())
	// A long heartbeat: lines that no executor writes stay fresh for as long as the test takes.
	m, err := New(Config{Heartbeat: time.Minute, Slots: n + 64, Providers: []string{dataplane.SHM}, Asked: true, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	for i := range n {
		in := info(1, 4)
		in.Incarnation[0], in.Incarnation[1] = byte(i), byte(i>>8)
		in.NodeId, in.Providers = fmt.Sprintf("boot/%d", i), []string{"verbs"}
		if _, _, err := m.table.register(owner{}, fmt.Sprintf("198.18.%d.%d:7465", i/250, i%250+1), in); err != nil {
			return err
		}
	}
	m.AddTo(port.Server)
	if err := port.Serve(); err != nil {
		return err
	}
	fmt.Println("ready")
	<-ctx.Done()
	return nil
}

// crowd starts such a manager.
func crowd(t *testing.T, dir string, n int) (*exec.Cmd, control.ManagerClient) {
	t.Helper()
	cmd := role(t, "crowd", dir, strconv.Itoa(n))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	if !bufio.NewScanner(out).Scan() {
		t.Fatal("the manager does not start")
	}
	conn, err := control.Dial("unix:"+filepath.Join(dir, "m"+strconv.Itoa(n)), control.DialConfig{SecretFile: filepath.Join(dir, "secret")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return cmd, control.NewManagerClient(conn)
}

// 10,000 executors and 1,000 clients: a placement decision costs at most 1.5 times what it costs with 10 executors, reads the same
// bytes, and works while the manager is stopped, as executors go on to write their lines.
func TestPlacementAmongTenThousand(t *testing.T) {
	executors, clients := 10_000, 1000
	if testing.Short() {
		executors, clients = 1000, 100
	}
	dir := t.TempDir()
	dev, err := dataplane.Open(dataplane.SHM, dataplane.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	var readers [2][]*board.Reader
	var managers [2]*exec.Cmd
	var writers []*link.Executor
	for i, n := range []int{10, executors} {
		cmd, m := crowd(t, dir, n)
		managers[i] = cmd
		for w := range 8 { // that live
			in := info(9, 4)
			in.Incarnation[0], in.NodeId, in.Providers = byte(w), fmt.Sprint("alive/", w), []string{"verbs"}
			r, err := m.Register(t.Context(), &control.RegisterRequest{ProtocolVersion: 1, Address: fmt.Sprintf("192.0.2.%d:1", w+1), Info: in})
			if err != nil {
				t.Fatal(err)
			}
			x, err := link.AttachExecutor(t.Context(), m, dev, r.GetExecutorId(), incarnationOf(in))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(x.Close)
			writers = append(writers, x)
		}
		for range clients {
			c, err := link.AttachClient(t.Context(), m, dev)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(c.Close)
			r, err := board.NewReader(c, "")
			if err != nil {
				t.Fatal(err)
			}
			readers[i] = append(readers[i], r)
		}
	}
	for _, m := range managers {
		if err := m.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(stop)
	wg.Go(func() { // executors beat, 1000 times as often as they do
		in := info(9, 4)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for beat := uint64(1); ; beat++ {
			for w, x := range writers {
				in.Incarnation[0], in.Providers = byte(w%8), []string{"verbs"}
				if err := x.WriteLine(lineOf(in, 0, 100+beat, time.Now())); err != nil {
					t.Errorf("a line while the manager is stopped: %v", err)
					return
				}
			}
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	})
	// What is claimed is a ratio; a machine that does other things makes it worse, never better.
	best := 1e9
	for try := 0; try < 5 && best > 1.5; try++ {
		var took [2][]time.Duration
		for range 4 {
			for c := range clients { // in turns, so that both see the same machine
				for i := range readers {
					r := readers[i][c]
					before, start := r.Reads(), time.Now()
					choice, err := r.Pick(board.Need{Cores: 1, Remote: board.Verbs}, nil, start, 1)
					took[i] = append(took[i], time.Since(start))
					if err != nil {
						t.Fatal(err)
					}
					if n := r.Reads() - before; n != 1 {
						t.Fatalf("%d reads with %d executors", n, []int{10, executors}[i])
					}
					if c%100 == 0 {
						if _, err := r.Identity(&choice.Line); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
		}
		small, large := median(took[0], 0.5), median(took[1], 0.5)
		best = min(best, float64(large)/float64(small))
		t.Logf("a decision of %d clients while the manager is stopped: %v with 10 executors, %v with %d (medians): %.2f times; one read of %d bytes each",
			clients, small, large, executors, float64(large)/float64(small), board.GroupLines*board.LineSize)
	}
	if best > 1.5 {
		t.Errorf("%.2f times the cost", best)
	}
	// The lines of those that live are new.
	var beats int
	lines, err := readers[1][0].All()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lines {
		if l.Beat > 100 {
			beats++
		}
	}
	if beats != 8 || len(lines) != executors+8 {
		t.Errorf("%d of %d lines were written while the manager was stopped", beats, len(lines))
	}
}
