package capi

import (
	"fmt"
	"testing"
)

// TestCachedConnections takes leases on connections that released ones have left.
func TestCachedConnections(t *testing.T) {
	program := build(t, "gcc", "testdata/cached_test.c", c11...)
	// No new queue pair, by the statistics and by the data plane's own count, and at most half of the first lease's control time.
	t.Run("reuse", func(t *testing.T) {
		at := symbols(t, "rfaas_invoke", "dp_qps_made")
		f := figures(t, program, built(t, "build/functions/echo.so"), fmt.Sprintf("reuse:%d", int64(at["dp_qps_made"]-at["rfaas_invoke"])))
		t.Logf("figure: cached.control_share = %.3f", f["cached_us"]/f["first_us"])
		if f["cached_us"] <= 0 || f["cached_us"] > f["first_us"]/2 {
			t.Errorf("the first lease took %.1f us, one on its connections %.1f us", f["first_us"], f["cached_us"])
		}
	})
	// Two threads of a process take leases in turn. Each uses the connections that the other made.
	t.Run("threads", func(t *testing.T) { t.Log(run(t, program, built(t, "build/functions/echo.so"), "threads")) })
}
