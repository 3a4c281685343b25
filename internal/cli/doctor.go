package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/executor"
	"github.com/rfaas-go/rfaas/internal/grant"
	"github.com/rfaas-go/rfaas/internal/topology"
)

// finding is the result of one check.
type finding struct {
	Check  string `json:"check"`
	State  string `json:"state"` // ok, note or problem
	Detail string `json:"detail"`
	Mend   string `json:"mend,omitempty"`
}

func ok(check, format string, args ...any) finding {
	return finding{Check: check, State: "ok", Detail: fmt.Sprintf(format, args...)}
}

func note(check, mend, format string, args ...any) finding {
	return finding{Check: check, State: "note", Detail: fmt.Sprintf(format, args...), Mend: mend}
}

func problem(check, mend, format string, args ...any) finding {
	return finding{Check: check, State: "problem", Detail: fmt.Sprintf(format, args...), Mend: mend}
}

func newDoctor(a *app) *cobra.Command {
	var executorAddr, manager string
	var asJSON bool
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Check what rfaas needs on this node, and say how to fix what is missing",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			devices := verbsDevices("/sys/class/infiniband")
			list := []finding{
				checkDevices(devices, adaptersWithoutDriver("/sys/bus/pci/devices")),
				checkVerbsLibrary(len(devices) > 0, dataplane.LoadVerbs),
				checkCryptoLibrary(dataplane.LoadCrypto),
				checkOFI(a.Getenv, dataplane.Open),
				checkSoftRoCE("/sys/class/infiniband", kernelRelease()),
				checkSessions("/proc/sys/kernel/sched_autogroup_enabled", kernelRelease()),
				checkGIDs("/sys/class/infiniband"),
				checkDeviceFiles("/dev/infiniband", len(devices) > 0),
				checkMemlock(len(devices) > 0),
				checkCores(),
				checkGroups(),
				checkNamespaces(c.Context()),
				checkSandbox(c.Context()),
				a.checkSecret(),
				checkPrograms(),
				a.checkClock(c.Context(), manager),
				checkListen(ownPort(manager, control.DefaultManagerAddress), ownPort(executorAddr, control.DefaultExecutorAddress)),
				a.checkPort(c.Context(), "executor", executorAddr, func(ctx context.Context, conn *grpc.ClientConn) error {
					_, err := control.NewExecutorClient(conn).Info(ctx, &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
					return err
				}),
				a.checkPort(c.Context(), "resource manager", manager, func(ctx context.Context, conn *grpc.ClientConn) error {
					_, err := control.NewManagerClient(conn).List(ctx, &control.ListRequest{})
					return err
				}),
				a.checkData(c.Context(), executorAddr, manager),
				a.checkBoard(c.Context(), manager),
			}
			return a.report(list, asJSON)
		},
	}
	a.addressFlag(c, &executorAddr, "executor", "RFAAS_EXECUTOR", control.DefaultExecutorAddress, "address of the executor")
	a.addressFlag(c, &manager, "manager", "RFAAS_MANAGER", control.DefaultManagerAddress, "address of the resource manager")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return c
}

func (a *app) report(list []finding, asJSON bool) error {
	problems := 0
	for _, f := range list {
		if f.State == "problem" {
			problems++
		}
	}
	if asJSON {
		if err := a.printJSON(list); err != nil {
			return err
		}
	} else {
		for _, f := range list {
			fmt.Fprintf(a.Stdout, "%-8s %-17s %s\n", f.State, f.Check, f.Detail)
			if f.Mend != "" {
				fmt.Fprintf(a.Stdout, "%-26s -> %s\n", "", f.Mend)
			}
		}
	}
	if problems > 0 {
		return fmt.Errorf("%d of %d checks found a problem", problems, len(list))
	}
	return nil
}

// verbsDevices lists the RDMA devices below a class directory with the state of their ports.
func verbsDevices(class string) []string {
	entries, err := os.ReadDir(class)
	if err != nil {
		return nil // no RDMA core in this kernel
	}
	var out []string
	for _, e := range entries {
		ports, _ := filepath.Glob(filepath.Join(class, e.Name(), "ports", "*", "state"))
		for _, p := range ports {
			b, err := os.ReadFile(p)
			if err != nil {
				continue
			}
			_, state, _ := strings.Cut(strings.TrimSpace(string(b)), ": ") // "4: ACTIVE"
			out = append(out, fmt.Sprintf("%s port %s %s", e.Name(), filepath.Base(filepath.Dir(p)), state))
		}
	}
	return out
}

