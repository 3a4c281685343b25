package grant

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// What a worker is seen to do, look by look, and whether it is to be replaced for it. Reports come every 250 ms.
func TestSuspicion(t *testing.T) {
	idle := func(calls uint64) *Inspection { return &Inspection{PID: 7, Calls: calls} }
	runs := &Inspection{PID: 7, Running: "f", Calls: 4}
	for _, c := range []struct {
		name  string
		sees  []*Inspection // nil: nobody answers; the last one goes on
		dies  int           // after so many looks; 0: never
		looks int           // within a minute
	}{
		{"runs no function", []*Inspection{idle(4)}, 2, 2},
		{"has just begun", []*Inspection{idle(4), runs}, 0, 7},
		{"runs a long function", []*Inspection{runs}, 0, 6},
		{"ends one, with its answer on its way", []*Inspection{runs, idle(5)}, 3, 3},
		{"counts calls", []*Inspection{idle(4), idle(5), idle(6), idle(7), runs}, 0, 10},
		{"is another one", []*Inspection{idle(4), {PID: 8, Calls: 4}, {PID: 9, Calls: 4}, runs}, 0, 9},
		{"gets no processor", []*Inspection{{PID: 7, Calls: 4, Runnable: true}}, 0, 48},
		{"gets one at last", []*Inspection{{PID: 7, Calls: 4, Runnable: true}, {PID: 7, Calls: 4, Runnable: true}, {PID: 7, Calls: 4, Runnable: true, CPU: time.Second}}, 3, 3},
		{"refuses calls", []*Inspection{idle(4), {PID: 7, Calls: 4, Refused: 1}, runs}, 0, 8},
		{"is not seen", []*Inspection{nil}, 0, 48},
		{"is not seen in between", []*Inspection{idle(4), nil, idle(4), idle(4)}, 4, 4},
	} {
		k, looks, died := &suspicion{since: 1, pause: lookAgain}, 0, 0
		for at := int64(5 * time.Second); at < int64(65*time.Second); at += int64(250 * time.Millisecond) {
			switch k.now(at, at+1) {
			case look:
				i := c.sees[min(looks, len(c.sees)-1)]
				looks++
				if i == nil {
					k.take(&Inspection{}, errors.New("nobody answers"), at+2)
				} else {
					k.take(i, nil, at+2)
				}
				if again := k.now(at+2, at+int64(time.Hour)); again != wait {
					t.Errorf("%s: what was known before the look leads to %d", c.name, again)
				}
			case bury:
				if died != 0 {
					t.Errorf("%s: replaced twice", c.name)
				}
				died = looks
				if e := k.verdict(&Unanswered{3, 1, at}); e.Worker != 3 || e.PID != 7 || !strings.Contains(e.Reason, "runs no function") {
					t.Errorf("%s: %+v", c.name, e)
				}
			}
		}
		if died != c.dies || looks != c.looks {
			t.Errorf("%s: %d looks, replaced after %d; want %d and %d", c.name, looks, died, c.looks, c.dies)
		}
	}
}
