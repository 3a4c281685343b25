package executor

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/datalisten"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/handover"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/issuer"
	"github.com/rfaas-go/rfaas/internal/link"
	"github.com/rfaas-go/rfaas/internal/observe"
	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/topology"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// uidFile is the lock file that keeps the executors of a node from using the same user ids.
const uidFile = "/run/rfaas/uids"

// Serve runs an executor on this node until ctx ends or an operator requests a drain, then drains it. now aborts the
// drain. It returns nil after a regular end.
func Serve(ctx, now context.Context, s config.Executor, hand Handover, log *slog.Logger) error {
	if hand.State != nil {
		return takeOver(ctx, now, s, hand, log)
	}
	path, err := workerPath(&s)
	if err != nil {
		return err
	}
	s.Worker = path
	root := os.Geteuid() == 0
	own, err := rightsOf(&s)
	if err != nil {
		return err
	}
	unpacked, err := openBundles(s.BundleDir, own, log)
	if err != nil {
		return err
	}
	defer unpacked.close()
	files, appended := rootFiles(&s)
	renew := ""
	if own.user.UID != 0 && s.IdentityDir != "" {
		renew = handover.Program()
	}
	z, err := zygote.Start(ctx, zygote.Config{Path: path, Version: s.Version, Log: log, Files: files, Append: appended, UID: own.user.UID, GID: own.user.GID,
		Renew: renew, Identity: s.IdentityDir, Remove: socketFiles(&s), Runtimes: runtimesOf(&s), Sandbox: zygote.Sandbox{Mode: sandboxMode(&s, root, log), Paths: s.SandboxPathList(), Bundles: unpacked.path, Environment: s.SandboxEnvList(),
			UIDs: s.SandboxUIDs, UIDFile: uidFile, Processes: uint32(s.SandboxProcesses), Files: uint32(s.SandboxFiles), Idle: s.YieldAfter > 0}})
	if err != nil {
		return err
	}
	defer z.Close()
	err = serveWith(ctx, now, s, zygoteSpawner{z, unpacked}, hand, log)
	z.RemoveFiles() // files that this process created as root and can no longer remove
	return err
}

// runtimesOf returns the runtimes of the settings.
func runtimesOf(s *config.Executor) (list []zygote.Runtime) {
	for _, name := range s.Runtimes.Names() {
		r := s.Runtimes[name]
		list = append(list, zygote.Runtime{Name: name, Python: r.Python, Preload: r.Preload, Paths: r.Paths})
	}
	return list
}

// socketFiles returns the files that an executor removes when it ends.
func socketFiles(s *config.Executor) (list []string) {
	add := func(path string) {
		if abs, err := filepath.Abs(path); err == nil {
			list = append(list, abs)
		}
	}
	for _, address := range []string{s.Listen, s.HTTPListen} {
		if path, ok := strings.CutPrefix(address, "unix:"); ok {
			add(path)
		}
	}
	if s.AddressFile != "" {
		add(s.AddressFile)
	}
	return list
}

// sandboxMode resolves the setting on this node. A weaker setting than the default is logged, since an administrator
// must have chosen it.
func sandboxMode(s *config.Executor, root bool, log *slog.Logger) sandbox.Mode {
	mode, usual := s.Sandbox.Resolve(root, s.IdentityDir != ""), sandbox.Auto.Resolve(root, s.IdentityDir != "")
	switch {
	case mode == sandbox.Off:
		log.Warn("workers are not confined: functions can do whatever the executor's user can", "sandbox", mode, "default", usual)
	case mode < usual:
		log.Warn("workers may run in an incomplete sandbox", "sandbox", mode, "default", usual)
	}
	return mode
}

