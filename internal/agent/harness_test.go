package agent

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

var objects = leakcheck.Objects(dataplane.Live)

func TestMain(m *testing.M) {
	if role := os.Getenv(envRole); role != "" {
		os.Exit(roles[role]())
	}
	os.Exit(leakcheck.Run(m, nil, objects))
}

// envRole makes this program another process of a test.
const envRole = "RFAAS_TEST_ROLE"

var roles = map[string]func() int{"leave-socket": leaveSocket, "other-user": otherUser}

const root = "../.."

var built = testkit.Built

// eventually waits for a state that has no event.
var eventually = testkit.Eventually

// world is an agent in this process, and what its clients need.
type world struct {
	t      testing.TB
	socket string
	secret string
	log    *testkit.Buffer
	stop   context.CancelFunc
	ended  chan struct{}
	agent  *Agent
}

func newWorld(t testing.TB, linger time.Duration) *world {
	t.Helper()
	if t, ok := t.(*testing.T); ok {
		leakcheck.Check(t, objects)
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, socket: filepath.Join(dir, "agent.sock"), secret: filepath.Join(dir, "secret"), log: &testkit.Buffer{}}
	w.serve(linger)
	t.Cleanup(func() {
		w.end()
		if t.Failed() {
			t.Logf("the agent said:\n%s", w.log)
		}
	})
	return w
}

// serve starts an agent.
func (w *world) serve(linger time.Duration) {
	w.t.Helper()
	s, err := Listen(w.socket)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	w.stop, w.ended = stop, make(chan struct{})
	log := slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	w.agent = newAgent(ctx, Config{Socket: s, Linger: linger, Version: "test", Log: log})
	go func(ended chan struct{}, a *Agent) {
		defer close(ended)
		if err := a.serve(); err != nil {
			w.t.Error(err)
		}
	}(w.ended, w.agent)
}

func (w *world) end() {
	w.stop()
	<-w.ended
}
