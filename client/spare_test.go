package client

import (
	"testing"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// made makes n connections of a kind, which nobody has connected.
func made(t *testing.T, kind spareKind, n int) (list connections) {
	t.Helper()
	for range n {
		c, err := newConnection(kind.dev, kind.cfg, kind.mode)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, c)
	}
	return list
}

// Connections that are put are given again, the last one first, each once, and only to leases with such channels; those that would
// take too much memory, too many, and those of a closed session are not kept.
func TestSpares(t *testing.T) {
	dev, err := dataplane.Open("shm", dataplane.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	kind := spareKind{dev: dev, cfg: dataplane.ChannelConfig{Depth: 2, Eager: 4096, Bulk: 64 << 10}}
	var s spares
	if _, ok := s.take(kind); ok {
		t.Fatal("one of none")
	}
	list := made(t, kind, 1)
	if _, err := list[0].ch.Offer(); err != nil {
		t.Fatal(err)
	}
	s.put(kind, list)
	s.resets.Wait()
	for name, other := range map[string]spareKind{
		"depth": {dev, dataplane.ChannelConfig{Depth: 4, Eager: 4096, Bulk: 64 << 10}, kind.mode},
		"bulk":  {dev, dataplane.ChannelConfig{Depth: 2, Eager: 4096}, kind.mode},
		"mode":  {dev, kind.cfg, dataplane.WaitMode(Hot)},
	} {
		if _, ok := s.take(other); ok {
			t.Errorf("a lease of another %s got it", name)
		}
	}
	c, ok := s.take(kind)
	if !ok || c != list[0] {
		t.Fatalf("took %v, %v, want what was put", c, ok)
	}
	if _, err := c.ch.Offer(); err != nil {
		t.Errorf("it cannot be offered again: %v", err)
	}
	if _, ok := s.take(kind); ok {
		t.Error("given twice")
	}
	s.put(kind, append(made(t, kind, 3), c))
	s.put(kind, made(t, kind, sparesMost+2))
	s.resets.Wait()
	if n := len(s.list); n != sparesMost {
		t.Errorf("%d are kept, want %d", n, sparesMost)
	}
	large := spareKind{dev: dev, cfg: dataplane.ChannelConfig{Depth: 1, Eager: 4096, Bulk: spareBytes}}
	s.put(large, made(t, large, 1))
	s.resets.Wait()
	if _, ok := s.take(large); ok {
		t.Errorf("one of more than %d bytes is kept", spareBytes)
	}
	s.close()
	s.put(kind, made(t, kind, 1))
	s.resets.Wait()
	if _, ok := s.take(kind); ok || len(s.list) != 0 {
		t.Error("one is kept of a session that is closed")
	}
}
