package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// maxDataPorts is how many executors checkData connects to.
const maxDataPorts = 32

// checkData connects to the data ports of executors that offer provider tcp. These are the executors that the resource manager lists, and
// the executor at executorAddr. It ignores daemons whose control port does not answer, because other checks report these.
func (a *app) checkData(ctx context.Context, executorAddr, manager string) finding {
	const check = "data ports"
	ports, executors := a.dataPorts(ctx, executorAddr, manager)
	switch {
	case executors == 0:
		return note(check, "", "not checked: no executor was found")
	case len(ports) == 0:
		return note(check, "to serve clients on other nodes without RDMA, set providers to shm,tcp in the executor's configuration",
			"no executor offers tcp (%d found)", executors)
	}
	addresses := slices.Sorted(maps.Keys(ports))
	left := max(len(addresses)-maxDataPorts, 0)
	addresses = addresses[:len(addresses)-left]
	reasons, remedies := make([]string, len(addresses)), make([]string, len(addresses))
	var all sync.WaitGroup
	for i, address := range addresses {
		all.Go(func() {
			remedy, err := grant.CheckData(ctx, address, ports[address])
			if err != nil {
				reasons[i], remedies[i] = fmt.Sprintf("executor %s: %v", address, err), remedy
			}
		})
	}
	all.Wait()
	empty := func(s string) bool { return s == "" }
	reasons, remedies = slices.DeleteFunc(reasons, empty), slices.DeleteFunc(remedies, empty)
	if len(reasons) > 0 {
		slices.Sort(remedies)
		return problem(check, strings.Join(slices.Compact(remedies), "; "), "%s", strings.Join(reasons, "; "))
	}
	more := ""
	if left > 0 {
		more = fmt.Sprintf("; %d others were not checked", left)
	}
	return ok(check, "data ports that accept connections: %d%s", len(addresses), more)
}

// dataPorts returns the data addresses of executors that offer tcp, by control address, and the number of all executors that it found. An executor
// that it finds at two addresses counts once, at the first one.
func (a *app) dataPorts(ctx context.Context, executorAddr, manager string) (ports map[string]string, executors int) {
	ctx, cancel := context.WithTimeout(ctx, min(a.timeout, portTime))
	defer cancel()
	ports = map[string]string{}
	seen := map[string]bool{}
	add := func(address string, info *control.InfoReply) {
		who := address
		if id := info.GetIncarnation(); len(id) > 0 {
			who = string(id)
		}
		if seen[who] {
			return
		}
		seen[who] = true
		if data := info.GetDataAddress(); data != "" {
			ports[address] = data
		}
	}
	if conn, err := a.dial(manager); err == nil {
		defer conn.Close()
		self, _ := control.NodeID()
		if r, err := control.NewManagerClient(conn).List(ctx, &control.ListRequest{}); err == nil {
			for _, e := range r.GetExecutors() {
				if e.GetAlive() && control.CheckLocal(e.GetAddress(), e.GetInfo().GetNodeId(), self) == nil {
					add(e.GetAddress(), e.GetInfo())
				}
			}
		}
	}
	if conn, err := a.dial(executorAddr); err == nil {
		defer conn.Close()
		if info, err := control.NewExecutorClient(conn).Info(ctx, &control.InfoRequest{ProtocolVersion: control.ProtocolVersion}); err == nil {
			add(executorAddr, info)
		}
	}
	return ports, len(seen)
}
