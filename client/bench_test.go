package client_test

import (
	"context"
	"testing"

	"github.com/rfaas-go/rfaas/client"
)

// BenchmarkInvoke is a hot call of echo with 8 bytes.
func BenchmarkInvoke(b *testing.B) {
	w := newWorld(b)
	l := w.lease(b, client.LeaseOptions{WaitMode: client.Hot})
	echo := function(b, l, "echo")
	in, out := make([]byte, 8), make([]byte, 8)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := echo.Invoke(context.Background(), in, out); err != nil {
			b.Fatal(err)
		}
	}
}
