package manager

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/etcd"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/issuer"
	"github.com/rfaas-go/rfaas/internal/observe"
)

// group describes the resource managers that share a ledger in etcd. One of them, the leader, serves.
type group struct {
	*etcd.Cluster
	leader *etcd.Leader // nil: this process is a standby
}

// errStandby is why a standby is not ready.
var errStandby = errors.New("standby: another resource manager serves")

// rehearse opens everything that a leader needs, with an empty ledger, and closes it again. So errors in a standby's settings show when it
// starts, not when it has to take over.
func rehearse(s *config.Manager) error {
	d, err := open(s, slog.New(slog.DiscardHandler), func(cfg *Config) {
		cfg.Replica = nowhere{}
		cfg.Load = func(add func(accounting.Change) error) error { return add(accounting.NewRecords()[0]) }
	})
	if err == nil {
		d.close()
	}
	return err
}

// nowhere is the replica of a rehearsal. It stores nothing.
type nowhere struct{}

func (nowhere) Most() int                                           { return 1 }
func (nowhere) Commit(context.Context, []accounting.Change) error   { return nil }
func (nowhere) Settle(context.Context) ([]accounting.Change, error) { return nil, nil }
func (nowhere) Abandon(error)                                       {}

// join prepares the connection to etcd, and checks the certificates.
func join(ctx context.Context, s *config.Manager, log *slog.Logger) (*group, error) {
	secure, err := etcd.TLS(s.EtcdCA, s.EtcdCert, s.EtcdKey)
	if err != nil {
		return nil, err
	}
	cfg := etcd.Config{Endpoints: s.EtcdList(), Prefix: s.EtcdPrefix, Log: log, TLS: secure, Known: func(id string) error { return knownLedger(s.StateDir, id) }}
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	cfg.Name = fmt.Sprintf("%s on %s, process %d", s.Listen, host, os.Getpid())
	c, err := etcd.Open(cfg)
	if err != nil {
		return nil, err
	}
	if err := c.Probe(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return &group{Cluster: c}, nil
}

// ledgerFile is the file in state-dir that has the id of the ledger in etcd.
const ledgerFile = "etcd-ledger"

// knownLedger stores the id of the ledger that etcd has. It returns an error if this resource manager has used another one before.
func knownLedger(dir, id string) error {
	if dir == "" {
		return nil
	}
	path := filepath.Join(dir, ledgerFile)
	switch b, err := os.ReadFile(path); {
	case errors.Is(err, fs.ErrNotExist) || err == nil && len(b) == 0: // empty: an earlier version met a full disk
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		return identity.WriteFile(path, []byte(id+"\n"), 0o600, false) // as a whole or not at all
	case err != nil:
		return err
	case strings.TrimSpace(string(b)) != id:
		return fmt.Errorf("its id is %s, but this resource manager has used %s: check etcd-endpoints and etcd-prefix. If the other ledger is the right one, remove %s",
			id, strings.TrimSpace(string(b)), path)
	}
	return nil
}

// standBy waits until this process is the leader. Meanwhile only its HTTP port answers, without data of tenants. It returns nil when
// ctx ends.
func (g *group) standBy(ctx context.Context, s *config.Manager, renewals *issuer.Renewals, log *slog.Logger) (*etcd.Leader, error) {
	web, err := observe.Open(s.HTTPListen, nil, log)
	if err != nil {
		return nil, err
	}
	defer closeHTTP(web)
	g.show(web)
	observe.ShowBuild(web.Metrics, s.Version)
	observe.CountRenewals(web.Metrics, renewals.Counts)
	if s.IdentityDir != "" {
		node, err := identity.OpenNode(s.IdentityDir, nil, log, time.Now())
		if err != nil {
			return nil, err
		}
		observe.WatchIdentity(web, node)
		watching, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		wg.Go(func() { node.WatchUntil(watching, time.Now) })
		wg.Go(func() { issuer.Follow(watching, s.IdentityDir, node, log) })
		defer wg.Wait()
		defer cancel()
	}
	web.SetReady(errStandby)
	web.Serve()
	log.Info("standing by until this resource manager is the leader", "etcd", s.EtcdList())
	tellSystemd(log, "READY=1\nSTATUS=standing by")
	leader, err := g.Lead(ctx)
	if ctx.Err() != nil {
		if leader != nil {
			leader.Resign()
		}
		return nil, nil
	}
	if err == nil {
		log.Info("this resource manager is the leader")
		tellSystemd(log, "STATUS=leader")
	}
	return leader, err
}

// show adds what concerns the group to a daemon's HTTP port.
func (g *group) show(web *observe.Server) {
	web.Check("etcd", g.Trouble)
	value := func(name, help string, f func() bool) {
		web.Metrics.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			if f() {
				return 1
			}
			return 0
		}))
	}
	value("rfaas_manager_leader", "1: this resource manager serves; 0: it is a standby, or etcd has not confirmed its leadership lately.",
		func() bool { return g.leader != nil && g.leader.Confirmed() == nil })
	value("rfaas_manager_etcd_ok", "1: etcd has answered the last request, and accepts writes; 0: it has not, or refuses them.", func() bool { return g.Trouble() == nil })
	value("rfaas_manager_etcd_full", "1: etcd refuses writes because its space quota is used up; 0: it does not.", g.Full)
	web.Metrics.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "rfaas_manager_etcd_bytes",
		Help: "Size of etcd's database, to compare with its quota, as the leader last measured it; 0: not known."}, func() float64 { return float64(g.Bytes()) }))
}
