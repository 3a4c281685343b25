package etcd

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/accounting"
)

// ErrLost means that another process is the leader, or may be.
var ErrLost = errors.New("this resource manager is not the leader any more")

// Leader is the leadership of this process. It is the accounting.Replica of its ledger.
type Leader struct {
	cluster  *Cluster
	lease    clientv3.LeaseID
	id       string // of the ledger
	key      string // of this candidate
	revision int64  // at which key was created
	end      context.CancelFunc
	running  sync.WaitGroup // of keep and measure

	confirmed atomic.Pointer[time.Time] // when the latest request by which etcd confirmed the leadership was sent
	renewed   atomic.Pointer[time.Time] // when the latest request by which etcd renewed the lease was sent
	once      sync.Once
	lost      chan struct{}
	why       error // of lost, set before it is closed

	// Of the goroutine that writes.
	seq     int64     // revision of the record seq after the last write of this process
	pending []pending // writes with an unknown outcome
}

type pending struct {
	id      []byte
	changes []accounting.Change
}

// mostChanges is the largest number of changes of one write: etcd allows 128 operations by default, and each write has one of its own.
const mostChanges = 120

// loadPage is how many records are read at a time.
const loadPage = 2000

// Lost is closed when this process has lost the leadership.
func (l *Leader) Lost() <-chan struct{} { return l.lost }

// Why returns why the leadership was lost, after Lost was closed.
func (l *Leader) Why() error { return l.why }

func (l *Leader) lose(why error) {
	l.once.Do(func() {
		l.why = why
		close(l.lost)
	})
}

// Abandon gives up the leadership because the ledger cannot be used any more.
func (l *Leader) Abandon(why error) {
	l.cluster.cfg.Log.Error("giving up the leadership: the next leader reads the ledger again", "error", why)
	l.lose(why)
}

// Confirmed returns an error if another process may be the leader, because within the last leaseSeconds etcd has not confirmed the leadership, or has not
// renewed the lease. Both are needed: the lease ends leaseSeconds after its latest renewal, even if etcd has confirmed the leadership since.
func (l *Leader) Confirmed() error {
	select {
	case <-l.lost:
		return ErrLost
	default:
	}
	if since := max(time.Since(*l.confirmed.Load()), time.Since(*l.renewed.Load())); since > leaseSeconds*time.Second {
		return fmt.Errorf("%w, or may not be: etcd has not confirmed it for %v", ErrLost, since.Round(100*time.Millisecond))
	}
	return nil
}

// begin changes the record seq, so that all writes of the earlier leader fail, including those under way.
func (l *Leader) begin(ctx context.Context) error {
	asked := time.Now()
	r, err := l.cluster.client.Txn(ctx).If(l.leads(), clientv3.Compare(clientv3.Value(l.cluster.idKey()), "=", l.id)).
		Then(clientv3.OpPut(l.cluster.key("seq"), string(newID()))).Commit()
	if err != nil {
		return err
	}
	if !r.Succeeded {
		return ErrLost
	}
	l.cluster.wrote()
	l.seq = r.Header.Revision
	l.confirmed.Store(&asked)
	return nil
}

func newID() []byte {
	id := make([]byte, 16)
	rand.Read(id)
	return id
}

// leads is the condition that this process is the leader.
func (l *Leader) leads() clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(l.key), "=", l.revision)
}

// stand makes this process a candidate, and waits until it is the leader. It asks instead of watching: a watch stays with one member of etcd,
// which may be silent or cut off.
func (l *Leader) stand(ctx context.Context) error {
	c := l.cluster
	if err := c.persist(ctx, func(ctx context.Context) error {
		_, err := c.client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(l.key), "=", 0)).
			Then(clientv3.OpPut(l.key, c.cfg.Name, clientv3.WithLease(l.lease))).Commit()
		return err
	}); err != nil {
		return err
	}
	for {
		var own, first []*mvccpb.KeyValue
		if err := c.persist(ctx, func(ctx context.Context) error {
			r, err := c.client.Txn(ctx).Then(clientv3.OpGet(l.key, clientv3.WithKeysOnly()), clientv3.OpGet(c.key(candidates), clientv3.WithFirstCreate()...)).Commit()
			if err == nil {
				own, first = r.Responses[0].GetResponseRange().GetKvs(), r.Responses[1].GetResponseRange().GetKvs()
			}
			return err
		}); err != nil {
			return err
		}
		c.note(nil)
		if len(own) == 0 || len(first) == 0 {
			return errors.New("etcd has not renewed the lease of this candidate")
		}
		if l.revision = own[0].CreateRevision; string(first[0].Key) == l.key {
			return nil
		}
		if !sleep(ctx) {
			return ctx.Err()
		}
	}
}

// keep asks whether this process is the leader until ctx ends or the leadership is lost. While etcd cannot be reached, it tries again: no other
// process can become the leader meanwhile, unless only this one is cut off, and then its writes are refused.
func (l *Leader) keep(ctx context.Context) {
	for {
		asked := time.Now()
		leads, err := l.check(ctx)
		if ctx.Err() != nil {
			return
		}
		l.cluster.note(err)
		if err == nil && !leads {
			l.lose(ErrLost)
			return
		}
		if err == nil {
			l.confirmed.Store(&asked)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(about(confirmEvery)):
		}
	}
}

