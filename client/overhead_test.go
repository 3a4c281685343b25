package client_test

import (
	"context"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/ccalls"
)

// A call from Go takes little longer than rfaas_invoke from C on the same lease and thread. The figures are medians of
// interleaved pairs. They are smaller between distant processors, because the transfer of the worker's cache line overlaps
// with the work in Go.
func TestGoAddsLittle(t *testing.T) {
	pairs := 11
	if os.Getenv("RFAAS_TEST_FIGURES") != "" {
		pairs = 301
	}
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{WaitMode: client.Hot})
	echo := function(t, l, "echo")
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for _, size := range []int{8, 64, 1 << 10} {
		more, base := overC(t, l, echo, size, pairs)
		t.Logf("%d B: %.1f ns from C", size, base)
		t.Logf("figure: go.over_c_ns.%d = %.1f ns", size, more)
		if more > 3*base {
			t.Errorf("a call of %d B from Go takes %.1f ns more than one from C, which takes %.1f", size, more, base)
		}
	}
}

// overC returns how much longer a call from Go takes than one from C, and how long that one takes: medians of pairs, in ns.
func overC(t *testing.T, l *client.Lease, echo *client.Function, size, pairs int) (more, base float64) {
	const calls = 5000
	in, out := make([]byte, size), make([]byte, size)
	fromC := func() float64 {
		d, err := ccalls.Invoke(client.Handle(l), client.Index(echo), in, out, calls)
		if err != nil {
			t.Fatal(err)
		}
		return float64(d) / calls
	}
	fromGo := func() float64 {
		runtime.Gosched() // the scheduler interrupts a goroutine after 10 ms, which takes long on a locked thread
		began := time.Now()
		for range calls {
			if _, err := echo.Invoke(context.Background(), in, out); err != nil {
				t.Fatal(err)
			}
		}
		return float64(time.Since(began)) / calls
	}
	var over, alone []float64
	for i := range pairs {
		var c, g float64
		if i%2 == 0 {
			c, g = fromC(), fromGo()
		} else {
			g, c = fromGo(), fromC()
		}
		over, alone = append(over, g-c), append(alone, c)
	}
	slices.Sort(over)
	slices.Sort(alone)
	return over[pairs/2], alone[pairs/2]
}
