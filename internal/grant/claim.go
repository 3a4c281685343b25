package grant

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// regionTime bounds getting the descriptor of a claim region.
const regionTime = time.Second

// Region is the claim region of an executor on this node. It is closed with the connections, or when the executor has another one.
type Region struct {
	Number uint32 // of this process's regions, from 1
	File   *os.File
	token  []byte
}

var regions atomic.Uint32 // numbers that were given

// Claim says how a client claims the workers of a cached lease.
type Claim struct {
	*Region
	Line     uint32
	Sequence uint64
}

// region returns the region that an executor names. If the region is new, it gets the descriptor first. Another release may close the region of an
// earlier executor at any time.
func (c *shared) region(addr string, m *control.Claim) (*Region, error) {
	c.mu.Lock()
	r := c.regions[addr]
	c.mu.Unlock()
	if r != nil && bytes.Equal(r.token, m.GetToken()) {
		return r, nil
	}
	f, err := openRegion(m)
	if err != nil {
		return nil, err
	}
	fresh := &Region{Number: regions.Add(1), File: f, token: m.GetToken()}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch now := c.regions[addr]; {
	case c.closed:
		f.Close()
		return nil, errors.New("the session is closed")
	case now != nil && bytes.Equal(now.token, fresh.token): // another release was faster
		f.Close()
		return now, nil
	case now != nil:
		now.File.Close()
	}
	c.regions[addr] = fresh
	return fresh, nil
}

// openRegion gets a region's descriptor from its executor. If the executor has just ended, another process may listen on the socket. So the
// process that answers must send the proof that came with the message.
func openRegion(m *control.Claim) (*os.File, error) {
	if !strings.HasPrefix(m.GetSocket(), claim.Sockets) || len(m.GetToken()) != claim.Secret || len(m.GetProof()) != claim.Secret {
		// An executor must not use the rights that this process has at other sockets.
		return nil, fmt.Errorf("socket %.100q, token of %d bytes, proof of %d bytes: want a socket %s..., and %d bytes each", m.GetSocket(), len(m.GetToken()),
			len(m.GetProof()), claim.Sockets, claim.Secret)
	}
	ctx, cancel := context.WithTimeout(context.Background(), regionTime)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", m.GetSocket())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(regionTime))
	if _, err := conn.Write(m.GetToken()); err != nil {
		return nil, err
	}
	proof, oob := make([]byte, claim.Secret), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := conn.(*net.UnixConn).ReadMsgUnix(proof, oob)
	if err != nil {
		return nil, err
	}
	var fds []int
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	for i := range messages {
		if some, err := unix.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, some...)
		}
	}
	if err == nil && len(fds) == 1 && bytes.Equal(proof[:n], m.GetProof()) && checkRegion(fds[0]) == nil {
		return os.NewFile(uintptr(fds[0]), "claim region"), nil
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	return nil, fmt.Errorf("another process than the executor has answered at %s with %d descriptors, or the descriptor is not a region", m.GetSocket(), len(fds))
}

// checkRegion returns an error unless a descriptor is that of a memory file that has a region's size and cannot shrink.
func checkRegion(fd int) error {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if seals&unix.F_SEAL_SHRINK == 0 || st.Size != int64(claim.Size) {
		return fmt.Errorf("%d bytes, seals %#x", st.Size, seals)
	}
	return nil
}

// claimable sets how a cached lease is claimed, if the executor has said how. If the region cannot be had, the workers are reused by message only.
func (k *Cached) claimable(c *Control, m *control.Claim) {
	if m == nil || m.GetLine() >= claim.Lines {
		return
	}
	switch p := k.cand.Provider; {
	case p == dataplane.Verbs && m.GetClaimant() == 0: // an executor of an earlier version. Its regions have another protocol
		return
	case p == dataplane.Verbs && m.GetClaimant() != claim.Agent:
		k.own = &OwnClaim{m.GetLine(), m.GetSequence(), m.GetLeaseId(), milliseconds(m.GetClientMs())}
		return
	case p == dataplane.TCP || p == dataplane.Verbs:
		if r := c.farRegion(k.cand.Address, p, k.cl, m.GetToken()); r != nil {
			k.far = &farClaim{r, m.GetLine(), m.GetSequence(), m.GetLeaseId(), milliseconds(m.GetClientMs())}
		}
		return
	}
	if r, err := c.region(k.cand.Address, m); err == nil {
		k.claim = &Claim{r, m.GetLine(), m.GetSequence()}
	}
}

// Claim returns how the workers can be claimed; nil: they cannot.
func (k *Cached) Claim() *Claim { return k.claim }

// Claimed reports whether a client has claimed the workers, or may have (claim.Claimed).
func (k *Cached) Claimed() bool {
	return k.claim != nil && claim.Claimed(k.claim.File, k.claim.Line, k.claim.Sequence)
}

// ClaimedCached returns the names of the session's cached leases whose workers the client may have claimed. Taken leases are not among them.
func (c *Control) ClaimedCached() (names []uint64) {
	s := &c.cache
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.all {
		if k.owner == c && (k.own != nil || k.Claimed()) { // the state of an own claim is not known here
			names = append(names, k.name)
		}
	}
	return names
}

// Lasts reports whether a lease that claims the workers lasts as long as this one is to last. A claim gets the duration of the released lease.
func (p *Pending) Lasts(k *Cached) bool { return p.spec.Duration == k.last.asked }

// Describe returns the hash of the library, the names of its functions, and the workers.
func (k *Cached) Describe() (library [sha256.Size]byte, functions []string, workers []Worker) {
	return k.last.sha, k.last.Functions, k.last.present()
}

// Like plans a lease with the terms of a released lease of this session, whose workers are claimed.
func (c *Control) Like(k *Cached) *Pending {
	p := k.last.by
	again := &Pending{c: c, spec: p.spec, lib: p.lib, sha: p.sha, name: p.name, current: -1}
	again.spec.At = ""
	return again
}

// Claimed returns the lease that a client has got by claiming the workers of k. The caller has taken k (TakeCached, TakeHanded). id and until come
// from the client. If the client has claimed the workers itself on verbs, the lease's id is that of the executor instead.
func (p *Pending) Claimed(k *Cached, id uint64, until time.Time) *Held {
	if k.own != nil {
		id = k.own.LeaseID
	}
	was := k.last
	h := &Held{Candidate: k.cand, ID: id, Workers: was.present(), Wanted: was.Wanted, Functions: was.Functions, Duration: was.Duration, asked: was.asked, c: p.c, by: p, cl: k.cl,
		renew: p.spec.Renew, key: k.key, library: p.name, home: was.home, sha: was.sha, end: until, unanswered: make(chan Unanswered, reportsMax)}
	p.granted = true
	p.c.note(k.cand.Provider)
	return h
}