// check asks etcd whether this process is the leader. Without an operation that reads, a member of etcd would answer without asking the others.
func (l *Leader) check(ctx context.Context) (bool, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	r, err := l.cluster.client.Txn(ctx).If(l.leads()).Then(clientv3.OpGet(l.key, clientv3.WithKeysOnly())).Else(clientv3.OpGet(l.key, clientv3.WithKeysOnly())).Commit()
	if err != nil {
		return false, err
	}
	return r.Succeeded, nil
}

// Resign gives up the leadership, so that a standby need not wait for the end of the lease. No write may be under way.
func (l *Leader) Resign() {
	l.lose(ErrLost)
	l.end()
	l.running.Wait()
	ctx, cancel := bounded(context.Background())
	defer cancel()
	_, _ = l.cluster.client.Revoke(ctx, l.lease) // else it ends by itself
}

// Load calls add with every record of the ledger.
func (l *Leader) Load(ctx context.Context, add func(accounting.Change) error) error {
	return l.cluster.read(ctx, l.seq, add)
}

// read calls add with every record of the ledger as of a revision of etcd; 0: now.
func (c *Cluster) read(ctx context.Context, revision int64, add func(accounting.Change) error) error {
	prefix := c.key("ledger/")
	from, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
	for {
		var r *clientv3.GetResponse
		var err error
		for range loadTries { // one may meet a member that is silent
			bound, cancel := context.WithTimeout(ctx, loadBound)
			r, err = c.client.Get(bound, from, clientv3.WithRange(end), clientv3.WithLimit(loadPage), clientv3.WithRev(revision))
			cancel()
			if err == nil || errors.Is(err, rpctypes.ErrCompacted) || !sleep(ctx) {
				break
			}
		}
		if err != nil {
			return fmt.Errorf("etcd: read the ledger: %w", err)
		}
		if revision == 0 {
			revision = r.Header.Revision
		}
		for _, kv := range r.Kvs {
			bucket, key, ok := strings.Cut(string(kv.Key[len(prefix):]), "/")
			if !ok {
				return fmt.Errorf("etcd: %q is not a record of the ledger", kv.Key)
			}
			if err := add(accounting.Change{Bucket: bucket, Key: key, Value: kv.Value}); err != nil {
				return err
			}
			from = string(kv.Key) + "\x00"
		}
		if !r.More {
			return nil
		}
	}
}

// Most is the largest number of changes of one Commit.
func (*Leader) Most() int { return mostChanges }

// note records the result of a call, unless it was cut short by its caller.
func (l *Leader) note(ctx context.Context, err error) {
	if err == nil || ctx.Err() == nil {
		l.cluster.note(err)
	}
}

// Commit writes changes. After an error they are not written, or it is unknown whether they are.
func (l *Leader) Commit(ctx context.Context, changes []accounting.Change) error {
	id, seq := newID(), l.cluster.key("seq")
	ops := []clientv3.Op{clientv3.OpPut(seq, string(id))}
	for _, c := range changes {
		key := l.cluster.recordKey(c)
		if c.Value == nil {
			ops = append(ops, clientv3.OpDelete(key))
		} else {
			ops = append(ops, clientv3.OpPut(key, string(c.Value)))
		}
	}
	bound, cancel := bounded(ctx)
	defer cancel()
	r, err := l.cluster.client.Txn(bound).If(l.leads(), clientv3.Compare(clientv3.ModRevision(seq), "=", l.seq)).Then(ops...).
		Else(clientv3.OpGet(l.key)).Commit()
	l.note(ctx, err)
	if err != nil {
		if !refused(err) {
			l.pending = append(l.pending, pending{id, changes})
		}
		if errors.Is(err, rpctypes.ErrNoSpace) {
			err = ErrFull
		}
		return fmt.Errorf("etcd: %w", err)
	}
	if r.Succeeded {
		l.cluster.wrote()
		l.seq, l.pending = r.Header.Revision, nil
		return nil
	}
	if kvs := r.Responses[0].GetResponseRange().GetKvs(); len(kvs) != 1 || kvs[0].CreateRevision != l.revision || len(l.pending) == 0 {
		l.lose(ErrLost)
		return ErrLost
	}
	return errors.New("etcd: an earlier write has only now succeeded")
}

// refused reports whether etcd has refused a write, for example because its disk is full.
func refused(err error) bool {
	var e rpctypes.EtcdError
	return errors.As(err, &e) && slices.Contains([]codes.Code{codes.ResourceExhausted, codes.InvalidArgument, codes.PermissionDenied, codes.FailedPrecondition}, e.Code())
}

// Settle returns the changes of a failed Commit that etcd has.
func (l *Leader) Settle(ctx context.Context) ([]accounting.Change, error) {
	select {
	case <-l.lost:
		return nil, ErrLost
	default:
	}
	if len(l.pending) == 0 {
		return nil, nil
	}
	bound, cancel := bounded(ctx)
	defer cancel()
	r, err := l.cluster.client.Get(bound, l.cluster.key("seq"))
	l.note(ctx, err)
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	if len(r.Kvs) == 1 && r.Kvs[0].ModRevision == l.seq {
		return nil, nil // none of them was stored so far; one may still be
	}
	for _, p := range l.pending {
		if len(r.Kvs) == 1 && bytes.Equal(r.Kvs[0].Value, p.id) {
			l.seq, l.pending = r.Kvs[0].ModRevision, nil
			return p.changes, nil
		}
	}
	l.lose(ErrLost)
	return nil, ErrLost
}
