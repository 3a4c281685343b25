package manager

import (
	"context"
	"log/slog"
	"sync"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/etcd"
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
	group, err := join(&s, log)
	if err != nil {
		return err
	}
	defer group.Close()
	if group.leader, err = group.standBy(ctx, &s, log); group.leader == nil {
		return err
	}
	defer group.leader.Resign() // after the last write
	return serve(ctx, s, log, renewals, group)
}

// serve runs a resource manager that has no group, or is its leader.
func serve(ctx context.Context, s config.Manager, log *slog.Logger, renewals *issuer.Renewals, group *group) (err error) {
	port, err := control.OpenPort(control.PortConfig{Listen: s.Listen, AllowPlaintext: s.AllowPlaintext,
		SecretFile: s.SecretFile, IdentityDir: s.IdentityDir, AuditFile: s.AuditFile, AddressFile: s.AddressFile, Daemon: "resource-manager", Log: log,
		Bounds: s.Bounds()})
	if err != nil {
		return err
	}
	cfg := Config{Heartbeat: s.Heartbeat, Slots: s.Executors, Providers: s.ProviderList(), Asked: s.ProviderList() != nil,
		StateDir: s.StateDir, Gate: port.Gate, Tariff: s.Prices(), Limits: s.TenantLimits(), Keep: s.LedgerKeep, Log: log, Audit: port.Gate.Audit(),
		Quota:    NodeQuota{Executors: s.NodeExecutors, Memory: uint64(s.NodeMemory)},
		Attempts: s.AttachAttempts, Attached: s.TenantAttached, DataListen: s.DataListen, DataAdvertise: s.DataAdvertise,
		Verbs: dataplane.Options{Device: s.VerbsDevice, Port: s.VerbsPort, GIDIndex: s.VerbsGIDIndex}}
	cfg.Encrypt, _ = dataplane.Encryption(s.DataEncryption, s.AllowPlaintext)
	if cfg.Providers == nil {
		cfg.Providers = []string{dataplane.SHM, dataplane.Verbs}
	}
	var lost <-chan struct{} // nil: the leadership cannot be lost
	if group != nil {
		cfg.Replica, lost = group.leader, group.leader.Lost()
		cfg.Load = func(add func(accounting.Change) error) error { return group.leader.Load(ctx, add) }
	}
	closePort := func() {
		ctx, cancel := context.WithTimeout(context.Background(), control.CloseTimeout)
		defer cancel()
		port.Close(ctx)
	}
	m, err := New(cfg)
	if err != nil {
		closePort()
		return err
	}
	m.gate, m.node = port.Gate, port.Node
	m.AddTo(port.Server)
	defer m.Close() // after the port, when no call is running
	defer closePort()
	if err := port.Serve(); err != nil {
		return err
	}
	certificate, err := pageCertificate(&s, port.Node, log)
	if err != nil {
		return err
	}
	web, err := m.openHTTP(s.HTTPListen, s.HTTPTokenFile, certificate, s.HTTPCert != "")
	if err != nil {
		return err
	}
	defer closeHTTP(web) // before the manager
	observe.CountRefusals(web.Metrics, port.Gate)
	observe.WatchIdentity(web, port.Node)
	observe.CountRenewals(web.Metrics, renewals.Counts)
	observe.ShowBuild(web.Metrics, s.Version)
	if group != nil {
		group.show(web, true)
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
		err = etcd.ErrLost
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
