package executor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/datalisten"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/link"
	"github.com/rfaas-go/rfaas/internal/observe"
	"github.com/rfaas-go/rfaas/internal/privilege"
	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/topology"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// uidFile is the lock file that keeps the executors of a node from using the same user ids.
const uidFile = "/run/rfaas/uids"

// Serve runs an executor on this node until ctx ends or an operator requests a drain, then drains it. now aborts the
// drain. It returns nil after a regular end.
func Serve(ctx, now context.Context, s config.Executor, log *slog.Logger) error {
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
	files, appended := rootFiles(&s)
	z, err := zygote.Start(ctx, zygote.Config{Path: path, Version: s.Version, Log: log, Files: files, Append: appended, UID: own.user.UID, GID: own.user.GID,
		Remove: socketFiles(&s), Sandbox: zygote.Sandbox{Mode: sandboxMode(&s, root, log), Paths: s.SandboxPathList(), Environment: s.SandboxEnvList(),
			UIDs: s.SandboxUIDs, UIDFile: uidFile, Processes: uint32(s.SandboxProcesses), Files: uint32(s.SandboxFiles)}})
	if err != nil {
		return err
	}
	defer z.Close()
	err = serveWith(ctx, now, s, zygoteSpawner{z}, log)
	z.RemoveFiles() // files that this process created as root and can no longer remove
	return err
}

// rootFiles returns the files and sockets that the spawner opens for an executor that has given up root: those that it
// reads or connects to, and those that it appends to.
func rootFiles(s *config.Executor) (files, appended []string) {
	for _, path := range []string{s.IdentityDir, strings.TrimPrefix(s.Manager, "unix:")} {
		if filepath.IsAbs(path) {
			files = append(files, path)
		}
	}
	if filepath.IsAbs(s.AuditFile) {
		appended = []string{s.AuditFile}
	}
	return files, appended
}

// rights are an executor's rights on files once it serves. The executor opens the files that its user can change with
// these rights from the start, also while it is still root. Otherwise an attacker that took over that user before a
// restart could place a link to another user's file there.
type rights struct {
	user  privilege.User // user that the executor becomes; zero: it keeps its own
	state *os.File       // the state directory, which the user may be unable to reach by its path; nil: use the path
}

// rightsOf finds the user that an executor becomes.
func rightsOf(s *config.Executor) (rights, error) {
	if !s.Separate || os.Geteuid() != 0 {
		return rights{}, nil
	}
	u, err := privilege.Find(s.User)
	if err == nil && s.SandboxUIDs.Has(u.UID) {
		err = fmt.Errorf("user %s (%d) is in the range sandbox-uids (%v), which is for workers: choose another user", u.Name, u.UID, s.SandboxUIDs)
	}
	if err != nil {
		return rights{}, fmt.Errorf("give up root: %w", err)
	}
	return rights{user: u}, nil
}

// do calls fn with these rights.
func (r rights) do(fn func()) error {
	if r.user.UID == 0 || os.Geteuid() != 0 {
		fn()
		return nil
	}
	return r.user.As(fn)
}

// open opens a file with these rights, or with asRoot, through the spawner, if that needs root.
func (r rights) open(open func() (*os.File, error), asRoot func() (*os.File, error)) (f *os.File, err error) {
	if rerr := r.do(func() { f, err = open() }); rerr != nil {
		return nil, rerr
	}
	if errors.Is(err, fs.ErrPermission) {
		return asRoot()
	}
	return f, err
}

// opener returns a function that opens files of the identity directory.
func (r rights) opener(spawner Spawner) identity.Opener {
	return func(path string) (fs.File, error) {
		f, err := r.open(func() (*os.File, error) { return os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) },
			func() (*os.File, error) { return spawner.OpenFile(path, false) })
		if err != nil {
			return nil, err // and not a nil *os.File in an interface
		}
		return f, nil
	}
}

