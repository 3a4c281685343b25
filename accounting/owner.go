package accounting

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/bbolt"
)

// ErrOwner means that an incarnation belongs to another owner.
var ErrOwner = errors.New("incarnation of another owner")

// Claim says that Owner charges under an incarnation. If Any is set, the claim is accepted even if the incarnation has
// another owner, and changes nothing then.
type Claim struct {
	Incarnation [16]byte
	Owner       string // at most maxOwner bytes
	Any         bool
}

const maxOwner = 512

// Claim assigns each unclaimed incarnation to its claim's owner. If the error is nil, the assignments are on disk. The
// slice has one error for each claim, in order: nil or ErrOwner.
func (l *Ledger) Claim(ctx context.Context, now time.Time, claims ...Claim) ([]error, error) {
	var refused []error
	for some := range slices.Chunk(claims, l.most(1, max(len(claims), 1))) {
		more, err := l.claimSome(ctx, now, some)
		if err != nil {
			return nil, err
		}
		refused = append(refused, more...)
	}
	return refused, nil
}

// claimSome is Claim in one transaction.
func (l *Ledger) claimSome(ctx context.Context, now time.Time, claims []Claim) ([]error, error) {
	refused := make([]error, len(claims))
	fresh := false
	judge := func(owners *bbolt.Bucket) {
		for i, c := range claims {
			switch v := owners.Get(c.Incarnation[:]); {
			case v == nil:
				fresh = true
			case !c.Any && ownerIn(v) != c.Owner:
				refused[i] = fmt.Errorf("%w: %x belongs to %q, not to %q", ErrOwner, c.Incarnation, ownerIn(v), c.Owner)
			}
		}
	}
	err := l.view(func(tx *bbolt.Tx) error {
		judge(tx.Bucket(bucketOwners))
		return nil
	})
	if err == nil && fresh { // most claims are repeated, and cost no write
		err = l.update(ctx, func(tx *writing) error {
			owners := tx.Bucket(bucketOwners)
			for _, c := range claims {
				if owners.Get(c.Incarnation[:]) != nil {
					continue
				}
				if len(c.Owner) > maxOwner {
					return fmt.Errorf("%w: the owner's name has %d bytes, want at most %d", ErrInvalid, len(c.Owner), maxOwner)
				}
				v := append(binary.BigEndian.AppendUint64(nil, uint64(now.Unix())), c.Owner...)
				if err := tx.put(bucketOwners, c.Incarnation[:], v); err != nil {
					return err
				}
			}
			judge(owners)
			return nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	return refused, nil
}

// ownerIn returns the owner in a record: the time of the claim, 8 bytes, then the owner.
func ownerIn(v []byte) string {
	if len(v) < 8 {
		return ""
	}
	return string(v[8:])
}

// Owner returns the owner of an incarnation. It returns false if no owner has claimed the incarnation.
func (l *Ledger) Owner(incarnation [16]byte) (owner string, known bool, err error) {
	err = l.view(func(tx *bbolt.Tx) error {
		v := tx.Bucket(bucketOwners).Get(incarnation[:])
		owner, known = ownerIn(v), v != nil
		return nil
	})
	if err != nil {
		return "", false, fmt.Errorf("ledger: %w", err)
	}
	return owner, known, nil
}

// disown removes the owners of incarnations that were claimed before the horizon and have no lease left, up to
// most of them.
func disown(tx *writing, horizon int64, most int) error {
	owners, leases := tx.Bucket(bucketOwners), tx.Bucket(bucketLeases).Cursor()
	var old [][]byte
	c := owners.Cursor()
	for k, v := c.First(); k != nil && len(old) < most; k, v = c.Next() {
		if len(v) >= 8 && int64(binary.BigEndian.Uint64(v)) >= horizon {
			continue
		}
		if lease, _ := leases.Seek(k); !bytes.HasPrefix(lease, k) {
			old = append(old, bytes.Clone(k))
		}
	}
	for _, k := range old {
		if err := tx.remove(bucketOwners, k); err != nil {
			return err
		}
	}
	return nil
}
