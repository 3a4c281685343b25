package accounting

import (
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

// Replica stores the changes of a ledger outside this process, so that another process can take over the ledger. Its methods are called
// by one goroutine at a time.
type Replica interface {
	// Most is the largest number of changes of one Commit.
	Most() int
	// Commit stores all changes or none. No two of them change the same record. After an error it is unknown whether they are stored,
	// or will be soon. Settle finds out.
	Commit([]Change) error
	// Settle returns the changes of a failed Commit that were stored nevertheless, or nothing if none were. The ledger calls
	// it before each transaction.
	Settle() ([]Change, error)
}

// loadStep is how many records OpenReplicatedLedger adds in one transaction.
const loadStep = 10_000

// OpenReplicatedLedger makes a ledger in memory. load adds the records of the replica to it. Later transactions return success
// only after the replica has stored their changes.
func OpenReplicatedLedger(r Replica, load func(add func(Change) error) error) (*Ledger, error) {
	l, err := OpenTemporaryLedger()
	if err != nil {
		return nil, err
	}
	var some []Change
	versioned := false
	flush := func() error {
		err := l.apply(some)
		some = some[:0]
		return err
	}
	err = load(func(c Change) error {
		versioned = versioned || c.Bucket == string(bucketMeta) && c.Key == string(keyVersion)
		if some = append(some, c); len(some) < loadStep {
			return nil
		}
		return flush()
	})
	if err == nil {
		err = flush()
	}
	if err == nil {
		err = l.view(func(tx *bbolt.Tx) error {
			if old, err := oldVersion(tx); err != nil || old {
				return errors.Join(err, fmt.Errorf("%w: version 1 was never replicated", ErrLedger))
			}
			return nil
		})
	}
	if err == nil && !versioned { // a new one
		err = r.Commit([]Change{{string(bucketMeta), string(keyVersion), ledgerVersion}})
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("replicated ledger: %w", err)
	}
	l.replica = r
	return l, nil
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

// update runs a transaction. With a replica, the replica has the changes before the transaction ends.
func (l *Ledger) update(f func(*writing) error) error {
	l.updating.Lock()
	defer l.updating.Unlock()
	if l.replica != nil {
		settled, err := l.replica.Settle()
		if err == nil {
			err = l.apply(settled)
		}
		if err != nil {
			return err
		}
	}
	return sound(func() error {
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
			return l.replica.Commit(changes)
		})
	})
}

// most returns how many records one transaction may change, if each of its steps changes n; limit if there is no replica.
func (l *Ledger) most(n, limit int) int {
	if l.replica == nil {
		return limit
	}
	return max(1, min(limit, l.replica.Most()/n))
}