// serveWith is Serve with a given spawner.
func serveWith(ctx, now context.Context, s config.Executor, spawner Spawner, hand Handover, log *slog.Logger) error {
	cfg, err := nodeConfig(s, spawner, hand.State, log)
	if err != nil {
		return err
	}
	if z, ok := spawner.(zygoteSpawner); ok {
		cfg.Bundles = z.bundles
	}
	if slices.Contains(cfg.Providers, dataplane.TCP) {
		if cfg.Data, err = openData(&s, hand.State, log); err != nil {
			return err
		}
		defer cfg.Data.Close()
		if err = datalisten.CheckEncryption(encryption(&s), cfg.Data.Address, dataplane.LoadCrypto, log); err != nil {
			return err
		}
	}
	e, err := New(cfg)
	if err != nil {
		return err
	}
	own, err := rightsOf(&s)
	if err != nil {
		return err
	}
	if hand.State != nil {
		if err := e.restore(hand.State, spawner.(zygoteSpawner).Zygote); err != nil {
			return err
		}
		spawner.(zygoteSpawner).Resume()
		own.inherit(&s, hand.State)
	}
	defer own.close()
	if err := own.makeDirectories(&s); err != nil {
		return err
	}
	port, err := control.OpenPort(control.PortConfig{Listen: s.Listen, AllowPlaintext: s.AllowPlaintext,
		SecretFile: s.SecretFile, IdentityDir: s.IdentityDir, OpenIdentity: own.opener(spawner), AuditFile: s.AuditFile, OpenAudit: own.auditOpener(spawner),
		AddressFile: s.AddressFile, Daemon: "executor", Log: log, Inherited: inheritedPort(hand.State),
		Bounds: s.Bounds(len(cfg.Cores) * max(s.ShareCores, 1))})
	if err != nil {
		return err
	}
	e.gate = port.Gate
	advertised := config.AdvertisedAddress(s.Advertise, port.Address)
	if err := checkIdentity(&s, port.Node, advertised); err != nil {
		e.shutdown(port)
		return err
	}
	e.Register(port.Server)
	web, err := openWeb(&s, hand.State, log)
	if err != nil {
		e.shutdown(port)
		return err
	}
	defer closeWeb(web)
	e.show(web.Metrics)
	observe.WatchIdentity(web, port.Node)
	renewals := issuer.NewRenewals(s.IdentityDir, own.opener(spawner), renewal(s.IdentityDir, spawner), log)
	observe.CountRenewals(web.Metrics, renewals.Counts)
	observe.ShowBuild(web.Metrics, s.Version)

	background, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	defer e.shutdown(port)
	var reg *registrar
	var lists *revocations
	journal, err := own.openJournal(&s, cfg.Node, log)
	if err != nil {
		return err
	}
	if s.Manager != "" {
		e.cfg.Fabric = fabric(&s, cfg.Providers, log)
		e.accounts = newAccounts(cfg.Node, e.incarnation, e.now, journal, log)
		if err := e.restoreAccounts(hand.State); err != nil {
			return err
		}
		conn, err := control.Dial(s.Manager, control.DialConfig{SecretFile: s.SecretFile, ReadSecret: port.Secret, Node: port.Node,
			AllowPlaintext: s.AllowPlaintext, Connect: spawner.Connect})
		if err != nil {
			return err
		}
		defer conn.Close()
		reg = newRegistrar(conn, s.Manager, advertised, e.reported, log)
		reg.accounts, reg.nodeID = e.accounts, cfg.NodeID
		reg.devices = &link.Devices{Options: rdmaOptions(&s)}
		reg.devices.Options.Encrypt = encryption(&s)
		e.report = reg.report
		e.limits = newLimiter(reg.client, e.incarnation, s.LimitUnknown == "admit", log)
		e.limits.begins = func() { e.claims.revokeSoon(everyTenant) }
		reg.limits = e.limits
		e.lender.peers = peersOf(reg.client)
		lists = own.newRevocations(reg.client, port.Node, s.StateDir, log)
	}
	watchMemory, err := e.startMemory()
	if err != nil {
		return err
	}
	if s.Separate {
		if err := port.Announce(); err != nil {
			return err
		}
	}
	if hand.State != nil {
		err = own.stayDropped()
	} else {
		err = own.separate(&s, log)
	}
	if err != nil { // before the first byte from another party is read
		return err
	}
	if lists != nil {
		lists.restore()
		wg.Go(func() { lists.run(background) })
	}
	web.Require("workers", func() error {
		_, reason := spawner.CannotStart()
		return reason
	})
	web.Serve()
	if cfg.Data != nil {
		cfg.Data.Serve()
		log.Info("accepting data connections", "address", cfg.Data.Address)
	}
	if a, err := control.ParseAddress(s.Listen); err == nil && !a.Local() && slices.Equal(cfg.Providers, []string{dataplane.SHM}) {
		log.Warn("programs on other nodes cannot call functions here, because only shared memory is offered: add tcp to providers, and set data-listen")
	}
	e.begin()
	wg.Go(func() { e.Run(background) })
	wg.Go(func() { e.reportAbility(background) })
	wg.Go(func() { renewals.Run(background) })
	wg.Go(func() { watchMemory(background) })
	if s.YieldAfter > 0 {
		wg.Go(func() { e.yield(background, s.YieldAfter, readUse) })
		wg.Go(func() { e.watchNeighbour(background, referenceEvery, newReference) })
	}
	if err := port.Serve(); err != nil {
		return err
	}
	if err := spawner.KeepPool(s.Pool, e.pooledDevices()...); err != nil {
		return err
	}
	if web.Address != "" {
		log.Info("health and metrics", "address", web.Address)
	}
	e.ready(web)
	log.Info("ready", "address", port.Address, "cores", len(cfg.Cores), "cpus", config.Cores{List: cfg.cpus()}.String(),
		"memory", config.Bytes(cfg.Memory).String(), "providers", cfg.Providers)
	h := handing{Handover: &hand, e: e, port: port, web: web, own: &own, open: own.opener(spawner), ctx: ctx, stop: func() {}}
	if z, ok := spawner.(zygoteSpawner); ok {
		h.z = z.Zygote
	}
	if reg != nil {
		// Deregister before the port closes, so that no more clients come.
		regCtx, stop := context.WithCancel(background)
		var gone sync.WaitGroup
		gone.Go(func() { reg.run(regCtx) })
		gone.Go(func() { e.accounts.run(regCtx, s.ChargeInterval, reg.client) })
		defer gone.Wait()
		defer stop()
		h.stop = func() {
			reg.stay.Store(true)
			stop()
			gone.Wait()
		}
	}
	drain := drainRequest{s.Grace, drainReason}
	wanted := make(chan struct{})
	waitCtx, stopWait := context.WithCancel(background)
	var waits sync.WaitGroup
	waits.Go(func() { e.back.wait(waitCtx); close(wanted) })
	defer waits.Wait()
	defer stopWait()
	for serving := ctx.Err() == nil; serving; {
		serving = false
		select {
		case <-ctx.Done():
		case drain = <-e.DrainAsked():
		case <-wanted:
			drain.reason = "the node is wanted back at " + config.Instant(e.back.get()).String()
		case err = <-port.Failed():
			err = fmt.Errorf("control port: %w", err)
		case err = <-web.Failed():
			err = fmt.Errorf("http: %w", err)
		case err = <-spawner.Failed():
		case <-hand.Asked:
			log.Error("not handed over: this program continues", "error", h.run())
			serving = true
		}
	}
	began := time.Now()
	log.Info("draining", "grace", drain.grace, "reason", drain.reason)
	drainCtx, stop := context.WithTimeout(now, drain.grace)
	defer stop()
	e.unready(web, drain.reason)
	e.BeginDrain()
	if reg != nil {
		reg.report()
	}
	e.DrainUntil(drainCtx, drain.reason)
	if reg != nil {
		ctx, cancel := context.WithTimeout(context.Background(), control.CloseTimeout)
		defer cancel()
		e.accounts.finish(ctx, reg.client)
	}
	log.Info("drained", "after", time.Since(began).Round(time.Millisecond))
	return err
}

