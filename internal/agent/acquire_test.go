package agent

import "testing"

// A lease that is refused again and again although executors report room, as beyond a limit of its tenant, asks less often.
func TestBackoff(t *testing.T) {
	b := backoff{pause: pauseMin}
	for range vainAttempts {
		if b.next(true); b.pause > roomPause {
			t.Fatalf("pause %v after a report of room, want at most %v", b.pause, roomPause)
		}
	}
	for range 10 {
		b.next(true)
	}
	if b.pause != vainPause {
		t.Errorf("pause %v when reports of room are in vain, want %v", b.pause, vainPause)
	}
	if b.next(false); b.pause != pauseMax {
		t.Errorf("pause %v without a report, want %v", b.pause, pauseMax)
	}
	if b.next(true); b.pause != roomPause {
		t.Errorf("pause %v at the first report, want %v", b.pause, roomPause)
	}
}
