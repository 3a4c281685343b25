package manager

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// runSubscriber subscribes and says so; after SIGUSR1 it waits for the last change and says how many there were.
func runSubscriber(dir, provider string) error {
	conn, err := control.Dial("unix:"+filepath.Join(dir, "m"), control.DialConfig{SecretFile: filepath.Join(dir, "secret")})
	if err != nil {
		return err
	}
	defer conn.Close()
	dev, err := dataplane.Open(provider, dataplane.Options{GIDIndex: -1})
	if err != nil {
		return err
	}
	defer dev.Close()
	c, err := link.AttachClient(context.Background(), control.NewManagerClient(conn), dev)
	if err != nil {
		return err
	}
	defer c.Close()
	woken := make(chan os.Signal, 1)
	signal.Notify(woken, syscall.SIGUSR1)
	fmt.Println("subscribed")
	<-woken
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if box, err := c.Mailbox(); err == nil && box.Latest[0].Slot == lastChange {
			fmt.Println("changes", box.Changes)
			return nil
		}
	}
	return fmt.Errorf("the last change did not come")
}

// lastChange marks a change.
const lastChange = 4711

// Changes in quick succession are told together, to all subscribers, and none is lost. A subscriber that is stopped or killed
// delays no other. A subscriber that goes on finds the newest state.
func TestStoppedSubscriberDelaysNobody(t *testing.T) {
	m, dir := populated(t, 8), t.TempDir()
	port, err := control.OpenPort(control.PortConfig{Listen: "unix:" + filepath.Join(dir, "m"), SecretFile: filepath.Join(dir, "secret")})
	if err != nil {
		t.Fatal(err)
	}
	defer port.Close(context.Background())
	m.AddTo(port.Server)
	if err := port.Serve(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); m.tell(ctx) }()
	defer func() { stop(); <-done }()
	start := func() (*exec.Cmd, *bufio.Scanner) {
		cmd := role(t, "subscriber", dir, dataplane.SHM)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		lines := bufio.NewScanner(out)
		if !lines.Scan() || lines.Text() != "subscribed" {
			t.Fatalf("the subscriber says %q", lines.Text())
		}
		if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		return cmd, lines
	}
	stopped, said := start()
	killed, _ := start()
	dev, err := dataplane.Open(dataplane.SHM, dataplane.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	c := attached(t, m, dev)
	changes := m.notifier.changes()
	mailbox(t, c, changes)
	count := m.notifier.count()
	killed.Process.Kill()
	const burst = 5000
	looked := make(chan int)
	began := time.Now()
	go func() { // how many states of the mailbox there were
		states := 0
		for last := changes; last < changes+burst && time.Since(began) < 20*time.Second; {
			if box, err := c.Mailbox(); err == nil && box.Changes > last {
				last = box.Changes
				states++
			}
		}
		looked <- states
	}()
	for i := range burst {
		ch := board.Change{Slot: uint32(i % 8), State: board.Silent}
		if i == burst-1 {
			ch.Slot = lastChange
		}
		m.notifier.change(ch)
	}
	if box := mailbox(t, c, changes+burst); box.Changes != changes+burst || box.Latest[0].Slot != lastChange {
		t.Errorf("%+v after %d changes", box, burst)
	}
	states := <-looked
	t.Logf("%d changes in %v beside a subscriber that is stopped and one that was killed, told in %d parts", burst, time.Since(began).Round(time.Microsecond), states)
	if states == burst {
		t.Errorf("%d changes were told in %d parts", burst, states)
	}
	testkit.Eventually(t, "the subscriber that was killed is forgotten", func() bool {
		m.notifier.sweep()
		return m.notifier.count() < count
	})
	for _, s := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGCONT} {
		if err := stopped.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	if want := fmt.Sprint("changes ", changes+burst); !said.Scan() || said.Text() != want {
		t.Errorf("the one that was stopped says %q, want %q", said.Text(), want)
	}
}
