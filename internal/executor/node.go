package executor

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/topology"
	"github.com/rfaas-go/rfaas/lease"
)

// leaseCores are the same cores as the lease table wants them.
func leaseCores(cores []topology.Core) []lease.Core {
	list := make([]lease.Core, len(cores))
	for i, c := range cores {
		list[i] = lease.Core{CPUs: c.CPUs, Node: c.Node}
	}
	return list
}

// chooseProviders returns the providers that this node offers: those in asked or, if asked is nil (auto), those that work here. ofi tells
// whether the settings ask for provider ofi. load loads libibverbs, without which the worker program finds no devices. openOFI
// returns an error if workers could not open the device of ofi.
func chooseProviders(asked []string, ofi bool, verbsDevices int, load, openOFI func() error) ([]string, error) {
	if ofi {
		if err := openOFI(); err != nil {
			return nil, fmt.Errorf("providers: ofi was asked for: %w", err)
		}
	}
	if slices.Contains(asked, "verbs") && verbsDevices == 0 {
		if err := load(); err != nil {
			return nil, fmt.Errorf("providers: verbs was asked for: %w", err)
		}
		return nil, fmt.Errorf("providers: verbs was asked for, and this node has no verbs device")
	}
	if asked != nil {
		return asked, nil
	}
	found := []string{dataplane.SHM}
	if verbsDevices > 0 {
		found = append(found, dataplane.Verbs)
	}
	if ofi {
		found = append(found, dataplane.OFI)
	}
	return found, nil
}

// openOFI opens the ofi device of the settings, as workers do, and closes it.
func openOFI(s *config.Executor, root bool) error {
	provider, device := s.OFI()
	if provider != "tcp" && s.Sandbox.Resolve(root, s.IdentityDir != "") != sandbox.Off {
		return fmt.Errorf("ofi-provider %s: a worker in a sandbox cannot open the device of this provider; set ofi-provider to tcp, or sandbox to off", provider)
	}
	if os.Getenv("FI_PROVIDER") == "" { // initialising all of libfabric's providers takes 0.3 s
		os.Setenv("FI_PROVIDER", map[bool]string{true: "tcp,ofi_rxm", false: provider}[provider == "tcp"])
		defer os.Unsetenv("FI_PROVIDER")
	}
	d, err := dataplane.Open(dataplane.OFI, dataplane.Options{OFIProvider: provider, OFIDevice: device, Encrypt: encryption(s)})
	if err != nil {
		return err
	}
	d.Close()
	return nil
}

// DefaultWorkerPath returns where rfaas-worker is when it was installed or built together with the running program:
// ../libexec/rfaas-worker from its directory.
func DefaultWorkerPath() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find rfaas-worker beside this program: %w (--worker sets its path)", err)
	}
	if real, err := filepath.EvalSymlinks(self); err == nil {
		self = real
	}
	return filepath.Join(filepath.Dir(self), "..", "libexec", "rfaas-worker"), nil
}

// workerPath returns the path of a worker program that can be started.
func workerPath(s *config.Executor) (string, error) {
	path := s.Worker
	if path == "" {
		var err error
		if path, err = DefaultWorkerPath(); err != nil {
			return "", err
		}
	}
	if err := unix.Access(path, unix.X_OK); err != nil {
		return "", fmt.Errorf("worker program %s: %w (--worker sets its path)", path, err)
	}
	return path, nil
}