// adaptersWithoutDriver lists the RDMA adapters below a directory of PCI devices that have no verbs device, because their driver is not loaded: all of
// the PCI classes InfiniBand and fabric, and network adapters of Mellanox (NVIDIA) and Amazon (EFA).
func adaptersWithoutDriver(pci string) []string {
	paths, _ := filepath.Glob(filepath.Join(pci, "*"))
	var out []string
	for _, path := range paths {
		class, vendor, device := read(path, "class"), read(path, "vendor"), read(path, "device")
		rdma := strings.HasPrefix(class, "0x0207") || strings.HasPrefix(class, "0x0208") ||
			strings.HasPrefix(class, "0x02") && (vendor == "0x15b3" || vendor == "0x1d0f" && strings.HasPrefix(device, "0xefa"))
		if _, err := os.Stat(filepath.Join(path, "infiniband")); rdma && errors.Is(err, fs.ErrNotExist) {
			out = append(out, fmt.Sprintf("%s (%s:%s)", filepath.Base(path), strings.TrimPrefix(vendor, "0x"), strings.TrimPrefix(device, "0x")))
		}
	}
	return out
}

func checkDevices(devices, undriven []string) finding {
	const check = "verbs devices"
	text := strings.Join(devices, "; ")
	switch {
	case len(devices) > 0 && !strings.Contains(text, "ACTIVE"):
		return problem(check, "look at the cable and the subnet manager (ibstat)", "no active port: %s", text)
	case len(undriven) > 0:
		return note(check, "load the adapter's RDMA driver: modprobe mlx5_ib, mlx4_ib, hfi1, efa or another (lspci -k names the modules), and ib_uverbs",
			"%s; adapters without a verbs device, because their RDMA driver is not loaded: %s", cmp.Or(text, "none, so calls to other nodes use TCP (provider tcp)"),
			strings.Join(undriven, ", "))
	case len(devices) == 0:
		return ok(check, "none: calls to other nodes use TCP (provider tcp)")
	}
	return ok(check, "%s", text)
}

// checkCryptoLibrary loads libcrypto, which is not linked.
func checkCryptoLibrary(load func() error) finding {
	const check = "encryption"
	if err := load(); err != nil {
		return note(check, "to use provider tcp between nodes, install libssl3 (Debian) or openssl-libs (Red Hat)", "%v", err)
	}
	return ok(check, "libcrypto can be loaded")
}

// checkVerbsLibrary loads libibverbs, which is not linked, where there is a device to use it for.
func checkVerbsLibrary(devices bool, load func() error) finding {
	const check = "verbs library"
	if !devices {
		return ok(check, "libibverbs is not needed without a device")
	}
	if err := load(); err != nil {
		return problem(check, "install or upgrade libibverbs1 and ibverbs-providers (Debian) or libibverbs (Red Hat)", "%v", err)
	}
	return ok(check, "libibverbs can be loaded")
}

// checkOFI opens the ofi device that the environment configures for clients.
func checkOFI(getenv func(string) string, open func(string, dataplane.Options) (*dataplane.Device, error)) finding {
	const check = "libfabric"
	provider := getenv(grant.EnvOFIProvider)
	if provider == "" && getenv(grant.EnvProvider) != dataplane.OFI {
		return ok(check, "not used: "+grant.EnvOFIProvider+" is not set")
	}
	o := dataplane.Options{OFIProvider: cmp.Or(provider, "tcp"), OFIDevice: getenv(grant.EnvOFIDevice)}
	d, err := open(dataplane.OFI, o)
	if err != nil {
		return problem(check, "install libfabric1 (Debian) or libfabric (Red Hat), or see which providers it has: fi_info -t FI_EP_RDM", "%v", err)
	}
	defer d.Close()
	return ok(check, "%s", d.Name())
}

// checkSoftRoCE warns of soft-RoCE on Linux 6.1: when the interface lost its carrier under load, the kernel locked up, in three of three runs.
func checkSoftRoCE(class, release string) finding {
	const check = "soft-RoCE"
	parents, _ := filepath.Glob(filepath.Join(class, "*", "parent")) // the rdma_rxe driver alone has this file
	var devices []string
	for _, p := range parents {
		devices = append(devices, filepath.Base(filepath.Dir(p)))
	}
	switch text := strings.Join(devices, ", "); {
	case len(devices) == 0:
		return ok(check, "not used")
	case strings.HasPrefix(release, "6.1."):
		return problem(check, "use a later kernel, or an RDMA adapter; never on a node that must stay up",
			"%s on Linux %s: the kernel can lock up when the network interface loses its carrier under load", text, release)
	default:
		return note(check, "for tests and trials only; an RDMA adapter is faster and keeps tenants further apart", "%s", text)
	}
}

// checkSessions warns of a fault of Linux 6.18: if the kernel shares CPUs between sessions, a session whose threads wake each other often can keep all
// CPUs for up to 11 s. Meanwhile, kernel threads and programs of other sessions are ready but do not run.
func checkSessions(setting, release string) finding {
	const check = "CPUs for sessions"
	text, err := os.ReadFile(setting)
	switch on := err == nil && strings.TrimSpace(string(text)) != "0"; {
	case !on:
		return ok(check, "not shared between sessions")
	case strings.HasPrefix(release, "6.18."):
		return note(check, "sysctl kernel.sched_autogroup_enabled=0",
			"Linux %s shares CPUs between sessions (autogroup) and has a fault: one session can keep programs of the others waiting for up to 11 s", release)
	default:
		return ok(check, "shared between sessions (autogroup)")
	}
}

