package grant

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// namedMost is how many unusable executors an error names.
const namedMost = 4

// usable returns an executor that the resource manager has named as a candidate for need cores. An error says why the executor cannot be
// asked: StatusUnsupported if it cannot be reached from this node, StatusInvalid if it is too small, StatusBusy if it may be asked later.
func (c *shared) usable(e *control.ExecutorEntry, need uint32) (Candidate, error) {
	const op = "find an executor"
	if e.Info == nil {
		return Candidate{}, fail(op, dataplane.StatusBusy, "the resource manager has no description of executor %s yet", e.Address)
	}
	where := fmt.Sprintf("executor %s on node %q", e.Address, e.Info.Node)
	if e.Info.NodeId != "" && e.Info.NodeId == c.nodeID {
		where = fmt.Sprintf("executor %s on this node", e.Address)
	}
	provider, err := c.named(e.Address, e.Info)
	switch {
	case err != nil:
		return Candidate{}, err
	case e.Info.Cores < need:
		return Candidate{}, fail(op, dataplane.StatusInvalid, "%s lends %s", where, count(int(e.Info.Cores), "core"))
	case !e.Alive:
		return Candidate{}, fail(op, dataplane.StatusBusy, "%s has not been heard from for %v", where, milliseconds(e.AgeMs).Round(time.Second))
	case e.Info.Cordoned:
		return Candidate{}, fail(op, dataplane.StatusBusy, "%s is cordoned: an operator has taken it out of use", where)
	case e.Info.Draining:
		return Candidate{}, fail(op, dataplane.StatusBusy, "%s is draining", where)
	}
	return Candidate{Address: e.Address, Node: e.Info.Node, Provider: provider, info: e.Info}, nil
}

// details returns the reasons why executors cannot be asked as one text; temporary reasons come first.
func details(unusable []error) string {
	sorted := slices.SortedStableFunc(slices.Values(unusable), func(a, b error) int { return cmp.Compare(rank(a), rank(b)) })
	var list []string
	for i, err := range sorted {
		if i == namedMost {
			list = append(list, fmt.Sprintf("and %d more", len(sorted)-i))
			break
		}
		var e *dataplane.Error
		if errors.As(err, &e) {
			list = append(list, e.Detail)
		}
	}
	return strings.Join(list, "; ")
}

// rank orders reasons by what the caller can do: wait, use another provider, ask for less.
func rank(err error) int {
	switch {
	case errors.Is(err, dataplane.ErrBusy):
		return 0
	case errors.Is(err, dataplane.ErrUnsupported):
		return 1
	}
	return 2
}

// nothingUsable returns the error of a lease for which the resource manager knows no usable executor. The error has the class of the first
// reason in details, since one executor that may come back is enough.
func (c *shared) nothingUsable(s *Spec, unusable []error) error {
	const op = "find an executor"
	if len(unusable) == 0 {
		return fail(op, dataplane.StatusBusy, "the resource manager %s knows no executor: start one by executor --manager %s, or see rfaas executors",
			c.opts.Manager, c.opts.Manager)
	}
	st := dataplane.StatusInvalid
	switch rank(slices.MinFunc(unusable, func(a, b error) int { return cmp.Compare(rank(a), rank(b)) })) {
	case 0:
		st = dataplane.StatusBusy
	case 1:
		st = dataplane.StatusUnsupported
	}
	known := fmt.Sprintf("none of the %d executors that the resource manager %s knows can", len(unusable), c.opts.Manager)
	if len(unusable) == 1 {
		known = fmt.Sprintf("the only executor that the resource manager %s knows cannot", c.opts.Manager)
	}
	return fail(op, st, "%s on one node, and %s be used: %s", needs(s.Workers, s.CoresPerWorker), known, details(unusable))
}

// needs says how many cores the workers of a lease need.
func needs(workers, cores int) string {
	verb := "need"
	if workers == 1 {
		verb = "needs"
	}
	return fmt.Sprintf("%s of %s %s %s", count(workers, "worker"), count(cores, "core"), verb, count(workers*cores, "core"))
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// withUnusable adds the reasons why other executors could not be asked to the error of the last executor that was asked.
func withUnusable(err error, unusable []error) error {
	var e *dataplane.Error
	if len(unusable) == 0 || !errors.As(err, &e) {
		return err
	}
	more := *e
	more.Detail += "; not asked: " + details(unusable)
	var ended *ContextError
	if errors.As(err, &ended) {
		return &ContextError{Err: &more, Cause: ended.Cause}
	}
	return &more
}

// anyDevice reports whether the kernel shows this process an RDMA device, by its class or by its files.
func anyDevice() bool {
	for _, place := range []string{"/sys/class/infiniband", "/dev/infiniband"} {
		if list, err := os.ReadDir(place); err == nil && len(list) > 0 {
			return true
		}
	}
	return false
}
