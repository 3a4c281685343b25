package executor

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/config"
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

// chooseProviders returns what this node offers: what was asked for, or what there is. load loads libibverbs: without it
// the worker program finds no devices.
func chooseProviders(asked []string, verbsDevices int, load func() error) ([]string, error) {
	if slices.Contains(asked, "verbs") && verbsDevices == 0 {
		if err := load(); err != nil {
			return nil, fmt.Errorf("providers: verbs was asked for: %w", err)
		}
		return nil, fmt.Errorf("providers: verbs was asked for, and this node has no verbs device")
	}
	if asked != nil {
		return asked, nil
	}
	if verbsDevices > 0 {
		return []string{"shm", "verbs"}, nil
	}
	return []string{"shm"}, nil
}

// DefaultWorkerPath returns where rfaas-worker is when it was installed or built together with the running program:
// ../libexec/rfaas-worker from its directory.
func DefaultWorkerPath() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("where is rfaas-worker: %w", err)
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
		return "", fmt.Errorf("worker program %s: %w (--worker says where it is)", path, err)
	}
	return path, nil
}
