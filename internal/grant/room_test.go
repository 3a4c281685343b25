package grant

import "testing"

// Waiting leases leave room for other streams on a connection: the executor permits at least 256 (callStreams in internal/config).
func TestRoomStreamsAreLimited(t *testing.T) {
	s, err := newShared(&Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	for range roomStreams {
		if !s.follow("a:1") {
			t.Fatal("too few streams")
		}
	}
	if s.follow("a:1") || !s.follow("b:1") {
		t.Error("the limit is not that of one executor")
	}
	s.unfollow("a:1")
	if !s.follow("a:1") || roomStreams > 256/2 {
		t.Error("an ended stream counts, or there is no room for others")
	}
}
