package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
)

const (
	// leaseSeconds is how long a leader stays the leader when etcd does not hear from it. etcd's default settings allow no shorter time.
	leaseSeconds = 2
	// callBound bounds one call of etcd.
	callBound = time.Second
	// pause is the time from one attempt to reach etcd to the next one.
	pause = 100 * time.Millisecond
)

// Config says where etcd is.
type Config struct {
	Endpoints []string
	Prefix    string      // of all keys
	TLS       *tls.Config // nil: plain text
	Name      string      // of this process, for people
	Log       *slog.Logger
}

// Cluster is a connection to etcd.
type Cluster struct {
	cfg    Config
	client *clientv3.Client

	mu      sync.Mutex
	trouble error // of the last call; nil: etcd has answered
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

// Trouble returns why etcd did not answer the last call; nil: it has answered.
func (c *Cluster) Trouble() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.trouble
}

// note records the result of a call, and logs when it differs from the last one.
func (c *Cluster) note(err error) {
	if errors.Is(err, context.Canceled) {
		return // this process ends
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch had := c.trouble; {
	case err != nil && had == nil:
		c.cfg.Log.Error("etcd does not answer; trying again", "endpoints", c.cfg.Endpoints, "error", err)
	case err == nil && had != nil:
		c.cfg.Log.Info("etcd answers again")
	}
	c.trouble = err
}

func (c *Cluster) key(name string) string { return c.cfg.Prefix + name }

// bounded returns a context for one call.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, callBound)
}

// sleep waits for a pause. It returns false if ctx has ended.
func sleep(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(pause):
		return true
	}
}

// Lead waits until this process is the leader. It returns an error only if ctx ends.
func (c *Cluster) Lead(ctx context.Context) (*Leader, error) {
	won := make(chan *Leader)
	go func() { // does not end at once with ctx: without etcd, a candidate cannot withdraw before Close
		for ctx.Err() == nil {
			l, err := c.campaign(ctx)
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
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// campaign waits for the leadership while etcd can be reached.
func (c *Cluster) campaign(ctx context.Context) (_ *Leader, err error) {
	bound, cancel := bounded(ctx)
	granted, err := c.client.Grant(bound, leaseSeconds)
	cancel()
	c.note(err)
	if err != nil {
		return nil, err
	}
	life, end := context.WithCancel(context.Background()) // of the leadership
	session, err := concurrency.NewSession(c.client, concurrency.WithLease(granted.ID), concurrency.WithContext(life))
	if err != nil {
		end()
		return nil, err
	}
	defer func() {
		if err != nil {
			end()
			bound, cancel := bounded(context.WithoutCancel(ctx))
			defer cancel()
			_, _ = c.client.Revoke(bound, granted.ID) // else it ends by itself
		}
	}()
	waiting, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		select {
		case <-session.Done():
			err := errors.New("etcd has not renewed the lease of this candidate")
			c.note(err)
			stop(err)
		case <-waiting.Done():
		}
	}()
	election := concurrency.NewElection(session, c.key("leader"))
	if err := election.Campaign(waiting, c.cfg.Name); err != nil {
		return nil, cmpCause(waiting, err)
	}
	l := &Leader{cluster: c, lease: granted.ID, key: election.Key(), revision: election.Rev(), end: end, lost: make(chan struct{}), kept: make(chan struct{})}
	if err := l.begin(waiting); err != nil {
		return nil, cmpCause(waiting, err)
	}
	go l.keep(life, session)
	return l, nil
}

// cmpCause returns why a context was cancelled, else err.
func cmpCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}
