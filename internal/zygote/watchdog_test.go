package zygote

import (
	"testing"
	"time"
)

// The first call of each lease has the limit of the init call. A thread that hides on the page that this call has returned does not keep that limit.
func TestCallLimitOfInitCalls(t *testing.T) {
	const call, init, slack = time.Second, time.Minute, time.Second
	l := callLimit{call: call, init: init}
	check := func(what string, calls uint64, want time.Duration) {
		t.Helper()
		if got := l.now(calls); got != want {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	check("the init call", 0, init)
	l.ran(init, slack)
	check("an init call that runs", 0, init)
	check("the second call", 1, call)
	check("a page that says that the init call runs again", 0, call)
	l.next(7)
	check("the init call of the next lease", 7, init)
	for range 2 * (init + slack) / time.Second {
		l.ran(time.Second, slack)
	}
	check("calls for longer than an init call", 7, call)
	l = callLimit{call: call}
	l.ran(time.Hour, slack)
	check("an init call without a limit", 0, 0)
}
