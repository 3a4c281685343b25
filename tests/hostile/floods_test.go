package hostile

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
)

// flood makes n calls on 16 goroutines.
func flood(n int, call func()) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for next.Add(1) <= int64(n) {
				call()
			}
		})
	}
	wg.Wait()
}

// leasesAlways asks for leases until it is refused for asking too often. A tenant may have a rate and a burst; both are generous here.
func leasesAlways(c *cluster) string {
	const n, burst, rate = 50000, 25000, 2500
	e, ctx := c.tenant("flood"), c.within(2*patience)
	blob := endpoint{1}.channel(c, nil)
	began := time.Now()
	var refused, asked atomic.Int64
	flood(n, func() {
		if refused.Load() > 0 {
			return
		}
		r := &control.LeaseRequest{ProtocolVersion: control.ProtocolVersion, RequestId: make([]byte, 16), CodeSha256: make([]byte, 32), Workers: 1,
			Provider: "shm", ClientBlobs: [][]byte{blob}, Tenant: "flood"}
		rand.Read(r.RequestId)
		_, err := e.Lease(ctx, r)
		asked.Add(1)
		if err != nil {
			refused.Add(1)
		}
	})
	took := time.Since(began).Seconds()
	if refused.Load() == 0 && float64(asked.Load()) > burst+rate*took {
		return fmt.Sprintf("all of %d were looked at in %.1f s", asked.Load(), took)
	}
	return ""
}

func opensStreams(c *cluster) string {
	const n = 2000
	before := c.executor.metric("go_goroutines")
	conn := c.dial(c.executor.address, control.DialConfig{TokenFile: c.token("streams")})
	e := control.NewExecutorClient(conn)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wg sync.WaitGroup
	var begun atomic.Int64
	for range n {
		wg.Go(func() {
			s, err := e.Upload(ctx) // blocks where the server allows no more streams
			if err == nil {
				err = s.Send(&control.UploadChunk{Sha256: make([]byte, 32), Size: 1 << 20, Name: "x"})
			}
			begun.Add(1)
			if err == nil {
				<-s.Context().Done() // the stream stays open; the server may end it
			}
		})
	}
	most := 0.0
	settle(func() int { return int(begun.Load()) }, func() bool {
		most = max(most, c.executor.metric("go_goroutines"))
		return most-before > 1000
	})
	cancel()
	conn.Close()
	wg.Wait()
	if most-before > 1000 {
		return fmt.Sprintf("%.0f goroutines more for %d streams of one connection", most-before, n)
	}
	return ""
}

func attachesAlways(c *cluster) string {
	const n = 2000
	m, hole := c.tenantAtManager("flood"), c.blackHole()
	before := c.manager.threads()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wg sync.WaitGroup
	var ended atomic.Int64
	for range n {
		wg.Go(func() {
			m.AttachClient(ctx, &control.AttachClientRequest{Provider: "shm", Blob: hole.queuePair(c)})
			ended.Add(1)
		})
	}
	most := 0
	settle(func() int { return most + int(ended.Load()) }, func() bool {
		most = max(most, c.manager.threads())
		return most-before > 128 || ended.Load() == n
	})
	cancel()
	wg.Wait()
	if most-before > 128 {
		return fmt.Sprintf("%d threads more of the manager", most-before)
	}
	return ""
}

func floodsLog(c *cluster) string {
	const n = 2000
	e, ctx := c.tenant("flood"), c.within(2*patience)
	before, began := c.executor.logged(), time.Now()
	flood(n, func() { e.Drain(ctx, &control.DrainRequest{}) })
	lines := c.executor.logged() - before
	if most := 100 + int(100*time.Since(began).Seconds()); lines > most && lines > n/4 {
		return fmt.Sprintf("%d lines for %d calls", lines, n)
	}
	return ""
}
