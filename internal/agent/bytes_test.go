package agent

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// rss returns the resident memory of a process in bytes, and the most that it was.
func rss(t *testing.T, pid int) (now, most int64) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		t.Fatal(err)
	}
	read := func(field string) int64 {
		_, rest, _ := strings.Cut(string(b), field)
		kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return kib << 10
	}
	return read("VmRSS:"), read("VmHWM:")
}

// A client that sends a thousand large requests which have to wait is refused as busy, and takes little of the agent's memory. Its
// releases are answered, and so are the requests of other clients.
func TestClientWithLargeRequests(t *testing.T) {
	dir := t.TempDir()
	socket, secret := filepath.Join(dir, "agent.sock"), filepath.Join(dir, "secret")
	x := executor(t, secret)
	env := []string{"RFAAS_SECRET_FILE=" + secret, "USER=tester", "RFAAS_EXECUTOR=" + x.address}
	agent := program(t, socket)
	good := connect(t, socket, env...)
	if err := good.open(1, protocol.Session{}); err != nil {
		t.Fatal(err)
	}
	held := good.mustAcquire(1, 1)
	p := connect(t, socket, env...)
	if err := p.open(1, protocol.Session{}); err != nil {
		t.Fatal(err)
	}
	before, _ := rss(t, agent.Process.Pid)
	offer := newChannels(t, "shm", 1).offers()[0]
	a := protocol.Acquire{Session: 1, First: true, Spec: spec(1), Provider: "shm", WaitNs: int64(time.Hour)}
	for range protocol.MaxWorkers {
		a.Offers = append(a.Offers, offer)
	}
	a.Spec.Executor = "127.0.0.1:1" // nobody listens there: they wait for an executor
	code := library(t)
	size := len(message(protocol.OpAcquire, 1, a.Encode))
	admitted := mostHeld / size
	var waiting []chan reply
	for i := range uint64(mostOpen) {
		a.Key = i + 1
		waiting = append(waiting, p.begin(protocol.OpAcquire, a.Encode, code))
	}
	refused := 0
	for _, c := range waiting[admitted:] { // these are refused at once
		if _, err := p.end(protocol.OpAcquire, c); !isStatus(err, dataplane.StatusBusy) || !strings.Contains(err.Error(), strconv.Itoa(mostHeld)) {
			t.Fatalf("request %d: %v", refused, err)
		}
		refused++
	}
	now, most := rss(t, agent.Process.Pid)
	t.Logf("%d requests of %d KiB, %d refused: the agent has %d KiB more, at most %d KiB more", len(waiting), size>>10, refused,
		(now-before)>>10, (most-before)>>10)
	if grown := most - before; grown > 8*mostHeld {
		t.Errorf("the agent has grown by %d KiB for a client that may hold %d KiB of requests", grown>>10, mostHeld>>10)
	}
	if err := held.call(0); err != nil {
		t.Error(err)
	}
	good.must(protocol.OpStatus, nil, nil)
	for i := range uint64(admitted) {
		r := protocol.Release{Key: i + 1}
		p.must(protocol.OpRelease, r.Encode, nil)
	}
	for _, c := range waiting[:admitted] {
		if _, err := p.end(protocol.OpAcquire, c); !isStatus(err, dataplane.StatusCancelled) {
			t.Errorf("%v, want that it was cancelled", err)
		}
	}
	a.Key, a.WaitNs = 5000, 0 // room again
	if _, err := p.ask(protocol.OpAcquire, a.Encode, code); isStatus(err, dataplane.StatusBusy) || err == nil {
		t.Errorf("a large request after the others: %v", err)
	}
}

// A release is never refused because its client holds too many bytes. A large message with the number of a release is.
func TestWhatIsHeld(t *testing.T) {
	c := &client{}
	big := request{Header: protocol.Header{Op: protocol.OpAcquire, ID: 1, Size: mostHeld}}
	if !c.hold(&big) {
		t.Fatal("a client may hold nothing")
	}
	for _, k := range []struct {
		h    protocol.Header
		want bool
	}{
		{protocol.Header{Op: protocol.OpRelease, ID: 2, Size: 64}, true},
		{protocol.Header{Op: protocol.OpFinish, Size: 64}, true},
		{protocol.Header{Op: protocol.OpRelease, ID: 2, Size: protocol.MaxMessage}, false},
		{protocol.Header{Op: protocol.OpFinish, Size: protocol.MaxMessage}, false},
		{protocol.Header{Op: protocol.OpAcquire, ID: 3, Size: 64}, false},
	} {
		r := request{Header: k.h}
		if got := c.hold(&r); got != k.want {
			t.Errorf("%+v with %d bytes held: %v", k.h, mostHeld, got)
		}
		c.drop(&r)
	}
	c.drop(&big)
	if n := c.bytes.Load(); n != 0 {
		t.Errorf("%d bytes held after all", n)
	}
}
