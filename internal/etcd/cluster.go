package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/rfaas-go/rfaas/accounting"
)

const (
	// leaseSeconds is how long a leader stays the leader when etcd does not hear from it. etcd's default settings allow no shorter time.
	leaseSeconds = 2
	// callBound bounds one call of etcd.
	callBound = time.Second
	// loadBound bounds one attempt to read a page of records, and loadTries is the number of attempts.
	loadBound = 2 * time.Second
	loadTries = 6
	// adminBound bounds one call of a command.
	adminBound = 10 * time.Second
	// renewEvery is how often the lease is renewed. renewBound bounds an attempt, so that the lease lasts if three in a row meet a silent member.
	renewEvery = 200 * time.Millisecond
	renewBound = 300 * time.Millisecond
	// confirmEvery is how often the leader asks etcd whether it still is the leader.
	confirmEvery = 500 * time.Millisecond
	// sizeEvery is how often the leader asks etcd for the size of its database.
	sizeEvery = 10 * time.Second
	// pause is the time from one attempt to reach etcd to the next one.
	pause = 100 * time.Millisecond
	// expiryLook is how often etcd looks for expired leases. etcd has no setting for it.
	expiryLook = 500 * time.Millisecond
)

// TakeOver is the longest time from the death of a leader until a standby can become the leader: the lease expires, etcd notices that, and the standby
// asks etcd. It does not contain the time for which processes compute.
const TakeOver = leaseSeconds*time.Second + expiryLook + pause

// Config says where etcd is.
type Config struct {
	Endpoints []string
	Prefix    string      // of all keys
	TLS       *tls.Config // nil: plain text
	Name      string      // of this process, for people
	Log       *slog.Logger
	// Known is called with the id of the ledger before this process becomes a candidate. An error ends Lead. nil: every ledger is accepted.
	Known func(id string) error
}

var (
	// ErrNoLedger means that no ledger begins with the prefix.
	ErrNoLedger = errors.New("etcd has no ledger")
	// ErrOtherLedger means that Config.Known has refused the ledger.
	ErrOtherLedger = errors.New("etcd has another ledger")
	// ErrFull means that etcd refuses writes because its quota is used up.
	ErrFull = errors.New("the space quota of etcd is used up, so it refuses all writes: compact and defragment etcd, or raise its " +
		"quota-backend-bytes, then run \"etcdctl alarm disarm\"")
)

// Cluster is a connection to etcd.
type Cluster struct {
	cfg    Config
	client *clientv3.Client

	mu      sync.Mutex
	trouble error // of the last call; nil: etcd has answered
	full    bool  // etcd has refused the last write because of its quota
	bytes   int64 // size of etcd's database; 0: not known
}

// Open prepares the connection. It does not wait for etcd.
func Open(cfg Config) (*Cluster, error) {
	cfg.Prefix = strings.TrimSuffix(cfg.Prefix, "/") + "/"
	client, err := clientv3.New(clientv3.Config{Endpoints: cfg.Endpoints, TLS: cfg.TLS, Logger: zap.NewNop(), DialTimeout: callBound,
		DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 3 * time.Second})
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return &Cluster{cfg: cfg, client: client}, nil
}

// Close closes the connection.
func (c *Cluster) Close() { c.client.Close() }

// Trouble returns why etcd did not answer the last call, or why it refuses writes; nil: neither.
func (c *Cluster) Trouble() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.trouble == nil && c.full {
		return ErrFull
	}
	return c.trouble
}

// Full reports whether etcd has refused the last write because its quota is used up.
func (c *Cluster) Full() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.full
}

// Bytes returns the size of the database of a member of etcd; 0: not known.
func (c *Cluster) Bytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}

// note records the result of a call, and logs when it differs from the last one.
func (c *Cluster) note(err error) {
	if errors.Is(err, context.Canceled) {
		return // this process ends
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if errors.Is(err, rpctypes.ErrNoSpace) {
		if !c.full {
			c.cfg.Log.Error(ErrFull.Error(), "endpoints", c.cfg.Endpoints)
		}
		c.full, err = true, nil
	}
	switch had := c.trouble; {
	case err != nil && had == nil:
		c.cfg.Log.Error("etcd does not answer; trying again", "endpoints", c.cfg.Endpoints, "error", err)
	case err == nil && had != nil:
		c.cfg.Log.Info("etcd answers again")
	}
	c.trouble = err
}

// wrote records that a write has succeeded.
func (c *Cluster) wrote() {
	c.note(nil)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.full {
		c.cfg.Log.Info("etcd accepts writes again")
	}
	c.full = false
}

// measure asks the members for the size of their database every sizeEvery, until ctx ends.
func (c *Cluster) measure(ctx context.Context) {
	for {
		for _, endpoint := range c.cfg.Endpoints {
			bound, cancel := bounded(ctx)
			r, err := c.client.Status(bound, endpoint)
			cancel()
			if err == nil {
				c.mu.Lock()
				c.bytes = r.DbSize
				c.mu.Unlock()
				break
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(sizeEvery):
		}
	}
}

func (c *Cluster) key(name string) string { return c.cfg.Prefix + name }

// bounded returns a context for one call.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, callBound)
}

// candidates is the beginning of the candidates' keys.
const candidates = "leader/"

// sleep waits for a pause. It returns false if ctx has ended.
func sleep(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(about(pause)):
		return true
	}
}

