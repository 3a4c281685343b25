package executor

import (
	"testing"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
)

// watchRoom opens a stream that reports room for some cores, and returns the first reply.
func (n *node) watchRoom(cores uint32) (grpc.ServerStreamingClient[control.RoomReply], bool) {
	n.t.Helper()
	s, err := n.Room(n.ctx(), &control.RoomRequest{Cores: cores})
	if err != nil {
		n.t.Fatal(err)
	}
	return s, n.nextRoom(s)
}

func (n *node) nextRoom(s grpc.ServerStreamingClient[control.RoomReply]) bool {
	n.t.Helper()
	r, err := s.Recv()
	if err != nil {
		n.t.Fatal(err)
	}
	return r.GetRoom()
}

// TestRoom waits with several clients. Each gets a report as soon as as many cores are free as it needs.
func TestRoom(t *testing.T) {
	n := newNode(t)
	held := n.lease(4)
	one, now := n.watchRoom(1)
	four, soon := n.watchRoom(4)
	if now || soon {
		t.Fatalf("room on a full node: %t, %t", now, soon)
	}
	n.release(held.GetLeaseId())
	if !n.nextRoom(one) || !n.nextRoom(four) {
		t.Error("no room after the release")
	}
	two := n.lease(2)
	if !n.nextRoom(one) { // two cores are left
		t.Error("no room beside a smaller lease")
	}
	n.release(two.GetLeaseId())
	if !n.nextRoom(four) {
		t.Error("no room for four after the second release")
	}
	if _, now := n.watchRoom(4); !now {
		t.Error("an empty node has no room")
	}
	if _, now := n.watchRoom(5); now {
		t.Error("a node of 4 cores has room for 5")
	}
}
