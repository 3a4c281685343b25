package executor

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/datalisten"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/quota"
)

// newTCPNode returns a node that also offers tcp.
func newTCPNode(t *testing.T) *node {
	t.Helper()
	data, err := datalisten.Open("127.0.0.1:0", "", slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	data.Serve()
	t.Cleanup(data.Close)
	return newNode(t, func(c *Config) { c.Providers, c.Data = []string{"shm", "tcp"}, data })
}

// newTCPConn returns a connection on a tcp device of its own, and its blob.
func newTCPConn(t *testing.T, o dataplane.Options) (*dataplane.Conn, []byte) {
	t.Helper()
	dev, err := dataplane.Open(dataplane.TCP, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	domain, err := dev.NewDomain()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(domain.Close)
	conn, err := domain.NewConn()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	blob, err := conn.Blob()
	if err != nil {
		t.Fatal(err)
	}
	return conn, blob
}

// The devices stay open until the regions of connections that have ended are closed.
func TestClaimsCloseLate(t *testing.T) {
	n := newTCPNode(t)
	_, blob := newTCPConn(t, dataplane.Options{GIDIndex: -1, ActiveOnly: true})
	l := n.mustLease(n.keepable(1))
	if _, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId(), Keep: true, Claims: true}); err != nil {
		t.Fatal(err)
	}
	c := &n.e.claims
	var r *region
	for _, r = range c.regions {
	}
	if _, err := n.AttachClaims(n.ctx(), &control.AttachClaimsRequest{Provider: dataplane.TCP, Blob: blob, Token: r.token[:]}); err != nil {
		t.Fatal(err)
	}
	r.reach.mu.Lock() // so that the region cannot be closed yet
	n.conn.Close()
	eventually(t, "the region is forgotten", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.regions) == 0
	})
	closed := make(chan struct{})
	go func() { defer close(closed); c.close() }()
	eventually(t, "no connection is accepted any more", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.ended
	})
	if name := r.reach.to.device.Name(); !strings.HasPrefix(name, "tcp") {
		t.Errorf("the device has the name %q", name)
	}
	r.reach.mu.Unlock()
	select {
	case <-closed:
	case <-time.After(testBound):
		t.Error("the claims are not closed when the region is")
	}
}

// A client on tcp reaches the words of its own claim region and nothing else, for as long as its connection to the executor lives.
func TestAttachClaims(t *testing.T) {
	n := newTCPNode(t)
	t.Cleanup(n.e.claims.close) // before the drain of newNode, which looks for leaks
	conn, blob := newTCPConn(t, dataplane.Options{GIDIndex: -1, ActiveOnly: true})
	attach := func(change func(*control.AttachClaimsRequest)) (*control.AttachClaimsReply, error) {
		req := &control.AttachClaimsRequest{Provider: dataplane.TCP, Blob: blob}
		for _, r := range n.e.claims.regions {
			req.Token = r.token[:]
		}
		change(req)
		return n.AttachClaims(n.ctx(), req)
	}
	as := func(*control.AttachClaimsRequest) {}
	_, err := attach(as)
	refuses(t, "without a region", err, control.ClassInvalid, "the token names no claim region of this connection")

	l := n.mustLease(n.keepable(1))
	if _, err := n.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId(), Keep: true, Claims: true}); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		change func(*control.AttachClaimsRequest)
		class  control.Class
		text   string
	}{
		"token":    {func(r *control.AttachClaimsRequest) { r.Token = make([]byte, claimSecret) }, control.ClassInvalid, "the token names no claim region"},
		"no token": {func(r *control.AttachClaimsRequest) { r.Token = nil }, control.ClassInvalid, "the token names no claim region"},
		"provider": {func(r *control.AttachClaimsRequest) { r.Provider = "shm" }, control.ClassUnsupported, `claim region over provider "shm", own false: want tcp or verbs`},
		"blob":     {func(r *control.AttachClaimsRequest) { r.Blob = r.Blob[:9] }, control.ClassInvalid, "the blob is not of a queue pair of provider tcp"},
	} {
		_, err := attach(c.change)
		refuses(t, what, err, c.class, c.text)
	}
	r, err := attach(as)
	if err == nil {
		err = conn.Connect(t.Context(), r.GetBlob())
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = attach(as)
	refuses(t, "a second time", err, control.ClassInvalid, "was attached before")

	var region *region
	for _, region = range n.e.claims.regions {
	}
	bell := func() uint32 {
		var b [4]byte
		if _, err := region.File().ReadAt(b[:], 8); err != nil {
			t.Fatal(err)
		}
		return binary.NativeEndian.Uint32(b[:])
	}
	before := bell()
	at, armed, claimed := claim.Word(claim.Lines-1, 1)
	if won, err := conn.CompareSwap(r.GetRegion().GetAddr()+at, r.GetRegion().GetKey(), armed, claimed, time.Minute); won || err != nil {
		t.Errorf("a line that is not armed was claimed: %v, %v", won, err)
	}
	eventually(t, "the bell rings", func() bool { return bell() != before })
	if err := conn.Read(make([]byte, 8), r.GetRegion().GetAddr()+at, r.GetRegion().GetKey(), time.Minute); !errors.Is(err, dataplane.ErrInvalid) {
		t.Errorf("a read of the region: %v", err)
	}
	n.conn.Close()
	eventually(t, "the region cannot be reached any more", func() bool {
		_, err := conn.CompareSwap(r.GetRegion().GetAddr()+at, r.GetRegion().GetKey(), armed, claimed, time.Minute)
		return err != nil
	})
}

