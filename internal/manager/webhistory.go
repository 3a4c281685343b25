package manager

import (
	"cmp"
	"encoding/json"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/history"
	"github.com/rfaas-go/rfaas/internal/observe"
)

// HistoryState is the content of /api/v1/history. Cores are averages of the time for which the resource manager ran.
type HistoryState struct {
	NowMS   int64                 `json:"now_ms"`
	FromMS  int64                 `json:"from_ms"`
	StepMS  int64                 `json:"step_ms"`
	Steps   []StepState           `json:"steps"` // the oldest first. Steps for which no resource manager ran are missing
	Starts  map[string]StartState `json:"starts"`
	Tenants []TenantUseState      `json:"tenants,omitempty"` // the largest use first
	Total   StepState             `json:"total"`
}

// StepState is a step of a history.
type StepState struct {
	StartMS      int64             `json:"start_ms"`
	Seconds      float64           `json:"seconds"` // for which the resource manager ran
	Harvested    float64           `json:"harvested"`
	Idle         float64           `json:"idle"`
	Batch        float64           `json:"batch"`
	Calls        uint64            `json:"calls"`
	Failures     uint64            `json:"failures"`
	CallSeconds  float64           `json:"call_seconds"`
	Starts       map[string]uint64 `json:"starts"`
	Ended        map[string]uint64 `json:"ended"`
	Deaths       uint64            `json:"deaths"`
	FailedStarts uint64            `json:"failed_starts"`
}

// StartState has the worker starts of one path. Times are in seconds.
type StartState struct {
	Count  uint64  `json:"count"`
	Mean   float64 `json:"mean"`
	Median float64 `json:"median"`
	P95    float64 `json:"p95"`
}

// TenantUseState is the use of a tenant in a history.
type TenantUseState struct {
	Tenant      string  `json:"tenant"` // empty: further tenants
	CoreSeconds float64 `json:"core_seconds"`
	Calls       uint64  `json:"calls"`
	Failures    uint64  `json:"failures"`
}

// NodeState is the content of /api/v1/nodes/NAME.
type NodeState struct {
	Node    string       `json:"node"`
	Minutes []StepMinute `json:"minutes"`
}

// StepMinute is a minute of a node.
type StepMinute struct {
	StartMS   int64   `json:"start_ms"`
	Seconds   float64 `json:"seconds"`
	Harvested float64 `json:"harvested"`
	Idle      float64 `json:"idle"`
	Calls     uint64  `json:"calls"`
	Failures  uint64  `json:"failures"`
	Starts    uint64  `json:"starts"`
	Ended     uint64  `json:"ended"`
}

// KnownState is a node that had an executor within the last week.
type KnownState struct {
	Node   string `json:"node"`
	Cores  uint32 `json:"cores"`
	SeenMS int64  `json:"seen_ms"`
}

// spans are the values of the parameter span: a tier and a length.
var spans = map[string]struct {
	tier   int
	length time.Duration
}{
	"hour": {0, time.Hour},
	"day":  {1, 24 * time.Hour},
	"week": {2, 7 * 24 * time.Hour},
	"year": {3, 366 * 24 * time.Hour},
}

// average returns core microseconds as cores.
func average(us, watched uint64) float64 {
	if watched == 0 {
		return 0
	}
	return float64(us) / float64(watched)
}

func stepState(b *history.Bucket) StepState {
	s := StepState{StartMS: b.Start.UnixMilli(), Seconds: float64(b.Watched) / 1e6, Harvested: average(b.Harvested, b.Watched),
		Idle: average(b.Idle, b.Watched), Batch: average(b.Batch, b.Watched), Calls: b.Use[accounting.Calls], Failures: b.Use[accounting.Failures],
		CallSeconds: float64(b.Use[accounting.ExecMicros]) / 1e6, Starts: map[string]uint64{}, Ended: map[string]uint64{},
		Deaths: b.Stats.Deaths, FailedStarts: b.Stats.FailedStarts}
	for i, name := range board.StartNames {
		s.Starts[name] = b.Stats.Starts[i].Count
	}
	for i, name := range board.EndNames {
		s.Ended[name] = b.Stats.Ended[i]
	}
	return s
}

