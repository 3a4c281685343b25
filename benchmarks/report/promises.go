package report

import (
	"fmt"
	"math"
	"strconv"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
)

// Promise is a claim with its bound and the source of the measured value.
type Promise struct {
	Section string // what it is about
	Line    string
	Bound   float64
	Least   bool // the bound is a lower bound
	Unit    string
	// of returns the value; false: it was not measured.
	of     func(*Data) (float64, bool)
	figure string // a test's figure, instead of of
	soak   bool   // only `make soak` measures it
}

// Verdict is a promise compared with the measured value.
type Verdict struct {
	Promise
	Value    float64
	Measured bool
	Failed   bool // the test that printed it did not pass
}

// Met says whether the promise is kept.
func (v Verdict) Met() bool {
	if v.Least {
		return v.Measured && !v.Failed && v.Value >= v.Bound
	}
	return v.Measured && !v.Failed && v.Value <= v.Bound
}

func (v Verdict) bound() string {
	sign := "<="
	if v.Least {
		sign = ">="
	}
	return sign + " " + number(v.Bound) + unit(v.Unit)
}

func (v Verdict) value() string {
	if !v.Measured {
		return "-"
	}
	return number(v.Value) + unit(v.Unit)
}

func (v Verdict) verdict() string {
	switch {
	case !v.Measured:
		return "not measured"
	case v.Failed:
		return "FAILED: its test did not pass"
	case v.Met():
		return "met"
	}
	return "NOT MET"
}

func unit(u string) string {
	if u == "" {
		return ""
	}
	return " " + u
}