// A claimant has its place in the region and among those of its tenant until its queue pair is destroyed. Neither a detach nor a handover waits for that.
func TestClaimantsCountUntilClosed(t *testing.T) {
	n := newNode(t)
	c := &n.e.claims
	t.Cleanup(c.close)                                 // before the drain of newNode, which looks for leaks
	c.far = map[string]*reachable{dataplane.Verbs: {}} // these claimants have no queue pairs
	noDevices := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.far = nil
	}
	t.Cleanup(noDevices)
	var conns [3]context.Context
	var ends [3]context.CancelFunc
	var regions [3]*region
	for i := range conns {
		conns[i], ends[i] = context.WithCancel(t.Context())
		var err error
		if regions[i], err = c.region(conns[i]); err != nil {
			t.Fatal(err)
		}
	}
	add := func(i int) (*reach, error) {
		x := &reach{tenant: "ann", done: make(chan struct{})}
		return x, c.reserve(conns[i], x, &control.AttachClaimsRequest{Provider: dataplane.Verbs, Own: true})
	}
	full := func(what string, i int) {
		t.Helper()
		_, err := add(i)
		refuses(t, what, err, control.ClassBusy, "the most are 128 and 63")
	}
	fill := func(i, count int) (last *reach) {
		t.Helper()
		for range count {
			var err error
			if last, err = add(i); err != nil {
				t.Fatal(err)
			}
		}
		return last
	}
	handover := func() {
		t.Helper()
		ctx, stop := context.WithTimeout(t.Context(), testBound)
		defer stop()
		if err := n.e.turns.close(ctx); err != nil {
			t.Fatal(err)
		}
		n.e.turns.open()
	}
	hang := func(x *reach) (end func()) { // as if the driver took long to destroy the queue pair
		x.mu.Lock()
		end = sync.OnceFunc(x.mu.Unlock)
		t.Cleanup(end)
		return end
	}
	counted := func() int {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.claimants["ann"]
	}

	x := fill(0, claim.Claimants-1)
	full("a region", 0)
	end := hang(x)
	for range 2 {
		c.detach(conns[0], x.id)
	}
	if c.isClaimant(regions[0], x.id) {
		t.Error("a claimant that has ended gets workers")
	}
	full("a region with a claimant that is being destroyed", 0)
	handover()
	end()
	eventually(t, "the claimant has made room", func() bool {
		var err error
		x, err = add(0)
		return err == nil
	})

	fill(1, claim.Claimants-1)
	fill(2, claimantsMost-2*(claim.Claimants-1))
	full("a tenant", 2)
	end = hang(x)
	ends[0]()
	eventually(t, "the others of the connection are uncounted", func() bool { return counted() == claimantsMost-(claim.Claimants-1)+1 })
	handover()
	if regions[0].Bell() == nil {
		t.Error("the region was closed before its last claimant")
	}
	end()
	eventually(t, "the region is closed", func() bool { return regions[0].Bell() == nil && counted() == claimantsMost-(claim.Claimants-1) })
	noDevices()
	c.close()
	if got := counted(); got != 0 {
		t.Errorf("%d are counted at the end", got)
	}
}

// Attempts to attach that are refused do not use up the tenant's rate of leases.
func TestRefusedClaimantsCostNothing(t *testing.T) {
	n := newTenants(t, func(c *Config) { c.Settings.TenantLeases, c.Providers = 1, []string{dataplane.SHM, dataplane.Verbs} })
	ann := n.as("ann", "tenant", 0)
	for i := 0; i < manyCalls && !t.Failed(); i++ {
		_, err := ann.AttachClaims(n.ctx(), &control.AttachClaimsRequest{Provider: dataplane.Verbs, Own: true})
		refuses(t, "without a region", err, control.ClassInvalid, "this connection has no claim region yet")
	}
	if used := n.e.gate.RefusedByQuota(quota.Leases); used > 0 {
		t.Errorf("%d attempts were refused by tenant-leases", used)
	}
}
