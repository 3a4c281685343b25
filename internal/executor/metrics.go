package executor

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/observe"
	"github.com/rfaas-go/rfaas/internal/systemd"
	"github.com/rfaas-go/rfaas/lease"
)

// metrics counts what happens to leases and workers. None has a label that grows: no tenant, no lease.
type metrics struct {
	starts  *prometheus.CounterVec   // path
	seconds *prometheus.HistogramVec // path
	failed  prometheus.Counter
	died    prometheus.Counter
	ended   *prometheus.CounterVec // how
	uploads *prometheus.CounterVec // known
	claims  prometheus.Counter
	yielded prometheus.Counter
	// memoryShort counts how often the node's memory became short, memoryYielded the leases that ended because of it.
	memoryShort, memoryYielded prometheus.Counter
	seeds                      *prometheus.CounterVec // result
	fetched                    prometheus.Counter     // bytes
	neighbourWait              prometheus.Histogram

	mu    sync.Mutex
	count board.Stats // for the manager
}

func newMetrics() *metrics {
	m := &metrics{
		starts: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "rfaas_executor_worker_starts_total",
			Help: "Workers given to leases, by how they started: cold, seeded, pooled or cached."}, []string{"path"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "rfaas_executor_worker_start_seconds",
			Help:    "What starting a worker took, from the request to its being connected with its code loaded, by path.",
			Buckets: prometheus.ExponentialBuckets(50e-6, 2, 16)}, []string{"path"}),
		failed: prometheus.NewCounter(prometheus.CounterOpts{Name: "rfaas_executor_worker_start_failures_total",
			Help: "Workers that did not start."}),
		died: prometheus.NewCounter(prometheus.CounterOpts{Name: "rfaas_executor_worker_deaths_total",
			Help: "Workers that ended by themselves while their lease went on."}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "rfaas_executor_leases_ended_total",
			Help: "Leases that ended, by how: released, expired, revoked or drained."}, []string{"how"}),
		uploads: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "rfaas_executor_uploads_total",
			Help: "Libraries that were uploaded, by whether the node knew them already."}, []string{"known"}),
		claims: prometheus.NewCounter(prometheus.CounterOpts{Name: "rfaas_executor_claims_total",
			Help: "Leases that took cached or spare workers by a claim."}),
		yielded: prometheus.NewCounter(prometheus.CounterOpts{Name: "rfaas_executor_leases_yielded_total",
			Help: "Leases that ended because other programs of the node used one of their cores (yield-after)."}),
		memoryShort: prometheus.NewCounter(prometheus.CounterOpts{Name: "rfaas_executor_memory_short_total",
			Help: "How often the node's memory became short, so that none was lent for a time (yield-memory)."}),
		memoryYielded: prometheus.NewCounter(prometheus.CounterOpts{Name: "rfaas_executor_leases_yielded_memory_total",
			Help: "Leases that ended because other programs of the node needed memory (yield-memory)."}),
		neighbourWait: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "rfaas_executor_neighbour_wait_seconds",
			Help:    "How long a thread of normal priority waited for its CPU when it woke on a core that is lent (yield-after).",
			Buckets: prometheus.ExponentialBuckets(10e-6, 4, 8)}),
		fetched: prometheus.NewCounter(prometheus.CounterOpts{Name: "rfaas_executor_fetched_bytes_total",
			Help: "Bytes of tables, bundles and seeds that were read from the memory of clients and other executors."}),
		seeds: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "rfaas_executor_seeds_total",
			Help: "Init calls that were made for a seed: made, refused because their state cannot be kept, or failed."}, []string{"result"}),
	}
	// All series are there from the start, so that a rate has no gap before the first event.
	for _, path := range board.StartNames {
		m.starts.WithLabelValues(path)
		m.seconds.WithLabelValues(path)
	}
	for _, how := range []lease.State{lease.Released, lease.Expired, lease.Revoked, lease.Drained} {
		m.ended.WithLabelValues(how.String())
	}
	for _, result := range []string{seedMade, seedRefused, seedFailed} {
		m.seeds.WithLabelValues(result)
	}
	for _, known := range []string{"false", "true"} {
		m.uploads.WithLabelValues(known)
	}
	return m
}

// pathOf is a start path as a label.
func pathOf(p control.StartPath) string {
	return strings.ToLower(strings.TrimPrefix(p.String(), "START_PATH_"))
}

// started notes a worker that a lease got.
func (m *metrics) started(g *control.WorkerGrant) {
	path, s := pathOf(g.GetStart()), g.GetSteps()
	took := time.Duration(s.GetFork() + s.GetConnect() + s.GetCode())
	m.starts.WithLabelValues(path).Inc()
	m.seconds.WithLabelValues(path).Observe(took.Seconds())
	if i := slices.Index(board.StartNames[:], path); i >= 0 {
		m.counted(func(c *board.Stats) { c.Starts[i].Add(took) })
	}
}

// startFailed notes a worker that did not start.
func (m *metrics) startFailed() {
	m.failed.Inc()
	m.counted(func(c *board.Stats) { c.FailedStarts++ })
}