// number is v with three digits; from a thousand on, without decimals.
func number(v float64) string {
	if math.Abs(v) >= 1000 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

func value(n latency.Number) (float64, bool) { return float64(n), !math.IsNaN(float64(n)) && n != 0 }

// ratio returns the ratio of a call to its floor.
func ratio(provider, client, mode string, payload, result, depth int) func(*Data) (float64, bool) {
	return func(d *Data) (float64, bool) {
		if r := d.call(provider, client, mode, payload, result, depth); r != nil {
			return value(r.Ratio)
		}
		return 0, false
	}
}

func payloadOnly(payload int) func(*Data) (float64, bool) {
	return func(d *Data) (float64, bool) {
		if r := d.call("verbs", "c", "hot", payload, 0, 1); r != nil {
			return value(r.RatioPayloadOnly)
		}
		return 0, false
	}
}

// start is the p50 of a start, in milliseconds.
func start(provider, mode string) func(*Data) (float64, bool) {
	return func(d *Data) (float64, bool) {
		if s := d.start(provider, mode); s != nil {
			return s.P50 / 1e6, s.P50 > 0
		}
		return 0, false
	}
}

// startShare is the p50 of a start on verbs as a share of the start of a process.
func startShare(mode string) func(*Data) (float64, bool) {
	return func(d *Data) (float64, bool) {
		s := d.start("verbs", mode)
		if s == nil || s.Process <= 0 {
			return 0, false
		}
		return s.P50 / s.Process, true
	}
}

// cachedControl is the control time of a lease on a cached connection as a share of that of a first lease, which makes the connection:
// request and grant, channels, and connecting, on both sides. The rest of a worker's start (fork, sandbox, code) is in neither.
func cachedControl(provider string) func(*Data) (float64, bool) {
	return func(d *Data) (float64, bool) {
		cold, cached := d.start(provider, "cold"), d.start(provider, "cached")
		if cold == nil || cached == nil || cold.step("control") <= 0 || cold.step("connect") <= 0 || cached.step("control") <= 0 {
			return 0, false
		}
		return (cached.step("control") + cached.step("connect")) / (cold.step("control") + cold.step("connect")), true
	}
}

func controlP(provider, function string, of func(*latency.Result) float64) func(*Data) (float64, bool) {
	return func(d *Data) (float64, bool) {
		if r := d.control(provider, function); r != nil && r.Samples > 0 {
			return of(r), true
		}
		return 0, false
	}
}

func placementGrowth(d *Data) (float64, bool) {
	small, large := d.control("shm", "placement, 10 executors"), d.control("shm", "placement, 10000 executors")
	if small == nil || large == nil || small.P50NS == 0 {
		return 0, false
	}
	return float64(large.P50NS) / float64(small.P50NS), true
}

// lookUpByMessage is the p50 of the manager's list of 10 executors divided by that of reading one executor's line and identity.
func lookUpByMessage(d *Data) (float64, bool) {
	read, message := d.control("shm", "look-up"), d.control("shm", "look-up by message, 10 executors")
	if read == nil || message == nil || read.P50NS == 0 {
		return 0, false
	}
	return float64(message.P50NS) / float64(read.P50NS), true
}

// fasterThan is the p50 of another system's call divided by that of rfaas over TCP, with 8 bytes.
func fasterThan(system string) func(*Data) (float64, bool) {
	return func(d *Data) (float64, bool) {
		p50 := map[string]int64{}
		for _, r := range d.Results {
			if r.Name == "other" && r.Payload == 8 && r.Samples > 0 {
				p50[r.Provider] = r.P50NS
			}
		}
		ours, theirs := p50["rfaas-tcp"], p50[system]
		if ours == 0 || theirs == 0 {
			return 0, false
		}
		return float64(theirs) / float64(ours), true
	}
}

func (d *Data) neighbour(function string) *latency.Result {
	return d.result(func(r *latency.Result) bool { return r.Name == "neighbour" && r.Function == function })
}

// slowdown is the 95th percentile of a job's slowdown by workers, divided by that of the control.
func slowdown(job, where, control string) func(*Data) (float64, bool) {
	return func(d *Data) (float64, bool) {
		with, without := d.neighbour(job+", workers "+where), d.neighbour(job+", "+control)
		if with == nil || without == nil || !(without.RatioP95 > 0) {
			return 0, false
		}
		return float64(with.RatioP95 / without.RatioP95), true
	}
}

// leaving is the longest time, in seconds, until a lease ended because of a neighbour.
func leaving(setting string) func(*Data) (float64, bool) {
	return func(d *Data) (float64, bool) {
		if r := d.neighbour("lease ends (" + setting + ")"); r != nil && r.Samples > 0 {
			return float64(r.MaxNS) / 1e9, true
		}
		return 0, false
	}
}

// waking returns the 99th percentile, in ms, of how long a job's thread waits when it wakes on a CPU on which a worker computes.
func waking(d *Data) (float64, bool) {
	if r := d.neighbour("wake-up, workers on the same CPUs"); r != nil && r.Samples > 0 {
		return float64(r.P99NS) / 1e6, true
	}
	return 0, false
}

func charging(d *Data) (float64, bool) {
	if r := d.control("shm", "call while charged"); r != nil {
		return float64(r.OverFloor), r.Pairs > 0
	}
	return 0, false
}

// shareOfRings is the rate of 64 small calls in flight as a share of that of the bare rings.
func shareOfRings(d *Data) (float64, bool) {
	r, ok := ratio("shm", "c", "hot", 8, 0, 64)(d)
	return 1 / r, ok
}

// inFlight is the rate of these calls, in millions a second.
func inFlight(d *Data) (float64, bool) {
	r := d.call("shm", "c", "hot", 8, 0, 64)
	if r == nil || r.OpsPerS == 0 {
		return 0, false
	}
	return r.OpsPerS / 1e6, true
}

// Promises are all claims in figures. Bounds other than those of calls (latency.Bounds) are defined only here.
func Promises() []Promise {
	var all []Promise
	for _, b := range latency.Bounds {
		line := fmt.Sprintf("%s, %s, %s, depth %d", b.Provider, b.Mode, sizes(b.Payload, b.Result), b.Depth)
		switch {
		case b.Depth > 1 && b.Ratio > 0:
			of := ratio(b.Provider, "c", b.Mode.String(), b.Payload, b.Result, b.Depth)
			all = append(all, Promise{Section: "Calls", Line: line + ": share of the floor's rate", Bound: 1 / b.Ratio, Least: true,
				of: func(d *Data) (float64, bool) { r, ok := of(d); return 1 / r, ok }})
		case b.Ratio > 0:
			all = append(all, Promise{Section: "Calls", Line: line + ": ratio to the floor", Bound: b.Ratio,
				of: ratio(b.Provider, "c", b.Mode.String(), b.Payload, b.Result, b.Depth)})
		}
		if b.PayloadOnly > 0 {
			all = append(all, Promise{Section: "Calls", Line: line + ": ratio to the bare payload (the first rFaaS)", Bound: b.PayloadOnly, of: payloadOnly(b.Payload)})
		}
	}
	ms := func(r *latency.Result) float64 { return float64(r.P99NS) / 1e6 }
	return append(all, []Promise{
		{Section: "Calls", Line: "shm, hot, 8 B, depth 64: share of the bare rings' rate that is wanted", Bound: 0.5, Least: true, of: shareOfRings},
		{Section: "Calls", Line: "shm, hot, 8 B, depth 64: calls", Bound: 20, Least: true, Unit: "million a second", of: inFlight},
		{Section: "Calls", Line: "shm, hot, 8 B: time that Go adds to a call from C", Bound: 40, Unit: "ns", figure: "go.over_c_ns.8"},
		{Section: "Calls", Line: "shm, hot, 64 B: time that Go adds to a call from C", Bound: 40, Unit: "ns", figure: "go.over_c_ns.64"},
		{Section: "Calls", Line: "shm, hot, 1 KiB: time that Go adds to a call from C", Bound: 40, Unit: "ns", figure: "go.over_c_ns.1024"},
		{Section: "Calls", Line: "shm, hot, 8 B, 64 in flight: share of C's rate that a batch of Go has", Bound: 0.6, Least: true, figure: "go.batch_share"},
		{Section: "Calls", Line: "allocations of a call from Go", Bound: 0, figure: "go.call.allocations"},
		{Section: "Starts", Line: "shm, lease to first result, cold, p50", Bound: 2, Unit: "ms", of: start("shm", "cold")},
		{Section: "Starts", Line: "shm, lease to first result, pooled, p50", Bound: 0.6, Unit: "ms", of: start("shm", "pooled")},
		{Section: "Starts", Line: "shm, lease to first result, cached and frozen, p50", Bound: 0.1, Unit: "ms", of: start("shm", "cached")},
		{Section: "Starts", Line: "shm, lease to first result, cached and awake, p50", Bound: 0.015, Unit: "ms", of: start("shm", "awake")},
		{Section: "Starts", Line: "verbs, lease to first result, cold, p50", Bound: 60, Unit: "ms", of: start("verbs", "cold")},
		{Section: "Starts", Line: "verbs, pooled, as a share of a process started for the call", Bound: 0.2, of: startShare("pooled")},
		{Section: "Starts", Line: "verbs, cached, as a share of a process started for the call", Bound: 0.2, of: startShare("cached")},
		{Section: "Starts", Line: "lease cycles of 8 clients, exact capacity at the end", Bound: 10_000, Least: true, figure: "leases.cycles"},
		{Section: "Starts", Line: "drain under load: how long after its grace the executor ended (negative: before that)", Bound: 0.5, Unit: "s", figure: "drain.after_grace_s"},
		{Section: "Executor", Line: "its own processor time while nothing happens", Bound: 1, Unit: "% of a core", figure: "executor.idle_cpu"},
		{Section: "Executor", Line: "the same for 1,000 leases whose workers are asleep", Bound: 3, Unit: "% of a core", figure: "executor.thousand_leases_cpu"},
		{Section: "Neighbour", Line: "a job that computes, workers on its CPUs: slowdown, p95, over that of the job alone once more", Bound: 1.01, of: slowdown("compute", "on the same CPUs", "alone once more")},
		{Section: "Neighbour", Line: "a job bound by memory bandwidth, workers on its CPUs: the same", Bound: 1.03, of: slowdown("bandwidth", "on the same CPUs", "alone once more")},
		{Section: "Neighbour", Line: "a job that computes, workers on other CPUs: slowdown, p95, over that beside an ordinary program", Bound: 1.01, of: slowdown("compute", "beside", "an ordinary program beside")},
		{Section: "Neighbour", Line: "a job bound by memory bandwidth, workers on other CPUs: the same", Bound: 1.03, of: slowdown("bandwidth", "beside", "an ordinary program beside")},
		{Section: "Neighbour", Line: "from when a job's thread wakes on a worker's CPU until it runs there, p99", Bound: 10, Unit: "ms", of: waking},
		{Section: "Neighbour", Line: "from the start of a job on the CPUs of a lease to the end of the lease (yield-after 500ms), longest", Bound: 1, Unit: "s", of: leaving("yield-after 500ms")},
		{Section: "Neighbour", Line: "from when a job has taken the node's memory to the end of the lease, longest", Bound: 1, Unit: "s", of: leaving("yield-memory")},
		{Section: "Resource manager", Line: "placement with 10,000 executors over placement with 10, p50", Bound: 1.5, of: placementGrowth},
		{Section: "Resource manager", Line: "placement while the manager is stopped, p99", Bound: 5, Unit: "ms", of: controlP("shm", "placement, 10000 executors, manager stopped", ms)},
		{Section: "Resource manager", Line: "shm, reading what a client needs to connect to an executor that it has never seen, manager stopped, p99", Bound: 0.01, Unit: "ms", of: controlP("shm", "look-up, manager stopped", ms)},
		{Section: "Resource manager", Line: "shm, time of the manager's list of 10 executors by message, as a multiple of such a look-up's", Bound: 4.4, Least: true, of: lookUpByMessage},
		{Section: "Resource manager", Line: "a change in 1,000 mailboxes, p99", Bound: 5, Unit: "ms", figure: "mailboxes.p99_ms"},
		{Section: "Resource manager", Line: "from a message to the manager to its change in 1,000 mailboxes, p99", Bound: 5, Unit: "ms", of: controlP("shm", "change told to 1000 subscribers", ms)},
		{Section: "Resource manager", Line: "charges of 4 processes while the manager is killed, exact", Bound: 10e6, Least: true, figure: "charges.exact"},
		{Section: "Resource manager", Line: "kills of the manager during these charges", Bound: 20, Least: true, figure: "charges.kills"},
		{Section: "Resource manager", Line: "charges of 50 executors during 3 kills of the manager, with 20 clients, exact", Bound: 10_000, Least: true, figure: "cluster.charges"},
		{Section: "Resource manager", Line: "time without the manager in which leases and charges go on, bills exact", Bound: 120, Least: true, Unit: "s", figure: "manager.away_s"},
		{Section: "Resource manager", Line: "time that charging every 10 ms adds to a call", Bound: 5, Unit: "ns", of: charging},
		{Section: "TCP", Line: "loopback, 8 B: ratio to bare sockets that spin", Bound: 1.10, figure: "tcp.ratio.8"},
		{Section: "TCP", Line: "loopback, 4 KiB: ratio to bare sockets that spin", Bound: 1.10, figure: "tcp.ratio.4096"},
		{Section: "TCP", Line: "loopback, 64 KiB: ratio to bare sockets that spin", Bound: 1.15, figure: "tcp.ratio.65536"},
		{Section: "TCP", Line: "loopback, 1 MiB: ratio to bare sockets that spin", Bound: 1.10, figure: "tcp.ratio.1048576"},
		{Section: "TCP", Line: "loopback, 8 B: ratio to bare sockets, both blocked", Bound: 1.10, figure: "tcp.blocked"},
		{Section: "TCP", Line: "loopback, 8 B, 64 in flight: share of the rate of bare sockets", Bound: 0.95, Least: true, figure: "tcp.in_flight"},
		{Section: "TCP", Line: "loopback, 8 B, 64 in flight, sent together", Bound: 1e6, Least: true, Unit: "per second", figure: "tcp.batched"},
		{Section: "TCP", Line: "connecting a queue pair", Bound: 0.5, Unit: "ms", figure: "tcp.connect_ms"},
		{Section: "TCP", Line: "loopback, 8 B, encrypted: ratio to not encrypted", Bound: 1.5, figure: "tcp.encrypted.8"},
		{Section: "TCP", Line: "ofi over libfabric's tcp, 8 B: ratio to bare sockets", Bound: 1.45, figure: "tcp.ofi.8"},
		{Section: "TCP", Line: "ofi over libfabric's tcp, 4 KiB: ratio to bare sockets", Bound: 1.45, figure: "tcp.ofi.4096"},
		{Section: "TCP", Line: "ofi over libfabric's tcp, 64 KiB: ratio to bare sockets", Bound: 1.45, figure: "tcp.ofi.65536"},
		{Section: "TCP", Line: "ofi over libfabric's tcp, 1 MiB: ratio to bare sockets", Bound: 1.45, figure: "tcp.ofi.1048576"},
		{Section: "Client library", Line: "tcp, 8 B, Go client: time of a unary gRPC call in Go over TCP, as a multiple of a call's", Bound: 8, Least: true, of: fasterThan("grpc-tcp")},
		{Section: "Client library", Line: "time that the C library adds to a call of the bare channel", Bound: 15, Unit: "ns", figure: "library.over_channel_ns"},
		{Section: "Client library", Line: "C library, 3 pieces of 21 KB: ratio to as many contiguous bytes", Bound: 1.1, figure: "library.pieces"},
		{Section: "Client library", Line: "shm, payload and result of 1 MiB in place: ratio to the copying call", Bound: 0.2, figure: "library.in_place"},
		{Section: "Client library", Line: "shm, a chain with 1 MiB between its functions, to two calls", Bound: 0.3, figure: "library.chain"},
		{Section: "Client library", Line: "rfaas_map, functions of 1 us: share of the ideal rate", Bound: 0.9, Least: true, figure: "map.1us"},
		{Section: "Client library", Line: "rfaas_map, functions of 100 us: share of the ideal rate", Bound: 0.9, Least: true, figure: "map.100us"},
		{Section: "Client library", Line: "shm, second lease, on a cached connection: request, grant and connecting, as a share of the first one's", Bound: 0.5, of: cachedControl("shm")},
		{Section: "Client library", Line: "verbs, second lease, on a cached connection: request, grant and connecting, as a share of the first one's", Bound: 0.5, of: cachedControl("verbs")},
		{Section: "Client library", Line: "the same from C, with the whole time until the lease is open", Bound: 0.5, figure: "cached.control_share"},
		{Section: "Client library", Line: "one of two executors killed: longest gap between results, including 50 ms for detection, p95", Bound: 100, Unit: "ms", figure: "failover.gap_p95_ms"},
		{Section: "Client library", Line: "executors killed in that test, all results right", Bound: 20, Least: true, figure: "failover.kills"},
		{Section: "Client library", Line: "shm, from the start of a program to its first result, an agent running, p50", Bound: 3, Unit: "ms", figure: "client.first_result_ms"},
		{Section: "Client library", Line: "a process's first contact with a running agent (rfaas_init and rfaas_session_open), p50", Bound: 1, Unit: "ms", figure: "client.first_contact_ms"},
		{Section: "Client library", Line: "shm, memory that a lease adds to a process, its channel included", Bound: 2<<10 + 768, Unit: "KiB", figure: "client.rss_kib.shm"},
		{Section: "Client library", Line: "tcp, memory that a lease adds to a process, its channel included", Bound: 2<<10 + 768, Unit: "KiB", figure: "client.rss_kib.tcp"},
		{Section: "Faults", Line: "agent killed: longest time until another agent holds the lease", Bound: 1000, Unit: "ms", figure: "agent.killed_gap_ms"},
		{Section: "Faults", Line: "client killed: time until its core is leased again, p95", Bound: 100, Unit: "ms", figure: "client.killed_free_p95_ms"},
		{Section: "Faults", Line: "random kills under load on shm, all calls right or a named error", Bound: 300, Least: true, figure: "kills"},
		{Section: "Faults", Line: "the longest wait of a client during these kills", Bound: 15, Unit: "s", figure: "kills.longest_wait_s"},
		{Section: "Faults", Line: "random kills under load on verbs, all calls right or a named error", Bound: 30, Least: true, figure: "vm.kills"},
		{Section: "Faults", Line: "calls with random cancels and deadlines, buffers intact", Bound: 1e6, Least: true, figure: "race.calls"},
		{Section: "Slurm", Line: "a job's extra wait because of executors, p95", Bound: 1.5, Unit: "s", figure: "slurm.extra_wait_p95_s"},
		{Section: "Slurm", Line: "from idle to a line on the board, p95", Bound: 3, Unit: "s", figure: "slurm.idle_to_board_p95_s"},
		{Section: "Slurm", Line: "a day of idle gaps replayed: share covered of gaps over a minute", Bound: 90, Least: true, Unit: "%", figure: "slurm.replay_covered"},
		{Section: "Slurm", Line: "a day of gaps of seconds replayed, executors stay on their nodes: share covered of gaps from 5 s", Bound: 90, Least: true, Unit: "%", figure: "slurm.replay_seconds_covered"},
		{Section: "Soak", Line: "random kills under load on shm, all calls right or a named error, in a longer run", Bound: 1000, Least: true, figure: "soak.kills", soak: true},
		{Section: "Soak", Line: "the longest wait of a client in the longer run", Bound: 15, Unit: "s", figure: "soak.kills.longest_wait_s", soak: true},
		{Section: "Soak", Line: "clients that race for ten workers by claims beside another tenant, no worker of two clients, bills exact", Bound: 1000, Least: true, figure: "soak.claims.clients", soak: true},
		{Section: "Soak", Line: "calls while their lease was evicted 40 times, bills exact", Bound: 100_000, Least: true, figure: "soak.evictions.calls", soak: true},
		{Section: "Soak", Line: "of these, calls that were lost", Bound: 0, figure: "soak.evictions.lost", soak: true},
		{Section: "Soak", Line: "from an eviction to the end of the executor, longest", Bound: 1, Unit: "s", figure: "soak.evictions.end_s", soak: true},
		{Section: "Soak", Line: "random kills between two nodes on tcp, all calls right or a named error", Bound: 200, Least: true, figure: "soak.nodes", soak: true},
		{Section: "Soak", Line: "link outages of 0.1 to 30 s during these kills", Bound: 100, Least: true, figure: "soak.nodes.flaps", soak: true},
		{Section: "Soak", Line: "the longest wait of a client between these nodes", Bound: 15, Unit: "s", figure: "soak.nodes.longest_wait_s", soak: true},
		{Section: "Soak", Line: "100 kills of the agent: longest time until another agent holds the lease", Bound: 1000, Unit: "ms", figure: "soak.agent.killed_gap_ms", soak: true},
		{Section: "Soak", Line: "100 kills of clients: time until the core is leased again, p95", Bound: 100, Unit: "ms", figure: "soak.client.killed_free_p95_ms", soak: true},
		{Section: "Soak", Line: "tests with a real Slurm cluster that did not pass", Bound: 0, of: notPassed("soak-slurm"), soak: true},
	}...)
}

// Judge compares the data with every promise. It leaves out those of `make soak` if that did not run.
func Judge(d *Data) []Verdict {
	var out []Verdict
	for _, p := range Promises() {
		if p.soak && !d.soaked() {
			continue
		}
		v := Verdict{Promise: p}
		if p.figure == "" {
			v.Value, v.Measured = p.of(d)
		} else if f := d.figure(p.figure); f != nil {
			v.Value, v.Measured, v.Failed = f.Value, true, f.Failed
		}
		v.Measured = v.Measured && !math.IsNaN(v.Value) && !math.IsInf(v.Value, 0)
		out = append(out, v)
	}
	return out
}

// sizes formats the bytes of a payload and of its result; 0: as many.
func sizes(payload, result int) string {
	if result > 0 {
		return fmt.Sprintf("%s there and %s back", size(payload), size(result))
	}
	return size(payload)
}

// size formats a number of bytes.
func size(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return strconv.Itoa(n>>20) + " MiB"
	case n >= 1<<10 && n%(1<<10) == 0:
		return strconv.Itoa(n>>10) + " KiB"
	}
	return strconv.Itoa(n) + " B"
}
