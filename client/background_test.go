package client

import (
	"context"
	"reflect"
	"testing"
)

type key struct{}

func TestIsBackground(t *testing.T) {
	if size := reflect.TypeOf(context.Background()).Size(); size != 0 {
		t.Errorf("values of the type of context.Background() have %d bytes, so there may be several", size)
	}
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	for name, k := range map[string]struct {
		ctx  context.Context
		want bool
	}{
		"background": {context.Background(), true},
		"todo":       {context.TODO(), false},
		"cancelled":  {cancelled, false},
		"value":      {context.WithValue(context.Background(), key{}, 1), false},
		"detached":   {context.WithoutCancel(context.Background()), false},
		"idempotent": {Idempotent(context.Background(), 1), false},
		"nil":        {nil, false},
	} {
		if got := isBackground(k.ctx); got != k.want {
			t.Errorf("%s: %v, want %v", name, got, k.want)
		}
	}
}