// reportAbility reports to the resource manager, until ctx ends, when it may have changed whether workers can be
// started.
func (e *Executor) reportAbility(ctx context.Context) {
	able := true
	for {
		changed, reason := e.cfg.Spawner.CannotStart()
		if reason != nil && able {
			e.log.Error("cannot start workers: the executor is not ready and shows no free cores", "reason", reason)
		} else if reason == nil && !able {
			e.log.Info("workers can be started again")
		}
		able = reason == nil
		e.changed()
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// checkIdentity returns an error if the identity belongs to another node: clients that dial the advertised address, and
// the resource manager, would refuse its certificate. On loopback the certificate is not checked unless the executor
// registers with it.
func checkIdentity(s *config.Executor, node *identity.Node, advertised string) error {
	if node == nil {
		return nil
	}
	a, err := control.ParseAddress(advertised)
	if err != nil {
		return fmt.Errorf("advertise: %w", err)
	}
	byCertificate := false
	if m, err := control.ParseAddresses(s.Manager); err == nil {
		byCertificate = !m[0].Local() && !s.AllowPlaintext
	}
	if a.Local() && !byCertificate {
		return nil
	}
	if a.Network == "unix" {
		return fmt.Errorf("advertise: %s: a unix socket cannot be registered with the resource manager of another node", advertised)
	}
	if err := node.Hosts(time.Now()).Covers(a.Target); err != nil {
		return fmt.Errorf("identity-dir %s belongs to another node: the advertised address is %s, and %w (set advertise to one of these, or get a certificate for that name: rfaas cluster join --again --host, or rfaas cluster node)",
			s.IdentityDir, advertised, err)
	}
	return nil
}

// pooledDevices returns the specs of pooled workers: one for each provider, with what most leases use: a channel with the
// client's defaults, one core and its memory. There are none of provider ofi: a worker's sandbox closes only when libfabric has connected.
func (e *Executor) pooledDevices() (list []zygote.Spec) {
	for _, p := range e.cfg.Providers {
		if p == dataplane.OFI {
			continue
		}
		spec := e.deviceSpec(p)
		spec.MaxDepth, spec.MaxEager, spec.MaxBulk = dataplane.DefaultDepth, dataplane.DefaultEager, uint64(dataplane.DefaultBulk)
		spec.CPUs = e.cfg.cpus()
		spec.ChannelMemory = channelMemory(dataplane.DefaultDepth, dataplane.DefaultEager, uint64(dataplane.DefaultBulk))
		spec.MemoryLimit = max(e.defaultMemory(1), minMemory+spec.ChannelMemory) - spec.ChannelMemory
		list = append(list, spec)
	}
	return list
}

// rdmaOptions returns the settings of the RDMA device. Most threads of an executor use it after they have given up root.
func rdmaOptions(s *config.Executor) dataplane.Options {
	return dataplane.Options{Device: s.VerbsDevice, Port: s.VerbsPort, GIDIndex: s.VerbsGIDIndex, PKeyIndex: s.VerbsPKeyIndex,
		TrafficClass: s.VerbsTrafficClass, ServiceLevel: s.VerbsServiceLevel, MTU: s.VerbsMTU, OneThread: true}
}

// fabric returns the addresses of the devices that this node's workers use, for the board.
func fabric(s *config.Executor, providers []string, log *slog.Logger) []dataplane.Address {
	if !slices.Contains(providers, dataplane.Verbs) {
		return nil
	}
	d, err := dataplane.Open(dataplane.Verbs, rdmaOptions(s))
	if err != nil {
		log.Warn("cannot read the RDMA device's address", "error", err)
		return nil
	}
	defer d.Close()
	if a, ok := d.Address(); ok {
		return []dataplane.Address{a}
	}
	return nil
}

// shutdown ends what is left: nothing after a drain, everything after a failed start.
func (e *Executor) shutdown(port *control.Port) {
	ctx, cancel := context.WithTimeout(context.Background(), control.CloseTimeout)
	defer cancel()
	port.Close(ctx)
	if n := port.Gate.Refused(); n > 0 {
		e.log.Warn("refused calls or connections while running", "refused", n)
	}
	e.claims.close()
	e.codes.close()
	e.lender.close() // first, to end the transfers
	e.fabric.close()
	e.tables.close()
}

// cpus returns the lent logical CPUs in ascending order.
func (c *Config) cpus() (list []int) {
	for _, core := range c.Cores {
		list = append(list, core.CPUs...)
	}
	slices.Sort(list)
	return list
}

// waitingMemory is the memory that is assumed for a pooled worker, in bytes.
const waitingMemory = 8 << 20

// lentMemory returns how much memory can be lent: the available memory or, unless it is 0, the assigned memory, less
// that of pooled workers, which get at most half.
func lentMemory(available, assigned uint64, waiting int) uint64 {
	if assigned != 0 {
		available = min(available, assigned)
	}
	return available - min(uint64(waiting)*waitingMemory, available/2)
}

// nodeConfig determines the resources of this node.
func nodeConfig(s config.Executor, spawner Spawner, before *handover.State, log *slog.Logger) (Config, error) {
	cfg := Config{Settings: s, Spawner: spawner, Log: log, Memory: uint64(s.Memory)}
	var err error
	if before != nil {
		err = cfg.restoredNode(before.GetNode())
	} else {
		err = cfg.lend(spawner, log)
	}
	if err != nil {
		return cfg, err
	}
	if cfg.NodeID, err = control.NodeID(); err != nil {
		return cfg, err
	}
	if cfg.Node, err = os.Hostname(); err != nil {
		return cfg, err
	}
	cfg.NodeCores = topology.NodeCores("/")
	return cfg, nil
}

// lend determines the cores, the memory and the providers that the executor lends.
func (c *Config) lend(spawner Spawner, log *slog.Logger) error {
	allowed, err := topology.Affinity()
	if err != nil {
		return err
	}
	slurm, err := topology.ReadSlurm(os.Getenv)
	if err != nil {
		return err
	}
	c.Near = topology.Near("/", c.Settings.VerbsDevice)
	cores, unbound, err := c.Settings.Cores.Pick("/", allowed, c.Near, slurm)
	if err != nil {
		return err
	}
	if unbound {
		log.Warn("Slurm does not bind this process to CPUs; lending as many as it assigned, starting with the node's first CPU",
			"assigned", slurm.CPUs, "cpus", config.Cores{List: topology.CPUs(cores)}.String())
	}
	c.Cores = leaseCores(cores)
	s := &c.Settings
	c.Providers, err = chooseProviders(s.ProviderList(), s.OffersOFI(), spawner.VerbsDevices(), dataplane.LoadVerbs,
		func() error { return openOFI(s, os.Geteuid() == 0) })
	if err != nil {
		return err
	}
	if err := c.Settings.CheckMemory("/"); err != nil {
		return err
	}
	if c.Memory == 0 {
		node, err := topology.NodeMemory("/")
		if err != nil {
			return err
		}
		available, err := topology.AvailableMemory("/")
		if err != nil {
			return err
		}
		c.Memory = lentMemory(available-min(memoryReserve(s, node.Total), available/2), slurm.Memory, c.Settings.Pool*len(c.Providers))
	}
	return nil
}
