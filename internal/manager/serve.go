package manager

import (
	"context"
	"log/slog"
	"sync"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/issuer"
	"github.com/rfaas-go/rfaas/internal/observe"
	"github.com/rfaas-go/rfaas/internal/systemd"
)

// Serve runs a resource manager until ctx ends. It then returns nil. With etcd, it waits as a standby until it is the leader,
// and returns an error when it has lost the leadership.
func Serve(ctx context.Context, s config.Manager, log *slog.Logger) error {
	renewals := issuer.NewRenewals(s.IdentityDir, nil, nil, log)
	renewing, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { renewals.Run(renewing) }) // also of a standby
	defer wg.Wait()
	defer cancel()
	if s.EtcdEndpoints == "" {
		return serve(ctx, s, log, renewals, nil)
	}
	if err := rehearse(&s); err != nil {
		return err
	}
	group, err := join(ctx, &s, log)
	if err != nil {
		return err
	}
	defer group.Close()
	if group.leader, err = group.standBy(ctx, &s, renewals, log); group.leader == nil {
		return err
	}
	defer group.leader.Resign() // after the last write
	return serve(ctx, s, log, renewals, group)
}

// daemon is a resource manager with its ports. After open, it answers only at the HTTP port.
type daemon struct {
	port *control.Port
	*Manager
	web *observe.Server
}

// open opens everything that the settings name. edit changes the configuration of the Manager.
func open(s *config.Manager, log *slog.Logger, edit func(*Config)) (_ *daemon, err error) {
	d := &daemon{}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	if d.port, err = control.OpenPort(control.PortConfig{Listen: s.Listen, AllowPlaintext: s.AllowPlaintext,
		SecretFile: s.SecretFile, IdentityDir: s.IdentityDir, AuditFile: s.AuditFile, AddressFile: s.AddressFile, Daemon: "resource-manager", Log: log,
		Bounds: s.Bounds()}); err != nil {
		return nil, err
	}
	cfg := Config{Heartbeat: s.Heartbeat, Slots: s.Executors, Providers: s.ProviderList(), Asked: s.ProviderList() != nil,
		StateDir: s.StateDir, Gate: d.port.Gate, Tariff: s.Prices(), Limits: s.TenantLimits(), Keep: s.LedgerKeep, Log: log, Audit: d.port.Gate.Audit(),
		Quota:    NodeQuota{Executors: s.NodeExecutors, Memory: uint64(s.NodeMemory)},
		Attempts: s.AttachAttempts, Attached: s.TenantAttached, DataListen: s.DataListen, DataAdvertise: s.DataAdvertise,
		Verbs: dataplane.Options{Device: s.VerbsDevice, Port: s.VerbsPort, GIDIndex: s.VerbsGIDIndex}}
	cfg.Encrypt, _ = dataplane.Encryption(s.DataEncryption, s.AllowPlaintext)
	if cfg.Providers == nil {
		cfg.Providers = []string{dataplane.SHM, dataplane.Verbs}
	}
	edit(&cfg)
	m, err := New(cfg)
	if err != nil {
		return nil, err
	}
	d.Manager, m.gate, m.node = m, d.port.Gate, d.port.Node
	m.AddTo(d.port.Server)
	certificate, err := pageCertificate(s, d.port.Node, log)
	if err != nil {
		return nil, err
	}
	d.web, err = m.openHTTP(s.HTTPListen, s.HTTPTokenFile, certificate, s.HTTPCert != "")
	return d, err
}

// close closes everything that is open: the HTTP port, then the control port after its running calls, and then the manager.
func (d *daemon) close() {
	if d.web != nil {
		closeHTTP(d.web)
	}
	if d.port != nil {
		ctx, cancel := context.WithTimeout(context.Background(), control.CloseTimeout)
		defer cancel()
		d.port.Close(ctx)
	}
	if d.Manager != nil {
		d.Manager.Close()
	}
}

// serve runs a resource manager that has no group, or is its leader.
func serve(ctx context.Context, s config.Manager, log *slog.Logger, renewals *issuer.Renewals, group *group) (err error) {
	var lost <-chan struct{} // nil: the leadership cannot be lost
	m, err := open(&s, log, func(cfg *Config) {
		if group != nil {
			cfg.Replica, lost, cfg.Confirmed = group.leader, group.leader.Lost(), group.leader.Confirmed
			cfg.Load = func(add func(accounting.Change) error) error { return group.leader.Load(ctx, add) }
		}
	})
	if err != nil {
		return err
	}
	defer m.close()
	port, web := m.port, m.web
	observe.CountRefusals(web.Metrics, port.Gate)
	observe.WatchIdentity(web, port.Node)
	observe.CountRenewals(web.Metrics, renewals.Counts)
	observe.ShowBuild(web.Metrics, s.Version)
	if group != nil {
		group.show(web)
	}
	if err := port.Serve(); err != nil {
		return err
	}
	web.SetReady(nil)
	log.Info("ready", "address", port.Address, "memory", m.memory.providers())
	if m.memory.tcp != nil {
		log.Info("accepting data connections", "address", m.memory.tcp.data.Address)
	}
	tellSystemd(log, "READY=1")
	if text := m.accounts.state(); text != "" {
		log.Warn(text)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done, followed := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		m.Run(ctx)
	}()
	go func() {
		defer close(followed)
		issuer.Follow(ctx, s.IdentityDir, port.Node, log)
	}()
	select {
	case <-ctx.Done():
	case <-lost:
		err = group.leader.Why()
	case err = <-port.Failed():
	case err = <-web.Failed():
	}
	tellSystemd(log, "STOPPING=1")
	cancel()
	<-done
	<-followed
	return err
}

// tellSystemd notifies systemd. A failure is only logged.
func tellSystemd(log *slog.Logger, state string) {
	if err := systemd.Notify(state); err != nil {
		log.Warn("cannot notify systemd", "state", state, "error", err)
	}
}