// workerDied notes a worker that ended by itself.
func (m *metrics) workerDied() {
	m.died.Inc()
	m.counted(func(c *board.Stats) { c.Deaths++ })
}

// leaseEnded notes how a lease ended.
func (m *metrics) leaseEnded(how lease.State) {
	m.ended.WithLabelValues(how.String()).Inc()
	if i := slices.Index(board.EndNames[:], how.String()); i >= 0 {
		m.counted(func(c *board.Stats) { c.Ended[i]++ })
	}
}

func (m *metrics) counted(f func(*board.Stats)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f(&m.count)
}

// stats returns what has been counted.
func (m *metrics) stats() board.Stats {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.count
}

func (m *metrics) uploaded(known bool) {
	label := "false"
	if known {
		label = "true"
	}
	m.uploads.WithLabelValues(label).Inc()
}

// show adds the executor's metrics to what is shown.
func (e *Executor) show(r prometheus.Registerer) {
	m := e.metrics
	r.MustRegister(m.starts, m.seconds, m.failed, m.died, m.ended, m.uploads, m.claims, m.yielded, m.memoryShort, m.memoryYielded, m.seeds, m.fetched, m.neighbourWait)
	gauge := func(name, help string, f func() float64) {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "rfaas_executor_" + name, Help: help}, f))
	}
	gauge("cores", "Physical cores that are lent.", func() float64 { return float64(e.table.Capacity().Cores) })
	gauge("free_cores", "Of these, free ones.", func() float64 { return float64(e.table.Capacity().FreeCores) })
	gauge("memory_bytes", "Memory that is lent.", func() float64 { return float64(e.table.Capacity().Memory) })
	gauge("free_memory_bytes", "Of this, free.", func() float64 { return float64(e.table.Capacity().FreeMemory) })
	gauge("leases", "Leases that have resources.", func() float64 { return float64(e.table.Capacity().Leases) })
	gauge("neighbour_slowdown_ratio", "Time of a fixed piece of work beside the workers, over its time while no worker runs (yield-after). 0: not measured.",
		func() float64 { return float64(e.slowdown.Load()) / 1000 })
	gauge("cached_leases", "Cached leases and spare leases.", func() float64 { return float64(e.table.Capacity().Cached) })
	gauge("waiting_workers", "Workers that were started in advance and wait for a lease.", func() float64 { return float64(e.cfg.Spawner.Waiting()) })
	gauge("code_bytes", "Memory that uploaded libraries take.", func() float64 { return float64(e.codes.bytes()) })
	gauge("table_bytes", "Lent memory that tables, bundles, seeds and loans of seeds use.", func() float64 { return float64(e.table.Capacity().SetAside) })
	r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "rfaas_executor_table_received_bytes_total",
		Help: "Bytes of tables and bundles that clients have sent. They send each one to a node once."}, func() float64 { return float64(e.tables.received.Load()) }))
	for name, c := range map[string]accounting.Counter{"calls": accounting.Calls, "call_failures": accounting.Failures, "call_seconds": accounting.ExecMicros} {
		help := map[accounting.Counter]string{accounting.Calls: "Calls of the leases that the resource manager is told of, as workers count them.",
			accounting.Failures: "Of these, calls that failed.", accounting.ExecMicros: "Processor time of their functions. Divided by the calls it is the mean processor time of a call."}[c]
		r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "rfaas_executor_" + name + "_total", Help: help}, func() float64 {
			n := float64(e.accounts.sum(c))
			if c == accounting.ExecMicros {
				n /= 1e6
			}
			return n
		}))
	}
	r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "rfaas_executor_call_elapsed_seconds_total",
		Help: "Time that these calls spent in functions by the clock, sampled 20 times a second. Divided by the calls it is the mean time of a call on its worker."},
		func() float64 { return e.accounts.callTime().Seconds() }))
	gauge("draining", "1 while it drains.", func() float64 {
		if e.isDraining() {
			return 1
		}
		return 0
	})
	observe.CountRefusals(r, e.gate)
	if e.cfg.Data != nil {
		r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "rfaas_executor_data_refused_total",
			Help: "Connections to the data address without a valid worker token."}, func() float64 { return float64(e.cfg.Data.Refused()) }))
	}
}

// bytes returns the memory of all libraries, including those that are being uploaded.
func (s *codeStore) bytes() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}

// unready makes /readyz report that the executor accepts no more work, and notifies systemd. A failed notification is only logged.
func (e *Executor) unready(web *observe.Server, reason string) {
	web.SetReady(errors.New("draining: " + reason))
	if err := systemd.Notify("STOPPING=1"); err != nil {
		e.log.Debug("cannot notify systemd", "error", err)
	}
}

// ready makes /readyz report that the executor accepts work, and notifies systemd.
func (e *Executor) ready(web *observe.Server) {
	web.SetReady(nil)
	if err := systemd.Notify("READY=1"); err != nil {
		e.log.Warn("cannot notify systemd", "error", err)
	}
}

func closeWeb(web *observe.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), control.CloseTimeout)
	defer cancel()
	web.Close(ctx)
}
