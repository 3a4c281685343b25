package lease

import (
	"fmt"
	"time"
)

// setEnd makes a lease last d from now on.
func (t *Table) setEnd(r *record, now time.Time, d time.Duration) {
	r.Expires = now.Add(d)
	r.ClientEnd = now.Add(t.ClientTime(d))
	r.notice = r.Expires.Add(-min(t.cfg.Notice, d/3))
}

// ClientTime returns how long the client may use a lease that lasts d.
func (t *Table) ClientTime(d time.Duration) time.Duration { return d - min(t.cfg.Margin, d/10) }

// Open notes that the client is here (its event stream is open) and returns the number of this presence for Away.
// A newer presence takes the place of an older one.
func (t *Table) Open(id ID) (presence uint64, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.find(id, Granted, Active, Expiring)
	if err != nil {
		return 0, err
	}
	if r.State == Granted {
		r.State = Active
		t.wake()
	}
	r.presence++
	r.present, r.comeBy = true, time.Time{}
	return r.presence, nil
}

// Away notes that a presence is over. The client has Config.Return to come back, or Config.Connected if workers are still
// connected to its process; the owner calls Disconnected when none is any more. Away does nothing and returns false if a newer
// presence has begun or the lease has ended.
func (t *Table) Away(id ID, presence uint64, connected bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	if r == nil || r.State.Ended() || !r.present || r.presence != presence {
		return false
	}
	r.present, r.left = false, t.cfg.Now()
	patience := t.cfg.Return
	if connected {
		patience = max(patience, t.cfg.Connected)
	}
	r.comeBy = r.left.Add(patience)
	t.wake()
	return true
}

// Disconnected notes that no worker of a lease is connected to its client's process any more. An absent client then has
// Config.Return from when it went away.
func (t *Table) Disconnected(id ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	if r == nil || r.State.Ended() || r.present || r.comeBy.IsZero() {
		return
	}
	now := t.cfg.Now()
	by := now.Add(t.cfg.Return)
	if !r.left.IsZero() {
		by = r.left.Add(t.cfg.Return)
	}
	if by.Before(now) {
		by = now
	}
	if by.Before(r.comeBy) {
		r.comeBy = by
		t.wake()
	}
}

// hurry gives an absent client at most Config.Return from now on. The caller holds mu.
func (t *Table) hurry(r *record) {
	if by := t.cfg.Now().Add(t.cfg.Return); by.Before(r.comeBy) {
		r.comeBy = by
		t.wake()
	}
}

// Gone notes that the connection on which a lease was granted has ended. A client that has not opened its event stream yet
// then has Config.Return to do so.
func (t *Table) Gone(id ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	if r == nil || r.State != Granted {
		return
	}
	t.hurry(r)
}

// Notice makes an active lease expiring, after Due has asked for it, and returns the lease. It fails if the lease has been
// renewed or has ended.
func (t *Table) Notice(id ID) (Lease, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.find(id, Active)
	if err != nil {
		return Lease{}, err
	}
	if t.cfg.Now().Before(r.notice) {
		return Lease{}, fmt.Errorf("lease %d has been renewed: %w", id, ErrState)
	}
	r.State = Expiring
	return r.copy(), nil
}

// Renew makes a lease last at least d from now on; it never makes it shorter. Errors: ErrInvalid (d), ErrDraining,
// ErrUnknown, ErrEnded, ErrState (not granted yet).
func (t *Table) Renew(id ID, d time.Duration) (Lease, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.find(id, Granted, Active, Expiring)
	if err != nil {
		return Lease{}, err
	}
	now := t.cfg.Now()
	switch {
	case d <= 0:
		return Lease{}, fmt.Errorf("renew lease %d for %v: want more than 0: %w", id, d, ErrInvalid)
	case t.draining:
		return Lease{}, fmt.Errorf("renew lease %d: %w", id, ErrDraining)
	case !now.Before(r.Expires): // over, although the table has not ended it yet
		return Lease{}, fmt.Errorf("renew lease %d: %w", id, &EndedError{ID: id, State: Expired, Reason: "its time is up"})
	}
	if r.Expires.Before(now.Add(d)) {
		t.setEnd(r, now, d)
	}
	if r.State == Expiring && now.Before(r.notice) {
		r.State = Active
	}
	t.wake() // not for an earlier deadline, but the next one may be the notice
	return r.copy(), nil
}

// End ends a granted, active or expiring lease as Released, Expired, Revoked or Drained. Exactly one call succeeds for a
// lease: its caller stops the workers and then calls Reaped, or Keep. Its resources stay taken until then.
func (t *Table) End(id ID, how State, reason string) (Lease, error) {
	if !how.Ended() {
		return Lease{}, fmt.Errorf("lease %d: end as %v: %w", id, how, ErrState)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	r, err := t.find(id, Granted, Active, Expiring)
	if err != nil {
		return Lease{}, err
	}
	r.State, r.Reason = how, reason
	r.present, r.comeBy = false, time.Time{}
	return r.copy(), nil
}

// Reaped gives back the resources of an ended lease whose last worker is gone. A second call is ErrState and
// changes nothing. So is a call for a cached lease: Drop it first.
func (t *Table) Reaped(id ID) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.leases[id]
	if r == nil {
		return unknown(id)
	}
	if !r.State.Ended() || r.reaped || !r.cached.IsZero() {
		return fmt.Errorf("lease %d is %v, resources returned: %t, cached: %t: %w", id, r.State, r.reaped, !r.cached.IsZero(), ErrState)
	}
	t.releaseResources(r)
	t.bury(r)
	return nil
}

// bury notes that a lease has no resources any more and forgets the oldest of those.
func (t *Table) bury(r *record) {
	r.reaped = true
	t.past = append(t.past, r.ID)
	if len(t.past) > t.cfg.Remember {
		old := t.leases[t.past[0]]
		delete(t.leases, old.ID)
		delete(t.requests, old.RequestID)
		t.past = t.past[1:]
	}
}

// Drain makes every new request and renewal fail with ErrDraining. Existing leases stay. So do cached ones, which the
// owner drops.
func (t *Table) Drain() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.draining = true
}

// Due asks the owner for a call: Notice if State is Expiring, Drop of a cached lease if it is Released, otherwise End with
// that state.
type Due struct {
	ID     ID
	State  State
	Reason string
}

// Due returns what is due and the next deadline after it (zero: none). It changes nothing. The owner acts on the result, and may find that
// another goroutine has already done so.
func (t *Table) Due() (due []Due, next time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.cfg.Now()
	for _, r := range t.leases {
		at, d := r.due(now)
		switch {
		case at.IsZero():
		case !at.After(now):
			due = append(due, d)
		case next.IsZero() || at.Before(next):
			next = at
		}
	}
	return due, next
}
