package executor

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
)

func (n *node) nextRoom(s grpc.ServerStreamingClient[control.RoomReply]) bool {
	n.t.Helper()
	r, err := s.Recv()
	if err != nil {
		n.t.Fatal(err)
	}
	return r.GetRoom()
}

// Several clients of a tenant wait for room. The executor notifies them in the order of their requests, and only as many as there is room for. A client
// for which there is too little room does not delay the others. A client that does not use its room delays them only for a limited time.
func TestRoom(t *testing.T) {
	n := newNode(t)
	n.e.room.firstFor = time.Hour
	held := n.lease(4)
	var clients [5]grpc.ServerStreamingClient[control.RoomReply]
	var end [5]context.CancelFunc
	var told [5]chan bool
	for i, cores := range []uint32{1, 4, 2, 2, 1} {
		ctx, cancel := context.WithCancel(n.ctx())
		defer cancel()
		s, err := n.Room(ctx, &control.RoomRequest{Cores: cores})
		if err != nil {
			t.Fatal(err)
		}
		if n.nextRoom(s) {
			t.Fatalf("client %d: room on a full node", i)
		}
		clients[i], end[i], told[i] = s, cancel, make(chan bool, 10)
		go func() {
			defer close(told[i])
			for r, err := s.Recv(); err == nil; r, err = s.Recv() {
				told[i] <- r.GetRoom()
			}
		}()
	}
	isTold := func(i int) {
		t.Helper()
		select {
		case <-told[i]:
		case <-time.After(testBound):
			t.Fatalf("client %d is not told of room", i)
		}
	}
	n.release(held.GetLeaseId())
	isTold(0)
	isTold(2)
	isTold(4)
	if len(told[1])+len(told[3]) > 0 {
		t.Error("clients were told of room that earlier ones take")
	}
	two := n.mustLease(n.request(2)) // the third client takes its room, and two others give up
	for _, i := range []int{2, 0, 4} {
		end[i]()
	}
	isTold(3)
	if len(told[1]) > 0 {
		t.Error("a client was told of room for 4 cores beside a lease of 2")
	}
	n.e.room.mu.Lock()
	n.e.room.firstFor = time.Millisecond
	n.e.room.mu.Unlock()
	n.release(two.GetLeaseId())
	isTold(1)
	isTold(3) // because the second client does not take its room
	if s, _ := n.Room(n.ctx(), &control.RoomRequest{Cores: 5}); n.nextRoom(s) {
		t.Error("a node of 4 cores has room for 5")
	}
}
