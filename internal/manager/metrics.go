package manager

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
)

// collector computes the manager's metrics when they are read. They name no tenant and no lease.
type collector struct{ m *Manager }

var (
	metricExecutors   = prometheus.NewDesc("rfaas_manager_executors", "Executors by state.", []string{"state"}, nil)
	metricCores       = prometheus.NewDesc("rfaas_manager_cores", "Cores that living executors lend.", nil, nil)
	metricFreeCores   = prometheus.NewDesc("rfaas_manager_free_cores", "Cores of living executors that no lease has.", nil, nil)
	metricMemory      = prometheus.NewDesc("rfaas_manager_memory_bytes", "Memory that living executors lend.", nil, nil)
	metricFreeMemory  = prometheus.NewDesc("rfaas_manager_free_memory_bytes", "Memory of living executors that no lease has.", nil, nil)
	metricLeases      = prometheus.NewDesc("rfaas_manager_leases", "Leases that hold cores, as executors count them.", nil, nil)
	metricOldest      = prometheus.NewDesc("rfaas_manager_oldest_line_seconds", "Age of the oldest last report among living executors.", nil, nil)
	metricChanges     = prometheus.NewDesc("rfaas_manager_changes_total", "Changes of executors that subscribers were notified of.", nil, nil)
	metricSubscribers = prometheus.NewDesc("rfaas_manager_subscribers", "Clients that are attached to the board.", nil, nil)
	metricAttempts    = prometheus.NewDesc("rfaas_manager_attach_attempts", "Attempts to connect to the manager's memory that run or wait.", nil, nil)
	metricBusy        = prometheus.NewDesc("rfaas_manager_attach_refused_total", "Attempts to connect to the manager's memory that were refused as busy.", nil, nil)
	metricData        = prometheus.NewDesc("rfaas_manager_data_refused_total", "Connections to the data address without a valid token; only with provider tcp.", nil, nil)
	metricForged      = prometheus.NewDesc("rfaas_manager_data_forged_total", "Connections to the manager's memory that ended because encrypted data was changed on its way, or forged; only with provider tcp.", nil, nil)
	metricLedger      = prometheus.NewDesc("rfaas_manager_ledger_ok", "1: charges are on disk, or kept in memory as configured; 0: the ledger does not accept them.", nil, nil)
	metricRefused     = prometheus.NewDesc("rfaas_manager_refused_charges_total", "Charges in executors' cells that the ledger refused, each counted once.", nil, nil)
	metricUnsettled   = prometheus.NewDesc("rfaas_manager_refused_settlements_total", "Messages with charges that the ledger refused.", nil, nil)
	metricRefusedNode = prometheus.NewDesc("rfaas_manager_refused_node_calls_total", "Refused calls of node certificates: the address is not in the certificate, another owner has registered the executor, or the quota is used up.", []string{"reason"}, nil)
	metricCoreSeconds = prometheus.NewDesc("rfaas_manager_core_seconds_total", "Core-seconds since the start, by state: harvested by leases, idle, or batch, which means that no executor offered them.", []string{"state"}, nil)
	metricCalls       = prometheus.NewDesc("rfaas_manager_calls_total", "Calls that the ledger has booked since the start.", nil, nil)
	metricCallsFailed = prometheus.NewDesc("rfaas_manager_call_failures_total", "Of these, calls that failed.", nil, nil)
	metricStarts      = prometheus.NewDesc("rfaas_manager_worker_starts_total", "Worker starts that executors have reported since the start, by path.", []string{"path"}, nil)
	metricEnded       = prometheus.NewDesc("rfaas_manager_leases_ended_total", "Ended leases that executors have reported since the start, by how they ended.", []string{"how"}, nil)
	metricLedgerBytes = prometheus.NewDesc("rfaas_manager_ledger_bytes", "Size of the ledger's file.", nil, nil)
)

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{metricExecutors, metricCores, metricFreeCores, metricMemory, metricFreeMemory, metricLeases, metricOldest,
		metricChanges, metricSubscribers, metricAttempts, metricBusy, metricLedger, metricRefused, metricUnsettled, metricRefusedNode, metricLedgerBytes, metricCoreSeconds, metricCalls, metricCallsFailed, metricStarts, metricEnded, metricData, metricForged} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	states := map[string]int{"open": 0, "cordoned": 0, "draining": 0, "silent": 0}
	var cores, free, leases uint32
	var memory, freeMemory, oldest uint64
	for _, e := range c.m.executorStates() {
		if states[e.State]++; e.State == "silent" {
			continue
		}
		cores, free, leases = cores+e.Cores, free+e.FreeCores, leases+e.Leases
		memory, freeMemory, oldest = memory+e.MemoryBytes, freeMemory+e.FreeMemoryBytes, max(oldest, e.AgeMS)
	}
	for state, n := range states {
		gauge(metricExecutors, float64(n), state)
	}
	gauge(metricCores, float64(cores))
	gauge(metricFreeCores, float64(free))
	gauge(metricMemory, float64(memory))
	gauge(metricFreeMemory, float64(freeMemory))
	gauge(metricLeases, float64(leases))
	gauge(metricOldest, (time.Duration(oldest) * time.Millisecond).Seconds())
	out <- prometheus.MustNewConstMetric(metricChanges, prometheus.CounterValue, float64(c.m.notifier.changes()))
	gauge(metricSubscribers, float64(c.m.notifier.count()))
	gauge(metricAttempts, float64(c.m.attach.clients.attempts()+c.m.attach.executors.attempts()))
	out <- prometheus.MustNewConstMetric(metricBusy, prometheus.CounterValue, float64(c.m.attach.refused.Load()))
	ok := 1.0
	if c.m.accounts.failing() != nil {
		ok = 0
	}
	gauge(metricLedger, ok)
	out <- prometheus.MustNewConstMetric(metricRefused, prometheus.CounterValue, float64(c.m.accounts.refusedCharges()))
	out <- prometheus.MustNewConstMetric(metricUnsettled, prometheus.CounterValue, float64(c.m.accounts.unsettled.Load()))
	for why := range numRefusals {
		out <- prometheus.MustNewConstMetric(metricRefusedNode, prometheus.CounterValue, float64(c.m.refusals[why].Load()), refusalNames[why])
	}
	gauge(metricLedgerBytes, float64(c.m.accounts.ledger.Size()))
	c.collectHistory(out)
	if tcp := c.m.memory.tcp; tcp != nil {
		out <- prometheus.MustNewConstMetric(metricData, prometheus.CounterValue, float64(tcp.data.Refused()))
		out <- prometheus.MustNewConstMetric(metricForged, prometheus.CounterValue, float64(tcp.device.Forged()))
	}
}

// collectHistory sends the totals of the history.
func (c *collector) collectHistory(out chan<- prometheus.Metric) {
	counter := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, value, labels...)
	}
	h := c.m.history.Total()
	counter(metricCoreSeconds, float64(h.Harvested)/1e6, "harvested")
	counter(metricCoreSeconds, float64(h.Idle)/1e6, "idle")
	counter(metricCoreSeconds, float64(h.Batch)/1e6, "batch")
	counter(metricCalls, float64(h.Use[accounting.Calls]))
	counter(metricCallsFailed, float64(h.Use[accounting.Failures]))
	for i, name := range board.StartNames {
		counter(metricStarts, float64(h.Stats.Starts[i].Count), name)
	}
	for i, name := range board.EndNames {
		counter(metricEnded, float64(h.Stats.Ended[i]), name)
	}
}
