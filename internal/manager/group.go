package manager

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/etcd"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/observe"
)

// group describes the resource managers that share a ledger in etcd. One of them, the leader, serves.
type group struct {
	*etcd.Cluster
	leader *etcd.Leader // nil: this process is a standby
}

// errStandby is why a standby is not ready.
var errStandby = errors.New("standby: another resource manager serves")

// join prepares the connection to etcd.
func join(s *config.Manager, log *slog.Logger) (*group, error) {
	cfg := etcd.Config{Endpoints: s.EtcdList(), Prefix: s.EtcdPrefix, Log: log}
	if s.EtcdCA != "" {
		b, err := os.ReadFile(s.EtcdCA)
		if err != nil {
			return nil, fmt.Errorf("etcd-ca: %w", err)
		}
		cfg.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
		if cfg.TLS.RootCAs, err = identity.Pool(b); err != nil {
			return nil, fmt.Errorf("etcd-ca: %s: %w", s.EtcdCA, err)
		}
	}
	if s.EtcdCert != "" {
		pair, err := tls.LoadX509KeyPair(s.EtcdCert, s.EtcdKey)
		if err != nil {
			return nil, fmt.Errorf("etcd-cert: %w", err)
		}
		cfg.TLS.Certificates = []tls.Certificate{pair}
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	cfg.Name = fmt.Sprintf("%s on %s, process %d", s.Listen, host, os.Getpid())
	c, err := etcd.Open(cfg)
	if err != nil {
		return nil, err
	}
	return &group{Cluster: c}, nil
}

// standBy waits until this process is the leader. Meanwhile only its HTTP port answers, without data of tenants. It returns nil when
// ctx ends.
func (g *group) standBy(ctx context.Context, s *config.Manager, log *slog.Logger) (*etcd.Leader, error) {
	web, err := observe.Open(s.HTTPListen, nil, log)
	if err != nil {
		return nil, err
	}
	defer closeHTTP(web)
	g.show(web, false)
	observe.ShowBuild(web.Metrics, s.Version)
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
func (g *group) show(web *observe.Server, leads bool) {
	web.Check("etcd", g.Trouble)
	value := func(name, help string, f func() bool) {
		web.Metrics.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			if f() {
				return 1
			}
			return 0
		}))
	}
	value("rfaas_manager_leader", "1: this resource manager serves; 0: it is a standby.", func() bool { return leads })
	value("rfaas_manager_etcd_ok", "1: etcd has answered the last request; 0: it has not.", func() bool { return g.Trouble() == nil })
}