func (m *Manager) historyState(span string) *HistoryState {
	now := m.cfg.Now()
	tier, length := spans[span].tier, spans[span].length
	h := &HistoryState{NowMS: now.UnixMilli(), FromMS: now.Add(-length).UnixMilli(), StepMS: history.Tiers[tier].Width.Milliseconds(),
		Steps: []StepState{}, Starts: map[string]StartState{}, Tenants: []TenantUseState{}}
	var sum history.Bucket
	list := m.history.Since(tier, now.Add(-length))
	for i := range list {
		h.Steps = append(h.Steps, stepState(&list[i]))
		sum.Add(&list[i])
	}
	h.Total = stepState(&sum)
	h.Total.StartMS = h.FromMS
	for i, name := range board.StartNames {
		c := &sum.Stats.Starts[i]
		s := StartState{Count: c.Count, Median: c.Quantile(0.5).Seconds(), P95: c.Quantile(0.95).Seconds()}
		if c.Count > 0 {
			s.Mean = float64(c.Nanos) / float64(c.Count) / 1e9
		}
		h.Starts[name] = s
	}
	for tenant, u := range sum.Tenants {
		h.Tenants = append(h.Tenants, TenantUseState{tenant, float64(u[accounting.CoreMicros]) / 1e6, u[accounting.Calls], u[accounting.Failures]})
	}
	slices.SortFunc(h.Tenants, func(a, b TenantUseState) int {
		return cmp.Or(cmp.Compare(b.CoreSeconds, a.CoreSeconds), cmp.Compare(a.Tenant, b.Tenant))
	})
	return h
}

// cached returns a function that calls f at most so often that many viewers cost no more than one: see stateEvery.
func cached[T any](f func() (T, error)) func() (T, error) {
	var mu sync.Mutex
	var last T
	var at time.Time
	var took time.Duration
	return func() (T, error) {
		mu.Lock()
		defer mu.Unlock()
		if at.IsZero() || time.Since(at) >= max(stateEvery, stateShare*took) {
			began := time.Now()
			fresh, err := f()
			if err != nil {
				return fresh, err
			}
			last, at = fresh, time.Now()
			took = at.Sub(began)
		}
		return last, nil
	}
}

// writeJSON answers with a value. An error means that the client has gone.
func writeJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(value)
}

// observeHistory adds the history to the API. Without the token it names no tenant, and has no history of a node.
func (m *Manager) observeHistory(s *observe.Server, mayAll func(*http.Request) bool) {
	states := map[string]func() (*HistoryState, error){}
	for span := range spans {
		states[span] = cached(func() (*HistoryState, error) { return m.historyState(span), nil })
	}
	s.Mux.HandleFunc("GET /api/v1/history", func(w http.ResponseWriter, r *http.Request) {
		secured(w)
		get := states[cmp.Or(r.URL.Query().Get("span"), "hour")]
		if get == nil {
			http.Error(w, "span: want hour, day, week or year", http.StatusBadRequest)
			return
		}
		h, _ := get() // never fails
		if !mayAll(r) {
			public := *h
			public.Tenants = nil
			h = &public
		}
		writeJSON(w, h)
	})
	nodes := cached(func() ([]KnownState, error) {
		all := []KnownState{}
		for _, n := range m.history.Nodes() {
			all = append(all, KnownState{n.Node, n.Cores, n.Seen.UnixMilli()})
		}
		return all, nil
	})
	s.Mux.HandleFunc("GET /api/v1/nodes", func(w http.ResponseWriter, _ *http.Request) {
		secured(w)
		all, _ := nodes() // never fails
		writeJSON(w, all)
	})
	s.Mux.HandleFunc("GET /api/v1/nodes/{node}", func(w http.ResponseWriter, r *http.Request) {
		secured(w)
		if !mayAll(r) { // a node may serve one tenant, whose use its calls then are
			unauthorized(w)
			return
		}
		n := NodeState{Node: r.PathValue("node"), Minutes: []StepMinute{}}
		for _, x := range m.history.Node(n.Node) {
			n.Minutes = append(n.Minutes, StepMinute{StartMS: x.Start.UnixMilli(), Seconds: float64(x.Watched) / 1e6, Harvested: average(x.Harvested, x.Watched),
				Idle: average(x.Idle, x.Watched), Calls: x.Calls, Failures: x.Failures, Starts: x.Starts, Ended: x.Ended})
		}
		writeJSON(w, n)
	})
}
