package manager

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// intruder is a connection to the manager of who uses it as he likes.
func (w *world) intruder(dev *dataplane.Device, join func(blob []byte) ([]byte, error)) *dataplane.Conn {
	w.t.Helper()
	domain, err := dev.NewDomain()
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(domain.Close)
	c, err := domain.NewConn()
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(c.Close)
	blob, err := c.Blob()
	if err != nil {
		w.t.Fatal(err)
	}
	peer, err := join(blob)
	if err == nil {
		err = c.Connect(w.t.Context(), peer)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// A client and an executor that know the addresses and keys of all regions can still reach only their own regions.
func TestProviderRights(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		w := newWorld(t, provider, 8)
		w.stop()
		w.withLimits(t, "ann=10")
		if _, err := w.client.Limit(t.Context(), &control.LimitRequest{Tenant: "ann"}); err != nil {
			t.Fatal(err)
		}
		dev := w.device()
		var whole *control.MemoryRef
		client := func() *dataplane.Conn {
			return w.intruder(dev, func(blob []byte) ([]byte, error) {
				r, err := w.client.AttachClient(t.Context(), &control.AttachClientRequest{Provider: provider, Blob: blob})
				whole = r.GetBoard()
				return r.GetBlob(), err
			})
		}
		var before []byte
		var all func() []byte
		executor := func(n byte) (*dataplane.Conn, *control.AttachExecutorReply) {
			var reply *control.AttachExecutorReply
			in := info(n, 4)
			id := register(t, w.Manager, fmt.Sprintf("192.0.2.%d:1", n), in)
			if all != nil {
				before = bytes.Clone(all()) // registering writes its line
			}
			return w.intruder(dev, func(blob []byte) (_ []byte, err error) {
				reply, err = w.client.AttachExecutor(t.Context(), &control.AttachExecutorRequest{ExecutorId: id, Incarnation: in.Incarnation, Provider: provider, Blob: blob})
				return reply.GetBlob(), err
			}), reply
		}
		const soon = 10 * time.Second
		line := bytes.Repeat([]byte{0xa5}, board.LineSize)
		victim, its := executor(2)
		if err := victim.Write(line, its.GetLine().GetAddr(), its.GetLine().GetKey(), soon); err != nil {
			t.Fatal(err)
		}
		add := func(c *dataplane.Conn, addr uint64, key uint32) error {
			_, err := c.FetchAdd([]dataplane.Add{{Addr: addr, Value: 3}}, key, soon)
			return err
		}
		if err := errors.Join(add(victim, its.GetCells().GetAddr(), its.GetCells().GetKey()), add(victim, its.GetLimits().GetAddr()+8, its.GetLimits().GetKey())); err != nil {
			t.Fatal(err)
		}
		var victims *attachment
		for _, a := range w.table.attachments(false) {
			victims = a
		}
		all = func() []byte {
			return bytes.Join([][]byte{w.memory.whole.Bytes()[board.HeaderSize:], victims.cells.Bytes(), victims.held.Bytes(), w.limits.table}, nil)
		}
		refused := func(what string, err error) {
			t.Helper()
			var e *dataplane.Error
			if !errors.As(err, &e) || e.Status != dataplane.StatusInvalid {
				t.Errorf("%s: %v", what, err)
			}
			if !bytes.Equal(before, all()) {
				t.Errorf("%s: memory has changed", what)
			}
		}
		got := make([]byte, 8)
		client()
		before = bytes.Clone(all())
		for name, ref := range map[string]*control.MemoryRef{"the board": whole, "a line": its.GetLine(), "cells": its.GetCells(), "limits": its.GetLimits(), "what an executor holds": its.GetHeld(), "what an executor has counted": its.GetStats()} {
			at, key := ref.GetAddr(), ref.GetKey()
			refused("a client writes "+name, client().Write(line[:8], at, key, soon))
			refused("a client adds to "+name, add(client(), at, key))
			if name != "the board" {
				refused("a client reads "+name, client().Read(got, at, key, soon))
			}
		}
		refused("a client reads behind the board", client().Read(got, whole.GetAddr()+whole.GetSize(), whole.GetKey(), soon))

		// An executor has a slot and an identity of its own, which the board shows from its registration on.
		for name, ref := range map[string]*control.MemoryRef{"the board": whole, "its neighbour's line": its.GetLine(), "its neighbour's cells": its.GetCells(),
			"what its neighbour holds": its.GetHeld(), "what its neighbour has counted": its.GetStats()} {
			a, _ := executor(1)
			refused("an executor writes "+name, a.Write(line[:8], ref.GetAddr(), ref.GetKey(), soon))
			a, _ = executor(1)
			refused("an executor adds to "+name, add(a, ref.GetAddr(), ref.GetKey()))
			a, _ = executor(1)
			refused("an executor reads "+name, a.Read(got, ref.GetAddr(), ref.GetKey(), soon))
		}
		a, mine := executor(1)
		refused("an executor writes its neighbour's line with its own key", a.Write(line, its.GetLine().GetAddr(), mine.GetLine().GetKey(), soon))
		a, mine = executor(1)
		refused("an executor writes limits", a.Write(line[:8], mine.GetLimits().GetAddr(), mine.GetLimits().GetKey(), soon))
		a, mine = executor(1)
		refused("an executor writes past its line", a.Write(line[:16], mine.GetLine().GetAddr()+board.LineSize-8, mine.GetLine().GetKey(), soon))
		a, mine = executor(1)
		if err := a.Write(line, mine.GetLine().GetAddr(), mine.GetLine().GetKey(), soon); err != nil {
			t.Errorf("its own line, after all that: %v", err)
		}
		if err := victim.Write(line, its.GetLine().GetAddr(), its.GetLine().GetKey(), soon); err != nil {
			t.Errorf("the neighbour: %v", err)
		}
	})
}
