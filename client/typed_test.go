package client_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/rfaas-go/rfaas/client"
)

type metres float64

func TestTyped(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{})
	echo, sum := function(t, l, "echo"), function(t, l, "sum")
	out := make([]metres, 5)
	n, err := client.Invoke(t.Context(), echo, []metres{1.5, -2, 3}, out)
	if err != nil || n != 3 || !slices.Equal(out, []metres{1.5, -2, 3, 0, 0}) {
		t.Errorf("%d %v, %v", n, out, err)
	}
	total := make([]uint64, 1)
	if n, err := client.Invoke(t.Context(), sum, []uint8{200, 100}, total); err != nil || n != 1 || total[0] != 300 {
		t.Errorf("%d %v, %v", n, total, err)
	}
	if n, err := client.Invoke(t.Context(), echo, []int32(nil), []int32(nil)); err != nil || n != 0 {
		t.Errorf("nothing: %d, %v", n, err)
	}
	var e *client.Error
	if _, err := client.Invoke(t.Context(), echo, []uint8{1, 2, 3}, make([]uint16, 2)); !errors.As(err, &e) || !errors.Is(err, client.ErrConnection) || !e.Started {
		t.Errorf("one element and a half: %v", err)
	}
	if client.Bytes([]float32{}) != nil || len(client.Bytes(make([]complex128, 3))) != 48 {
		t.Error("Bytes")
	}
}
