package agent

import (
	"errors"
	"flag"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

var claimSoak = flag.Duration("claim-soak", 2*time.Second, "how long TestHostileTenantBesideAnother lasts")

// A tenant writes arbitrary words into its claim region, claims workers that it never uses, rings without a claim, and sends its agent malformed claims, all as fast
// as it can. Another tenant of the same agent and executor takes leases and makes calls meanwhile. It may have to wait for cores, because no tenant has a
// limit here, but its calls are right, and no core is lost.
func TestHostileTenantBesideAnother(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret, "--share-cores", "4", "--client-first-use", "5s")
	victim := connect(t, w.socket, "RFAAS_SECRET_FILE="+w.secret, "USER=victim")
	if err := victim.open(1, protocol.Session{Executor: x.address}); err != nil {
		t.Fatal(err)
	}
	until := time.Now().Add(*claimSoak)
	calls, busy, slowest := 0, 0, time.Duration(0)
	var work sync.WaitGroup
	work.Go(func() {
		for key := uint64(1); (time.Now().Before(until) || calls == 0) && !t.Failed(); key = key%1000 + 1 {
			began := time.Now()
			l, err := victim.acquire(protocol.Acquire{Key: key, Spec: spec(1), WaitNs: int64(10 * time.Second)})
			if errors.Is(err, dataplane.ErrBusy) {
				busy++
				continue
			}
			if err != nil {
				t.Errorf("lease %d: %v", calls, err)
				return
			}
			for range 3 {
				if err := l.call(0); err != nil {
					t.Errorf("call %d: %v", calls, err)
				}
				calls++
			}
			l.release(false)
			l.close()
			slowest = max(slowest, time.Since(began))
		}
	})
	r := rand.New(rand.NewPCG(1, 2))
	requests, hostiles := 0, 0
	for time.Now().Before(until) && !t.Failed() {
		hostiles++
		requests += attack(t, opened(t, w, x), r)
	}
	work.Wait()
	eventually(t, "all cores are free", func() bool { return x.free(t, w.secret) == 8 })
	t.Logf("%d hostile writes, rings and messages of %d processes in %v beside %d calls, the slowest lease %v, %d times no core", requests, hostiles,
		*claimSoak, calls, slowest, busy)
	t.Logf("figure: claims.hostile = %d", requests)
	t.Logf("figure: claims.hostile_beside = %d", calls)
	if requests < 1000 || calls == 0 {
		t.Errorf("%d hostile requests beside %d calls", requests, calls)
	}
}

// attackRounds is how many leases a hostile process releases.
const attackRounds = 50

// attack lets a process release leases, and make requests that can harm only its own tenant. It returns the number of requests.
func attack(t *testing.T, p *process, r *rand.Rand) (n int) {
	t.Helper()
	defer p.conn.Close()
	states := []uint64{0, lineArmed, lineClaimed, lineClosed, 4, 5, 255}
	for key := range uint64(attackRounds) {
		l, err := p.acquire(protocol.Acquire{Key: key + 1, Spec: spec(1)})
		if err != nil {
			continue // the cores are the other tenant's
		}
		m := protocol.Release{Key: l.key, Keep: true}
		if _, err := p.ask(protocol.OpRelease, m.Encode, nil); err != nil {
			t.Errorf("release: %v", err)
		}
		l.close()
		p.mu.Lock()
		regions := slices.Clone(p.regions)
		p.mu.Unlock()
		for _, region := range regions {
			for range 500 {
				word := regionWord(region, r.Uint32N(claim.Lines))
				switch r.IntN(3) {
				case 0:
					word.Store(r.Uint64())
				case 1:
					word.Store(word.Load()&^0xff | states[r.IntN(len(states))])
				case 2:
					ringBell(region)
				}
				n++
			}
			if r.IntN(20) > 0 {
				continue
			}
			for i := range uint32(claim.Lines) { // claims of whatever is armed, which nobody uses
				word := regionWord(region, i)
				word.Store(word.Load()&^0xff | lineClaimed)
				n++
			}
			ringBell(region)
		}
	}
	// The agent ends the connection of a process that sends a malformed message, so this is the last attack.
	claimed := protocol.Adopt{Key: attackRounds + 1, Session: 1, Cached: r.Uint64(), LeaseID: r.Uint64(), Spec: spec(1)}
	b := claimed.Encode(protocol.Begin(nil, protocol.OpClaimed, 0, 0))
	protocol.End(b, 0)
	_, err := p.conn.Write(b)
	if err != nil {
		t.Errorf("send a malformed claim: %v", err)
	}
	return n + 1
}
