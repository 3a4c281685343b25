package accounting

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.etcd.io/bbolt"
)

// Change is a change of one record of a ledger.
type Change struct {
	Bucket, Key string
	Value       []byte // nil: the record is removed
}

// ErrBusy means that a change waits for another one, which has not ended in time or waits for a replica that does not answer.
var ErrBusy = errors.New("the ledger is busy")

// ErrDiverged means that the replica has changes that the ledger in memory lacks. The ledger then refuses everything. To continue, open
// it again.
var ErrDiverged = errors.New("the ledger in memory lacks changes that its replica has")

// Replica stores the changes of a ledger outside this process, so that another process can take over the ledger. Its methods are called
// by one goroutine at a time. Commit and Settle end soon after their context.
type Replica interface {
	// Most is the largest number of changes of one Commit.
	Most() int
	// Commit stores all changes or none. No two of them change the same record. After an error it is unknown whether they are stored,
	// or will be soon. Settle finds out.
	Commit(context.Context, []Change) error
	// Settle returns the changes of a failed Commit that were stored nevertheless, or nothing if none were. The ledger calls
	// it before each transaction.
	Settle(context.Context) ([]Change, error)
	// Abandon is called when the ledger cannot be used any more, with the reason. Another ledger must take over.
	Abandon(error)
}

// loadStep is how many records OpenReplicatedLedger adds in one transaction.
const loadStep = 10_000

// OpenReplicatedLedger makes a ledger in memory. load adds the records of the replica to it, those of NewRecords among them. Later
// transactions return success only after the replica has stored their changes.
func OpenReplicatedLedger(r Replica, load func(add func(Change) error) error) (*Ledger, error) {
	l, err := OpenTemporaryLedger()
	if err != nil {
		return nil, err
	}
	if err := l.fill(load); err != nil {
		l.Close()
		return nil, fmt.Errorf("replicated ledger: %w", err)
	}
	l.replica = r
	return l, nil
}

// fill adds records to an empty ledger.
func (l *Ledger) fill(load func(add func(Change) error) error) error {
	var some []Change
	versioned := false
	flush := func() error {
		err := l.apply(some)
		some = some[:0]
		return err
	}
	err := load(func(c Change) error {
		versioned = versioned || c.Bucket == string(bucketMeta) && c.Key == string(keyVersion)
		if some = append(some, c); len(some) < loadStep {
			return nil
		}
		return flush()
	})
	if err == nil {
		err = flush()
	}
	if err == nil && !versioned {
		err = fmt.Errorf("%w: the record of its version is missing: records were lost", ErrLedger)
	}
	if err != nil {
		return err
	}
	return l.view(func(tx *bbolt.Tx) error {
		old, err := oldVersion(tx)
		if err == nil && old {
			err = fmt.Errorf("%w: version 1 was never replicated", ErrLedger)
		}
		return err
	})
}

// apply makes changes that the replica has.
func (l *Ledger) apply(changes []Change) error {
	if len(changes) == 0 {
		return nil
	}
	return sound(func() error {
		return l.db.Update(func(tx *bbolt.Tx) error {
			for _, c := range changes {
				b := tx.Bucket([]byte(c.Bucket))
				if b == nil {
					return fmt.Errorf("%w: a record of the unknown bucket %q", ErrLedger, c.Bucket)
				}
				var err error
				if c.Value == nil {
					err = b.Delete([]byte(c.Key))
				} else {
					err = b.Put([]byte(c.Key), c.Value)
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// writing is a transaction that records its changes for the replica.
type writing struct {
	*bbolt.Tx
	record  bool
	changes map[record][]byte
}

type record struct{ bucket, key string }

func (w *writing) put(bucket, key, value []byte) error {
	w.note(bucket, key, value)
	return w.Bucket(bucket).Put(key, value)
}

func (w *writing) remove(bucket, key []byte) error {
	w.note(bucket, key, nil)
	return w.Bucket(bucket).Delete(key)
}

func (w *writing) note(bucket, key, value []byte) {
	if w.record {
		w.changes[record{string(bucket), string(key)}] = value
	}
}

// lock waits for other transactions until ctx ends. While the replica does not answer, it fails at once, so that callers do not queue up
// behind the one that tries.
func (l *Ledger) lock(ctx context.Context) error {
	select {
	case l.updating <- struct{}{}:
		return nil
	default:
	}
	if why := l.trouble.Load(); why != nil {
		return fmt.Errorf("%w: another change waits for the replica: %w", ErrBusy, *why)
	}
	select {
	case l.updating <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: another change has not ended in time: %w", ErrBusy, ctx.Err())
	}
}

// diverge ends the use of the ledger after the replica has stored a change that memory has not.
func (l *Ledger) diverge(why error) error {
	err := fmt.Errorf("%w: %w", ErrDiverged, why)
	l.diverged.Store(&err)
	l.replica.Abandon(err)
	return err
}

// failed records an error of the replica, unless the caller gave up early: then the replica may only be slow.
func (l *Ledger) failed(ctx context.Context, err error) {
	if !errors.Is(ctx.Err(), context.Canceled) {
		l.trouble.Store(&err)
	}
}

// settle makes the changes of an earlier transaction that the replica has stored although its Commit failed.
func (l *Ledger) settle(ctx context.Context) error {
	changes, err := l.replica.Settle(ctx)
	if err != nil {
		l.failed(ctx, err)
		return err
	}
	if err := l.apply(changes); err != nil {
		return l.diverge(err)
	}
	return nil
}

// update runs a transaction. With a replica, the replica has the changes before the transaction ends.
func (l *Ledger) update(ctx context.Context, f func(*writing) error) error {
	if err := l.lock(ctx); err != nil {
		return err
	}
	defer func() { <-l.updating }()
	if why := l.diverged.Load(); why != nil {
		return *why
	}
	if l.replica != nil {
		if err := l.settle(ctx); err != nil {
			return err
		}
	}
	stored := false
	err := sound(func() error {
		return l.db.Update(func(tx *bbolt.Tx) error {
			w := &writing{Tx: tx, record: l.replica != nil, changes: map[record][]byte{}}
			if err := f(w); err != nil || len(w.changes) == 0 {
				return err
			}
			changes := make([]Change, 0, len(w.changes))
			for r, value := range w.changes {
				changes = append(changes, Change{r.bucket, r.key, value})
			}
			slices.SortFunc(changes, func(a, b Change) int { return strings.Compare(a.Bucket+a.Key, b.Bucket+b.Key) })
			if err := l.replica.Commit(ctx, changes); err != nil {
				l.failed(ctx, err)
				return err
			}
			l.trouble.Store(nil)
			stored = true
			return nil
		})
	})
	if err != nil && stored {
		return l.diverge(err)
	}
	return err
}

// most returns how many records one transaction may change, if each of its steps changes n; limit if there is no replica.
func (l *Ledger) most(n, limit int) int {
	if l.replica == nil {
		return limit
	}
	return max(1, min(limit, l.replica.Most()/n))
}