func kernelRelease() string {
	var u unix.Utsname
	_ = unix.Uname(&u) // fails for a bad address only
	return unix.ByteSliceToString(u.Release[:])
}

// enoughMemlock is what a few workers with default slots and bulk areas register.
const enoughMemlock = 64 << 20

func checkMemlock(verbs bool) finding {
	const check = "locked memory"
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim); err != nil {
		return problem(check, "", "getrlimit: %v", err)
	}
	if lim.Cur == unix.RLIM_INFINITY {
		return ok(check, "unlimited")
	}
	if lim.Cur >= enoughMemlock {
		return ok(check, "%d KiB", lim.Cur>>10)
	}
	if unix.Geteuid() == 0 {
		return ok(check, "%d KiB, but root is not bound by it", lim.Cur>>10)
	}
	const mend = "put `* - memlock unlimited` into /etc/security/limits.d/rdma.conf, and LimitMEMLOCK=infinity into the unit of slurmd or of the executor"
	if verbs {
		return problem(check, mend, "limit of %d KiB: too little to register memory with the device", lim.Cur>>10)
	}
	return note(check, mend, "limit of %d KiB: shared memory does not need it, a verbs device will", lim.Cur>>10)
}

func checkCores() finding {
	const check = "cores"
	cpus, err := topology.Affinity()
	if err != nil {
		return problem(check, "", "%v", err)
	}
	if len(cpus) == 1 {
		return note(check, "give the process more cores (taskset, mpirun --bind-to none, srun -c)",
			"one (%d): a caller and a worker take turns on it, and every call costs a wake-up", cpus[0])
	}
	return ok(check, "%d that this process may use", len(cpus))
}

func (a *app) checkSecret() finding {
	const check = "secret"
	path, err := a.secretPath()
	if err != nil {
		return problem(check, "set HOME or "+control.SecretFileEnv, "%v", err)
	}
	switch _, err := control.LoadSecret(path); {
	case errors.Is(err, fs.ErrNotExist):
		return note(check, "start an executor or a resource manager, it makes one", "%s does not exist yet", path)
	case err != nil:
		return problem(check, "chmod 600 it, or remove it and start the daemons anew", "%v", err)
	}
	return ok(check, "%s", path)
}

func checkPrograms() finding {
	const check = "programs"
	worker, err := executor.DefaultWorkerPath()
	if err != nil {
		return problem(check, "", "%v", err)
	}
	self, err := os.Executable()
	if err != nil {
		return problem(check, "", "%v", err)
	}
	return findPrograms(check, self, worker)
}

// findPrograms looks for the executor in this program's directory, and for the other programs in the worker's directory.
func findPrograms(check, self, worker string) finding {
	libexec := filepath.Dir(worker)
	programs := []string{filepath.Join(filepath.Dir(self), "executor"), filepath.Clean(worker), filepath.Join(libexec, "rfaas-spawner"),
		filepath.Join(libexec, "rfaas-agent")}
	for _, p := range programs {
		if err := unix.Access(p, unix.X_OK); err != nil {
			return problem(check, "make build, or make install", "%s: %v", p, err)
		}
	}
	return ok(check, "%s", strings.Join(programs, ", "))
}

// portTime is how long the doctor waits for a daemon.
const portTime = 3 * time.Second

// checkPort reports which daemon answers at an address.
func (a *app) checkPort(ctx context.Context, who, addr string, call func(context.Context, *grpc.ClientConn) error) finding {
	ctx, cancel := context.WithTimeout(ctx, min(a.timeout, portTime))
	defer cancel()
	conn, err := a.dial(addr)
	if errors.Is(err, fs.ErrNotExist) {
		return note(who, "start it", "not asked: there is no secret yet")
	}
	if err != nil {
		return problem(who, "", "%s", control.Text(err))
	}
	defer conn.Close()
	err = call(ctx, conn)
	switch status.Code(err) {
	case codes.OK:
		return ok(who, "answers at %s", addr)
	case codes.Unauthenticated:
		return problem(who, "use the secret file of the user that started it ("+control.SecretFileEnv+"), or ask the cluster's administrator for "+
			"another token (rfaas token issue or renew) and set the clock", "%s: %s", addr, control.Text(err))
	case codes.Unavailable:
		return note(who, "start it, or use another address", "nothing answers at %s", addr)
	case codes.DeadlineExceeded:
		return problem(who, "something else may listen there (ss -ltnp)", "%s took a connection and does not answer", addr)
	}
	return problem(who, "", "%s: %s", addr, control.Text(err))
}