// auditOpener returns a function that opens the audit file.
func (r rights) auditOpener(spawner Spawner) func(path string) (*os.File, error) {
	return func(path string) (*os.File, error) {
		return r.open(func() (*os.File, error) { return identity.OpenAuditFile(r.reach(path)) }, func() (*os.File, error) { return spawner.OpenFile(path, true) })
	}
}

// reach returns a path by which the user can reach a file of the state directory. It returns other paths unchanged.
func (r rights) reach(path string) string {
	if r.state == nil {
		return path
	}
	state := fmt.Sprintf("/proc/self/fd/%d", r.state.Fd())
	switch dir := filepath.Clean(r.state.Name()); {
	case filepath.Clean(path) == dir:
		return state
	case filepath.Dir(path) == dir:
		return filepath.Join(state, filepath.Base(path))
	}
	return path
}

// makeDirectories makes the directories that the settings name, and gives the state directory to the user while this
// process is root.
func (r *rights) makeDirectories(s *config.Executor) error {
	if r.user.UID == 0 {
		return nil
	}
	if s.AuditFile != "" {
		if err := r.makeDirectory(filepath.Dir(s.AuditFile), nil); err != nil {
			return fmt.Errorf("audit file: %w", err)
		}
	}
	if s.StateDir == "" {
		return nil
	}
	err := r.makeDirectory(s.StateDir, func() error { return r.user.Own(s.StateDir) })
	if err == nil {
		var fd int
		if fd, err = unix.Open(s.StateDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err == nil {
			r.state = os.NewFile(uintptr(fd), s.StateDir)
		}
	}
	if err != nil {
		return fmt.Errorf("state directory %s: %w", s.StateDir, err)
	}
	return nil
}

// makeDirectory makes a directory. It uses root's rights only if the user cannot change where the path leads. In that
// case it also calls then, unless then is nil.
func (r *rights) makeDirectory(path string, then func() error) (err error) {
	path, err = filepath.Abs(path)
	if err != nil {
		return err
	}
	if zygote.PathIsSafe(path, r.user.UID, r.user.GID) != nil {
		if rerr := r.do(func() { err = os.MkdirAll(path, 0o700) }); rerr != nil {
			return rerr
		}
		return err
	}
	if err := os.MkdirAll(path, 0o700); err != nil || then == nil {
		return err
	}
	return then()
}

// close closes the state directory.
func (r *rights) close() {
	if r.state != nil {
		r.state.Close()
	}
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

// separate gives up all rights beyond those of an ordinary user. Afterwards the spawner does everything that needs
// root.
func (r rights) separate(s *config.Executor, log *slog.Logger) error {
	if !s.Separate {
		return nil
	}
	if os.Geteuid() == 0 {
		if err := privilege.Drop(r.user); err != nil {
			return fmt.Errorf("give up root: %w", err)
		}
		log.Info("gave up root; only the spawner runs as root now", "user", r.user.Name)
	}
	return unfiltered(privilege.Filter(), s.Sandbox.Resolve(r.user.UID != 0, s.IdentityDir != ""), log)
}

// unfiltered decides what an executor does when the system call filter could not be installed. It returns an error if
// workers must have a complete sandbox, except on an architecture for which no such filter exists.
func unfiltered(err error, mode sandbox.Mode, log *slog.Logger) error {
	switch {
	case err == nil:
		return nil
	case mode == sandbox.Require && !errors.Is(err, privilege.ErrArchitecture):
		return fmt.Errorf("a complete sandbox is required, and this process cannot have a system call filter: %w (--sandbox=on starts without it)", err)
	}
	log.Warn("running without a system call filter", "reason", err)
	return nil
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
func serveWith(ctx, now context.Context, s config.Executor, spawner Spawner, log *slog.Logger) error {
	cfg, err := nodeConfig(s, spawner, log)
	if err != nil {
		return err
	}
	if slices.Contains(cfg.Providers, dataplane.TCP) {
		if cfg.Data, err = datalisten.Open(s.DataListen, s.DataAdvertise, log); err != nil {
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
	defer own.close()
	if err := own.makeDirectories(&s); err != nil {
		return err
	}
	port, err := control.OpenPort(control.PortConfig{Listen: s.Listen, AllowPlaintext: s.AllowPlaintext,
		SecretFile: s.SecretFile, IdentityDir: s.IdentityDir, OpenIdentity: own.opener(spawner), AuditFile: s.AuditFile, OpenAudit: own.auditOpener(spawner),
		AddressFile: s.AddressFile, Daemon: "executor", Log: log,
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
	web, err := observe.Open(s.HTTPListen, nil, log)
	if err != nil {
		e.shutdown(port)
		return err
	}
	defer closeWeb(web)
	e.show(web.Metrics)
	observe.WatchIdentity(web, port.Node)

	background, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	defer e.shutdown(port)
	var reg *registrar
	journal, err := own.openJournal(&s, cfg.Node, log)
	if err != nil {
		return err
	}
	if s.Manager != "" {
		e.cfg.Fabric = fabric(&s, cfg.Providers, log)
		e.accounts = newAccounts(cfg.Node, e.incarnation, e.now, journal, log)
		conn, err := control.Dial(s.Manager, control.DialConfig{SecretFile: s.SecretFile, Node: port.Node,
			AllowPlaintext: s.AllowPlaintext, Connect: spawner.Connect})
		if err != nil {
			return err
		}
		defer conn.Close()
		reg = newRegistrar(conn, s.Manager, advertised, e.info, log)
		reg.accounts, reg.nodeID = e.accounts, cfg.NodeID
		reg.devices = &link.Devices{Options: dataplane.Options{Device: s.VerbsDevice, Port: s.VerbsPort, GIDIndex: s.VerbsGIDIndex,
			PKeyIndex: s.VerbsPKeyIndex, TrafficClass: s.VerbsTrafficClass, ServiceLevel: s.VerbsServiceLevel, MTU: s.VerbsMTU, Encrypt: encryption(&s)}}
		e.report = reg.report
		e.limits = newLimiter(reg.client, e.incarnation, s.LimitUnknown == "admit", log)
		reg.limits = e.limits
	}
	if s.Separate {
		if err := port.Announce(); err != nil {
			return err
		}
	}
	if err := own.separate(&s, log); err != nil { // before the first byte from another party is read
		return err
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
	wg.Go(func() { e.Run(background) })
	wg.Go(func() { e.reportAbility(background) })
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
	if reg != nil {
		// Deregister before the port closes, so that no more clients come.
		regCtx, stop := context.WithCancel(background)
		var gone sync.WaitGroup
		gone.Go(func() { reg.run(regCtx) })
		gone.Go(func() { e.accounts.run(regCtx, s.ChargeInterval, reg.client) })
		defer gone.Wait()
		defer stop()
	}
	drain := drainRequest{s.Grace, drainReason}
	wanted := make(chan struct{})
	waitCtx, stopWait := context.WithCancel(background)
	var waits sync.WaitGroup
	waits.Go(func() { e.back.wait(waitCtx); close(wanted) })
	defer waits.Wait()
	defer stopWait()
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
		e.report()
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
	if m, err := control.ParseAddress(s.Manager); err == nil {
		byCertificate = !m.Local() && !s.AllowPlaintext
	}
	if a.Local() && !byCertificate {
		return nil
	}
	if a.Network == "unix" {
		return fmt.Errorf("advertise: %s: a unix socket cannot be registered with the resource manager of another node", advertised)
	}
	if err := node.Hosts(time.Now()).Covers(a.Target); err != nil {
		return fmt.Errorf("identity-dir %s belongs to another node: the advertised address is %s, and %w (set advertise, or make the directory with rfaas cluster node for that name)",
			s.IdentityDir, advertised, err)
	}
	return nil
}

// pooledDevices returns the specs of pooled workers: one for each provider, with what most leases use: a channel with the
// client's defaults, one core and its memory.
func (e *Executor) pooledDevices() (list []zygote.Spec) {
	for _, p := range e.cfg.Providers {
		spec := e.deviceSpec(p)
		spec.MaxDepth, spec.MaxEager, spec.MaxBulk = dataplane.DefaultDepth, dataplane.DefaultEager, uint64(dataplane.DefaultBulk)
		spec.CPUs = e.cfg.cpus()
		spec.ChannelMemory = channelMemory(dataplane.DefaultDepth, dataplane.DefaultEager, uint64(dataplane.DefaultBulk))
		spec.MemoryLimit = max(e.defaultMemory(1), minMemory+spec.ChannelMemory) - spec.ChannelMemory
		list = append(list, spec)
	}
	return list
}

// fabric returns the addresses of the devices that this node's workers use, for the board.
func fabric(s *config.Executor, providers []string, log *slog.Logger) []dataplane.Address {
	if !slices.Contains(providers, dataplane.Verbs) {
		return nil
	}
	d, err := dataplane.Open(dataplane.Verbs, dataplane.Options{Device: s.VerbsDevice, Port: s.VerbsPort, GIDIndex: s.VerbsGIDIndex,
		PKeyIndex: s.VerbsPKeyIndex, TrafficClass: s.VerbsTrafficClass, ServiceLevel: s.VerbsServiceLevel, MTU: s.VerbsMTU})
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

// openJournal opens the journal of accounts. It returns nil without a directory. Without a manager nothing is charged:
// the directory is only checked, so that an unusable one is reported early.
func (r rights) openJournal(s *config.Executor, node string, log *slog.Logger) (j *accounting.Journal, err error) {
	if s.StateDir == "" {
		return nil, nil
	}
	if rerr := r.do(func() { j, err = accounting.OpenJournal(r.reach(s.StateDir), node) }); rerr != nil {
		err = rerr
	}
	if err != nil && r.state != nil {
		err = fmt.Errorf("state directory %s: %w", s.StateDir, err)
	}
	if err != nil || s.Manager != "" {
		return j, err
	}
	log.Info("the state directory is not used, because without a resource manager nothing is charged", "state-dir", s.StateDir)
	return nil, j.Close()
}

// shutdown ends what is left: nothing after a drain, everything after a failed start.
func (e *Executor) shutdown(port *control.Port) {
	ctx, cancel := context.WithTimeout(context.Background(), control.CloseTimeout)
	defer cancel()
	port.Close(ctx)
	if n := port.Gate.Refused(); n > 0 {
		e.log.Warn("refused calls or connections while running", "refused", n)
	}
	e.codes.close()
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
func nodeConfig(s config.Executor, spawner Spawner, log *slog.Logger) (Config, error) {
	cfg := Config{Settings: s, Spawner: spawner, Log: log, Memory: uint64(s.Memory)}
	allowed, err := topology.Affinity()
	if err != nil {
		return cfg, err
	}
	slurm, err := topology.ReadSlurm(os.Getenv)
	if err != nil {
		return cfg, err
	}
	cfg.Near = topology.Near("/", s.VerbsDevice)
	cores, unbound, err := s.Cores.Pick("/", allowed, cfg.Near, slurm)
	if err != nil {
		return cfg, err
	}
	if unbound {
		log.Warn("Slurm does not bind this process to CPUs; lending as many as it assigned, starting with the node's first CPU",
			"assigned", slurm.CPUs, "cpus", config.Cores{List: topology.CPUs(cores)}.String())
	}
	cfg.Cores = leaseCores(cores)
	if cfg.Providers, err = chooseProviders(s.ProviderList(), spawner.VerbsDevices(), dataplane.LoadVerbs); err != nil {
		return cfg, err
	}
	if err := s.CheckMemory("/"); err != nil {
		return cfg, err
	}
	if cfg.Memory == 0 {
		available, err := topology.AvailableMemory("/")
		if err != nil {
			return cfg, err
		}
		cfg.Memory = lentMemory(available, slurm.Memory, s.Pool*len(cfg.Providers))
	}
	if cfg.NodeID, err = control.NodeID(); err != nil {
		return cfg, err
	}
	if cfg.Node, err = os.Hostname(); err != nil {
		return cfg, err
	}
	return cfg, nil
}
