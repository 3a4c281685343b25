package agent

import (
	"cmp"
	"encoding/json"
	"os"
	"slices"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
)

// Status describes an agent.
type Status struct {
	Version   string         `json:"version"`
	PID       int            `json:"pid"`
	UptimeMS  int64          `json:"uptime_ms"`
	Protocol  int            `json:"protocol"`
	Clients   []ClientStatus `json:"clients"`
	Executors int            `json:"executors"` // to which it is connected
	Board     bool           `json:"board"`     // a resource manager's board is attached
	BoardBy   string         `json:"board_by"`  // the provider by which it is attached
	Cached    int            `json:"cached"`    // leases whose workers are cached
	Leases    []CachedStatus `json:"cached_leases"`
	Held      int            `json:"held_descriptors"` // of cached leases that any process can take
	Served    uint64         `json:"served"`           // operations so far
	Tokens    []TokenStatus  `json:"tokens"`           // of the open sessions
}

// ClientStatus describes one process.
type ClientStatus struct {
	PID      int `json:"pid"`
	Sessions int `json:"sessions"`
	Leases   int `json:"leases"`
}

// CachedStatus describes a lease whose workers are cached.
type CachedStatus struct {
	Executor string `json:"executor"`
	Node     string `json:"node"`
	Library  string `json:"library"`
	SHA256   string `json:"sha256"`
	Workers  int    `json:"workers"`
	Shared   bool   `json:"shared"`   // any process can take it
	Orphaned bool   `json:"orphaned"` // the session that released it was closed
	Spare    bool   `json:"spare"`    // started ahead of demand: no lease has used its workers yet
}

func (c *client) status(r *request) (body, error) {
	if len(r.body) > 0 {
		return nil, &protocol.Error{Op: r.Op, Text: "it has a body"}
	}
	text, err := json.Marshal(c.a.status())
	if err != nil {
		return nil, err
	}
	return func(b []byte) []byte { return protocol.EncodeReport(b, text) }, nil
}

func (a *Agent) status() Status {
	n := a.pool.Connections()
	s := Status{Version: a.cfg.Version, PID: os.Getpid(), UptimeMS: time.Since(a.began).Milliseconds(), Protocol: protocol.Version,
		Clients: []ClientStatus{}, Leases: []CachedStatus{}, Executors: n.Executors, Board: n.Board != "", BoardBy: n.Board, Served: a.served.Load(), Tokens: a.tokens(time.Now())}
	for _, k := range a.pool.Cached() {
		s.Leases = append(s.Leases, CachedStatus{k.Executor, k.Node, k.Library, k.SHA256, k.Workers, k.Handed, k.Orphaned, k.Spare})
	}
	s.Cached, s.Held = len(s.Leases), int(a.held.Load())
	a.mu.Lock()
	defer a.mu.Unlock()
	for c := range a.clients {
		c.mu.Lock()
		if c.page != nil {
			s.Clients = append(s.Clients, ClientStatus{c.pid, len(c.sessions), len(c.leases)})
		}
		c.mu.Unlock()
	}
	slices.SortFunc(s.Clients, func(x, y ClientStatus) int { return cmp.Compare(x.PID, y.PID) })
	return s
}
