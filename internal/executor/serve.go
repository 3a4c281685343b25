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
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/observe"
	"github.com/rfaas-go/rfaas/internal/privilege"
	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/topology"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// uidFile keeps the workers of this node's executors from having the same user ids.
const uidFile = "/run/rfaas/uids"

// Serve runs an executor on this node until ctx ends or somebody asks for it by the control port, then drains it. now ends
// the drain at once. nil: it ended as it should.
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
	z.RemoveFiles() // what this process has made as root and may not remove any more
	return err
}

// rootFiles are files that the spawner reads, or connects to, and those that it appends to, for an executor that has given up root.
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

// rights are those that an executor has on files once it serves. What it may change itself it opens with them from the beginning, also while it is still
// root: its user, which may have been taken over before a restart, could have put a link to somebody else's file there.
type rights struct {
	user  privilege.User // whom it becomes; zero: nobody else
	state *os.File       // the state directory, which the user may not reach by its path; nil: by its path
}

// rightsOf finds whom an executor becomes.
func rightsOf(s *config.Executor) (rights, error) {
	if !s.Separate || os.Geteuid() != 0 {
		return rights{}, nil
	}
	u, err := privilege.Find(s.User)
	if err == nil && s.SandboxUIDs.Has(u.UID) {
		err = fmt.Errorf("user %s (%d) is in the range sandbox-uids (%v), which is for workers: choose another one", u.Name, u.UID, s.SandboxUIDs)
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

// open opens a file with these rights, and by way of the spawner what takes root's.
func (r rights) open(open func() (*os.File, error), asRoot func() (*os.File, error)) (f *os.File, err error) {
	if rerr := r.do(func() { f, err = open() }); rerr != nil {
		return nil, rerr
	}
	if errors.Is(err, fs.ErrPermission) {
		return asRoot()
	}
	return f, err
}

// opener opens files of the identity directory.
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

// auditOpener opens the audit file.
func (r rights) auditOpener(spawner Spawner) func(path string) (*os.File, error) {
	return func(path string) (*os.File, error) {
		return r.open(func() (*os.File, error) { return identity.OpenAuditFile(r.reach(path)) }, func() (*os.File, error) { return spawner.OpenFile(path, true) })
	}
}

// reach is a path by which the user reaches a file of the state directory; others stay as they are.
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

// makeDirectories makes the directories that the settings name and gives the state directory to the user, as long as this process is root.
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

// makeDirectory makes a directory, with the rights of root only if the user cannot change what its path leads to. then is called with these
// rights too; nil: nothing is to be done.
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

// close closes what makeDirectories has opened.
func (r *rights) close() {
	if r.state != nil {
		r.state.Close()
	}
}

// socketFiles are the files that an executor removes when it ends.
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

// separate gives up all rights that this process has beyond those of an ordinary user. What only root can do from now on, the spawner does.
func (r rights) separate(s *config.Executor, log *slog.Logger) error {
	if !s.Separate {
		return nil
	}
	if os.Geteuid() == 0 {
		if err := privilege.Drop(r.user); err != nil {
			return fmt.Errorf("give up root: %w", err)
		}
		log.Info("this process is no longer root's; its spawner is", "user", r.user.Name)
	}
	return unfiltered(privilege.Filter(), s.Sandbox.Resolve(r.user.UID != 0, s.IdentityDir != ""), log)
}

// unfiltered says what becomes of an executor without a filter of system calls: it does not start where workers must have a complete sandbox, unless
// nobody has such a filter on this architecture.
func unfiltered(err error, mode sandbox.Mode, log *slog.Logger) error {
	switch {
	case err == nil:
		return nil
	case mode == sandbox.Require && !errors.Is(err, privilege.ErrArchitecture):
		return fmt.Errorf("a complete sandbox is required, and this process cannot have a filter of system calls: %w (--sandbox=on starts without)", err)
	}
	log.Warn("this process has no filter of system calls", "reason", err)
	return nil
}

// sandboxMode is what the setting means here. A setting that demands less than the default is logged: somebody must have decided it.
func sandboxMode(s *config.Executor, root bool, log *slog.Logger) sandbox.Mode {
	mode, usual := s.Sandbox.Resolve(root, s.IdentityDir != ""), sandbox.Auto.Resolve(root, s.IdentityDir != "")
	switch {
	case mode == sandbox.Off:
		log.Warn("workers are not confined: functions can do whatever the executor's user can", "sandbox", mode, "default", usual)
	case mode < usual:
		log.Warn("workers run even if this node cannot give them a complete sandbox", "sandbox", mode, "default", usual)
	}
	return mode
}

// serveWith is Serve with workers from anywhere.
func serveWith(ctx, now context.Context, s config.Executor, spawner Spawner, log *slog.Logger) error {
	cfg, err := nodeConfig(s, spawner, log)
	if err != nil {
		return err
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
		reg.accounts, reg.nodeID, reg.open = e.accounts, cfg.NodeID, func(provider string) (*dataplane.Device, error) {
			return dataplane.Open(provider, dataplane.Options{Device: s.VerbsDevice, Port: s.VerbsPort, GIDIndex: s.VerbsGIDIndex,
				PKeyIndex: s.VerbsPKeyIndex, TrafficClass: s.VerbsTrafficClass, ServiceLevel: s.VerbsServiceLevel, MTU: s.VerbsMTU})
		}
		e.report = reg.report
		e.limits = newLimiter(reg.client, e.incarnation, s.LimitUnknown == "admit", log)
		reg.limits = e.limits
	}
	if s.Separate {
		if err := port.Announce(); err != nil {
			return err
		}
	}
	if err := own.separate(&s, log); err != nil { // before the first byte of somebody else is read
		return err
	}
	web.Require("workers", func() error {
		reason, _ := spawner.CannotStart()
		return reason
	})
	web.Serve()
	wg.Go(func() { e.Run(background) })
	wg.Go(func() { e.reportAbility(background) })
	if err := port.Serve(); err != nil {
		return err
	}
	if err := spawner.KeepWarm(s.WarmPool, e.warmDevices()...); err != nil {
		return err
	}
	if web.Address != "" {
		log.Info("health and metrics", "address", web.Address)
	}
	e.ready(web)
	log.Info("ready", "address", port.Address, "cores", len(cfg.Cores), "cpus", config.Cores{List: cfg.cpus()}.String(),
		"memory", config.Bytes(cfg.Memory).String(), "providers", cfg.Providers)
	if reg != nil {
		// Before the port closes, so that nobody is sent here any more; the last one registered is the first to go.
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

// reportAbility reports to the resource manager whenever it may have changed whether workers can be started, until ctx ends.
func (e *Executor) reportAbility(ctx context.Context) {
	able := true
	for {
		reason, changed := e.cfg.Spawner.CannotStart()
		if reason != nil && able {
			e.log.Error("no worker can be started: the executor is not ready and has no free cores", "reason", reason)
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

// checkIdentity refuses the identity of another node: clients that dial the advertised address would refuse its certificate, and so would the
// resource manager. On loopback nobody asks for it, unless the executor registers by it.
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
		return fmt.Errorf("identity-dir %s is not of this node: the advertised address is %s, and %w (set advertise, or make the directory with rfaas cluster node for that name)",
			s.IdentityDir, advertised, err)
	}
	return nil
}

// warmDevices are where workers may have to connect that are started in advance, and what most leases are: a channel of the
// client's defaults, one core and its memory.
func (e *Executor) warmDevices() (list []zygote.Spec) {
	for _, p := range e.cfg.Providers {
		spec := deviceSpec(&e.cfg.Settings, p)
		spec.MaxDepth, spec.MaxEager, spec.MaxBulk = dataplane.DefaultDepth, dataplane.DefaultEager, uint64(dataplane.DefaultBulk)
		spec.CPUs = e.cfg.cpus()
		spec.ChannelMemory = channelMemory(dataplane.DefaultDepth, dataplane.DefaultEager, uint64(dataplane.DefaultBulk))
		spec.MemoryLimit = max(e.defaultMemory(1), minMemory+spec.ChannelMemory) - spec.ChannelMemory
		list = append(list, spec)
	}
	return list
}

// fabric is the address of the device that this node's workers use, which the board shows.
func fabric(s *config.Executor, providers []string, log *slog.Logger) []dataplane.Address {
	if !slices.Contains(providers, dataplane.Verbs) {
		return nil
	}
	d, err := dataplane.Open(dataplane.Verbs, dataplane.Options{Device: s.VerbsDevice, Port: s.VerbsPort, GIDIndex: s.VerbsGIDIndex,
		PKeyIndex: s.VerbsPKeyIndex, TrafficClass: s.VerbsTrafficClass, ServiceLevel: s.VerbsServiceLevel, MTU: s.VerbsMTU})
	if err != nil {
		log.Warn("the RDMA device's address is not known", "error", err)
		return nil
	}
	defer d.Close()
	if a, ok := d.Address(); ok {
		return []dataplane.Address{a}
	}
	return nil
}

// openJournal opens the journal of accounts; without a directory there is none. Without a manager there is nobody to charge: the
// directory is only looked at, since one that is no good is to be known before it is needed.
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
	log.Info("nothing is charged without a resource manager: the state directory is not used", "state-dir", s.StateDir)
	return nil, j.Close()
}

// shutdown ends what is left: nothing after a drain, everything after a failed start.
func (e *Executor) shutdown(port *control.Port) {
	ctx, cancel := context.WithTimeout(context.Background(), control.CloseTimeout)
	defer cancel()
	port.Close(ctx)
	if n := port.Gate.Refused(); n > 0 {
		e.log.Warn("calls or connections were refused", "refused", n)
	}
	e.codes.close()
}

// cpus are the logical CPUs that are lent, ascending.
func (c *Config) cpus() (list []int) {
	for _, core := range c.Cores {
		list = append(list, core.CPUs...)
	}
	slices.Sort(list)
	return list
}

// waitingMemory is what a worker that waits for a lease may take, in bytes.
const waitingMemory = 8 << 20

// lentMemory is what can be lent of what is available and, unless that is 0, assigned: the workers that wait need some. They
// do not get more than half.
func lentMemory(available, assigned uint64, waiting int) uint64 {
	if assigned != 0 {
		available = min(available, assigned)
	}
	return available - min(uint64(waiting)*waitingMemory, available/2)
}

// nodeConfig finds out what this node has.
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
		log.Warn("Slurm binds this process to no CPUs; the first of those that the node has are lent, as many as it assigned",
			"assigned", slurm.CPUs, "cpus", config.Cores{List: topology.CPUs(cores)}.String())
	}
	cfg.Cores = leaseCores(cores)
	if cfg.Providers, err = chooseProviders(s.ProviderList(), spawner.VerbsDevices()); err != nil {
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
		cfg.Memory = lentMemory(available, slurm.Memory, s.WarmPool*len(cfg.Providers))
	}
	if cfg.NodeID, err = control.NodeID(); err != nil {
		return cfg, err
	}
	if cfg.Node, err = os.Hostname(); err != nil {
		return cfg, err
	}
	return cfg, nil
}
