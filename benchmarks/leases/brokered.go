package leases

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"

	"github.com/rfaas-go/rfaas/benchmarks/fromc"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// roundTrips is the bound of the time from a lease's request to the first result on verbs, in bare round trips of 8 bytes.
const roundTrips = 6

// far measures leases on verbs whose first calls pass through the agent. Its unit is a bare round trip of 8 bytes on the same machine, which takes trip ns.
func far(ctx context.Context, cfg *Config, trip int64) ([]Row, error) {
	w, err := fromc.MeasureWakes(wakeRounds)
	if err != nil {
		return nil, err
	}
	cfg.Cold.Leases, cfg.Cold.Client, cfg.Cold.Peer = cfg.Leases, "c", ""
	of, err := series(ctx, cfg.Cold, "spare", "cached")
	if err != nil {
		return nil, err
	}
	var rows []Row
	for _, mode := range []string{"spare", "cached"} {
		r := of[mode]
		rows = append(rows, Row{"", "lease to first result on verbs, " + mode, float64(r.P50NS) / float64(trip), "round trips", roundTrips, false,
			fmt.Sprintf("p50 %s, of which the first call takes %s; a round trip takes %s, a bare wake-up of a thread %s", us(r.P50NS), us(r.FirstCallNS), us(trip), us(w.Thread))})
	}
	return rows, nil
}

// brokered measures virtual queue pairs: a broker, four clients and their workers, on verbs if this machine has a device, otherwise on tcp.
func brokered(ctx context.Context, cfg *Config) ([]Row, error) {
	provider, calls, most := dataplane.TCP, 2000, 1.34
	if d, err := dataplane.Open(dataplane.Verbs, dataplane.Options{}); err == nil {
		d.Close()
		provider, calls, most = dataplane.Verbs, 300, 1.1
	}
	c := exec.CommandContext(ctx, cfg.Cold.Peer, "--broker", provider, strconv.Itoa(calls))
	c.Stderr = os.Stderr
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("%s --broker %s: %w", cfg.Cold.Peer, provider, err)
	}
	var ns, floor [2]int64
	var rate [2]float64
	var refused, failed, called, wrong, posted, lost, moves uint64
	_, err = fmt.Fscanf(bytes.NewReader(out), "brokered %d %g\nprivate %d %g\nfloor %d %d\nsoak %d %d %d %d %d %d %d\n", &ns[0], &rate[0], &ns[1], &rate[1], &floor[0], &floor[1],
		&refused, &failed, &called, &wrong, &posted, &lost, &moves)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s --broker %s printed %q", cfg.Cold.Peer, provider, out), err)
	}
	busy := fmt.Sprintf("%s; beside three clients with %d calls", provider, called)
	rows := []Row{
		{"K5", "queue pairs in error after malformed requests", float64(failed), "", none, false, fmt.Sprintf("%d refused on %s", refused, busy)},
		{"K6", "lost completions of posts without polling", float64(lost), "", none, false, fmt.Sprintf("%d posts on %s", posted, busy)},
		{"K7", "results of another client, lost, repeated or reordered", float64(wrong), "", none, false, fmt.Sprintf("%d calls of three clients on %s", called, provider)},
		{"K9", "the same with moves to a private queue pair under load", float64(wrong), "", none, false, fmt.Sprintf("%d moves on %s", moves, provider)},
		{"K10", "call of 8 B through the broker against a private queue pair", float64(ns[0]) / float64(ns[1]), "times", most, false,
			fmt.Sprintf("p50 on %s: %s and %s", provider, us(ns[0]), us(ns[1]))},
		{"K10", "the same against a bare round trip through another thread", float64(ns[0]) / float64(floor[1]), "times", 1.34, false,
			fmt.Sprintf("%s; it takes %s, without the other thread %s (%.2f times)", provider, us(floor[1]), us(floor[0]), float64(floor[1])/float64(floor[0]))},
		{"S5", "rate on a private queue pair against that through the broker", rate[1] / rate[0], "times", 1.3, true,
			fmt.Sprintf("8 calls in flight on %s: %.1f and %.1f K/s", provider, rate[1]/1e3, rate[0]/1e3)},
	}
	if cfg.Cold.Provider != dataplane.Verbs {
		return rows, nil
	}
	more, err := far(ctx, cfg, floor[0])
	return append(rows, more...), err
}