// persist repeats a call that can be repeated until etcd has answered it.
func (c *Cluster) persist(ctx context.Context, call func(context.Context) error) error {
	for {
		bound, cancel := bounded(ctx)
		err := call(bound)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil || errors.Is(err, ErrLost) || errors.Is(err, rpctypes.ErrLeaseNotFound) || refused(err) {
			return err
		}
		c.note(err)
		if !sleep(ctx) {
			return ctx.Err()
		}
	}
}

// about returns a random time of that length on average. Calls take members of etcd in turn. With constant times, a loop may meet the same one each time.
func about(d time.Duration) time.Duration { return d/2 + rand.N(d) }

// Lead waits until this process is the leader. It returns an error if ctx ends, or if etcd has no ledger or another one.
func (c *Cluster) Lead(ctx context.Context) (*Leader, error) {
	won, refused := make(chan *Leader), make(chan error, 1)
	go func() { // does not end at once with ctx: without etcd, a candidate cannot withdraw before Close
		for ctx.Err() == nil {
			l, err := c.campaign(ctx)
			if errors.Is(err, ErrNoLedger) || errors.Is(err, ErrOtherLedger) {
				refused <- err
				return
			}
			c.note(err)
			if err != nil {
				sleep(ctx)
				continue
			}
			select {
			case won <- l:
			case <-ctx.Done():
				l.Resign()
			}
			return
		}
	}()
	select {
	case l := <-won:
		return l, nil
	case err := <-refused:
		return nil, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// idKey is the key of the ledger's id.
func (c *Cluster) idKey() string {
	return c.recordKey(accounting.Change{Bucket: accounting.IDBucket, Key: accounting.IDKey})
}

// recordKey is the key of a record of the ledger.
func (c *Cluster) recordKey(r accounting.Change) string {
	return c.key("ledger/" + r.Bucket + "/" + r.Key)
}

// prefix returns the prefix as messages show it.
func (c *Cluster) prefix() string { return strings.TrimSuffix(c.cfg.Prefix, "/") }

// identify returns the id of the ledger.
func (c *Cluster) identify(ctx context.Context) (string, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	r, err := c.client.Txn(ctx).Then(clientv3.OpGet(c.idKey()), clientv3.OpGet(c.key("exported"))).Commit()
	if err != nil {
		return "", err
	}
	if kvs := r.Responses[0].GetResponseRange().GetKvs(); len(kvs) > 0 {
		return string(kvs[0].Value), nil
	}
	why := "check etcd-endpoints and etcd-prefix. For a new ledger, run \"rfaas ledger etcd init\" once, or \"rfaas ledger etcd import\" for that of a state-dir"
	if kvs := r.Responses[1].GetResponseRange().GetKvs(); len(kvs) > 0 {
		why = "it was exported to " + string(kvs[0].Value)
	}
	return "", fmt.Errorf("%w at prefix %s: %s", ErrNoLedger, c.prefix(), why)
}

// campaign waits for the leadership while etcd can be reached.
func (c *Cluster) campaign(ctx context.Context) (_ *Leader, err error) {
	id, err := c.identify(ctx)
	if err != nil {
		return nil, err
	}
	if c.cfg.Known != nil {
		if err := c.cfg.Known(id); err != nil {
			return nil, fmt.Errorf("%w at prefix %s: %w", ErrOtherLedger, c.prefix(), err)
		}
	}
	var granted *clientv3.LeaseGrantResponse
	var asked time.Time
	if err := c.persist(ctx, func(ctx context.Context) (err error) {
		asked = time.Now()
		granted, err = c.client.Grant(ctx, leaseSeconds)
		return err
	}); err != nil {
		return nil, err
	}
	life, end := context.WithCancel(context.Background()) // of the lease
	defer func() {
		if err != nil {
			end()
			bound, cancel := bounded(context.WithoutCancel(ctx))
			defer cancel()
			_, _ = c.client.Revoke(bound, granted.ID) // else it ends by itself
		}
	}()
	l := &Leader{cluster: c, lease: granted.ID, id: id, key: fmt.Sprintf("%s%x", c.key(candidates), granted.ID), end: end, lost: make(chan struct{})}
	l.renewed.Store(&asked)
	go l.hold(life)
	if err := l.stand(ctx); err != nil {
		return nil, err
	}
	if err := c.persist(ctx, l.begin); err != nil {
		return nil, err
	}
	l.running.Go(func() { l.keep(life) })
	l.running.Go(func() { c.measure(life) })
	return l, nil
}

// hold renews the lease until ctx or the lease ends. Each renewal may go to another member of etcd. KeepAlive of etcd's client stays with one member until
// TCP gives up, which is long after the end of the lease.
func (l *Leader) hold(ctx context.Context) {
	for {
		asked := time.Now()
		err := l.cluster.renew(ctx, l.lease)
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return
		}
		if err == nil {
			l.renewed.Store(&asked)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(about(renewEvery)):
		}
	}
}

// renew renews a lease once.
func (c *Cluster) renew(ctx context.Context, lease clientv3.LeaseID) error {
	ctx, cancel := context.WithTimeout(ctx, renewBound)
	defer cancel()
	stream, err := etcdserverpb.NewLeaseClient(c.client.ActiveConnection()).LeaseKeepAlive(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(&etcdserverpb.LeaseKeepAliveRequest{ID: int64(lease)}); err != nil {
		return err
	}
	r, err := stream.Recv()
	if err == nil && r.TTL <= 0 {
		err = rpctypes.ErrLeaseNotFound
	}
	return err
}
