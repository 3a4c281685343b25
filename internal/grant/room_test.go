package grant

import "testing"

// Waiting leases leave room for other streams on a connection: the executor permits at least 256 (callStreams in internal/config). Further leases get
// streams in the order in which they came. A lease that needs less than all leases with streams does not wait for one.
func TestRoomStreamsAreLimited(t *testing.T) {
	s, err := newShared(&Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	rooms := func(cores uint64) *Rooms {
		r := s.rooms(t.Context(), cores, 0)
		t.Cleanup(r.Close)
		return r
	}
	has := func(turn <-chan struct{}) bool {
		select {
		case <-turn:
			return true
		default:
			return false
		}
	}
	var first *Rooms
	for i := range roomStreams {
		r := rooms(2)
		if i == 0 {
			first = r
		}
		if turn, queued := s.follow("a:1", r); queued || !has(turn) {
			t.Fatal("too few streams")
		}
	}
	if roomStreams > 256/2 {
		t.Error("no room for others")
	}
	if turn, _ := s.follow("a:1", rooms(1)); turn != nil {
		t.Error("a lease that needs less than all others waits for a stream")
	}
	if turn, queued := s.follow("b:1", rooms(1)); queued || !has(turn) {
		t.Error("the limit is not that of one executor")
	}
	second, third, fourth := rooms(2), rooms(3), rooms(2)
	a, _ := s.follow("a:1", second)
	b, _ := s.follow("a:1", third)
	c, queued := s.follow("a:1", fourth)
	if !queued || has(a) || has(b) || has(c) {
		t.Fatal("there are more streams than the most")
	}
	s.unfollow("a:1", second) // it does not wait any more
	s.unfollow("a:1", first)
	if has(a) || !has(b) || has(c) {
		t.Error("an ended stream does not go to the lease that came first")
	}
	s.unfollow("a:1", third)
	if !has(c) {
		t.Error("the next stream does not go to the next lease")
	}
}
