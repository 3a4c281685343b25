package manager

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"embed"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/observe"
)

//go:embed page
var page embed.FS

// An answer may be as old as stateEvery, or as stateShare times the time that it took to make, which grows with the
// ledger. So many viewers cost no more than one, which uses at most a tenth of a processor.
const (
	stateEvery = 500 * time.Millisecond
	stateShare = 10
)

// State is the content of /api/v1/state. Numbers that may exceed 2^53 are strings.
type State struct {
	NowMS       int64           `json:"now_ms"`
	Executors   []ExecutorState `json:"executors"`
	Leases      []LeaseState    `json:"leases"`
	Tenants     []TenantState   `json:"tenants"`
	Bills       []BillState     `json:"bills"`
	Currency    string          `json:"currency"`
	Subscribers int             `json:"subscribers"`
	Trouble     string          `json:"trouble"` // with the accounts; empty: none

	unconfirmed error // why there are no bills; nil: there are
}

// ExecutorState is the content of an executor's line.
type ExecutorState struct {
	Address         string   `json:"address"`
	Node            string   `json:"node"`
	State           string   `json:"state"` // open, cordoned, draining, silent
	Cores           uint32   `json:"cores"`
	FreeCores       uint32   `json:"free_cores"`
	MemoryBytes     uint64   `json:"memory_bytes"`
	FreeMemoryBytes uint64   `json:"free_memory_bytes"`
	Leases          uint32   `json:"leases"`
	Providers       []string `json:"providers"`
	AgeMS           uint64   `json:"age_ms"`
	Until           uint64   `json:"available_until"`    // Unix seconds, 0: not known
	Slowdown        float64  `json:"neighbour_slowdown"` // 1.01 if other programs of the node need 1 % more time beside the workers; 0: not measured
}

// LeaseState is a running lease, from its cell.
type LeaseState struct {
	Lease       string  `json:"lease"`
	Tenant      string  `json:"tenant"`
	Node        string  `json:"node"`
	BeganMS     int64   `json:"began_ms"`
	CoreSeconds float64 `json:"core_seconds"`
	GiBSeconds  float64 `json:"gib_seconds"`
	Calls       string  `json:"calls"`
	BytesIn     string  `json:"bytes_in"`
	BytesOut    string  `json:"bytes_out"`
	Failures    string  `json:"failures"`
}

// TenantState is the current use of a tenant.
type TenantState struct {
	Tenant        string `json:"tenant"`
	Leases        int    `json:"leases"`
	Limited       bool   `json:"limited"`
	LimitCores    uint64 `json:"limit_cores"`
	ReservedCores uint64 `json:"reserved_cores"`
}

// BillState is a bill, in the format of `rfaas bill --json`.
type BillState struct {
	Tenant string           `json:"tenant"`
	Amount string           `json:"amount"`
	Lines  []BillStateEntry `json:"lines"`
}

// BillStateEntry is a line of a bill.
type BillStateEntry struct {
	Item     string `json:"item"`
	Units    string `json:"units"`
	Quantity string `json:"quantity"`
	Price    string `json:"price"`
	Amount   string `json:"amount"`
}

func (m *Manager) executorStates() []ExecutorState {
	out := []ExecutorState{}
	for _, e := range m.table.list() {
		i := e.GetInfo()
		state := "open"
		switch {
		case !e.GetAlive():
			state = "silent"
		case i.GetCordoned():
			state = "cordoned"
		case i.GetDraining():
			state = "draining"
		}
		out = append(out, ExecutorState{Address: e.GetAddress(), Node: i.GetNode(), State: state, Cores: i.GetCores(), FreeCores: i.GetFreeCores(),
			MemoryBytes: i.GetMemoryBytes(), FreeMemoryBytes: i.GetFreeMemoryBytes(), Leases: i.GetLeases(),
			Providers: append([]string{}, i.GetProviders()...), AgeMS: e.GetAgeMs(), Until: i.GetAvailableUntil(), Slowdown: float64(i.GetNeighbourSlowdown()) / 1000})
	}
	return out
}

// leaseStates returns the running leases, from cells and from messages.
func (m *Manager) leaseStates() []LeaseState {
	out := []LeaseState{}
	for _, e := range m.accounts.running(m.table.attachments(true)) {
		text := func(c accounting.Counter) string { return strconv.FormatUint(e.Use[c], 10) }
		out = append(out, LeaseState{Lease: strconv.FormatUint(e.Lease, 10), Tenant: e.Tenant, Node: e.Node, BeganMS: e.Began.UnixMilli(),
			CoreSeconds: float64(e.Use[accounting.CoreMicros]) / 1e6, GiBSeconds: float64(e.Use[accounting.MemoryMiBMillis]) / 1024 / 1e3,
			Calls: text(accounting.Calls), BytesIn: text(accounting.BytesIn), BytesOut: text(accounting.BytesOut), Failures: text(accounting.Failures)})
	}
	slices.SortFunc(out, func(a, b LeaseState) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.BeganMS, b.BeganMS), cmp.Compare(a.Lease, b.Lease))
	})
	return out
}

func (m *Manager) tenantStates(leases []LeaseState) []TenantState {
	all := map[string]TenantState{}
	for _, l := range leases {
		t := all[l.Tenant]
		t.Leases++
		all[l.Tenant] = t
	}
	for tenant, lim := range m.limits.use() {
		t := all[tenant]
		t.Limited, t.LimitCores, t.ReservedCores = true, lim.Cores, lim.Reserved()
		all[tenant] = t
	}
	out := []TenantState{}
	for tenant, t := range all {
		t.Tenant = tenant
		out = append(out, t)
	}
	slices.SortFunc(out, func(a, b TenantState) int { return cmp.Compare(a.Tenant, b.Tenant) })
	return out
}

// bills returns the bills of all tenants from the beginning, as of the last harvest.
func (m *Manager) bills() ([]BillState, error) {
	totals, err := m.accounts.ledger.Totals("", time.Time{})
	if err != nil {
		return nil, err
	}
	out := []BillState{}
	for _, b := range accounting.Bills(&m.accounts.tariff, totals, time.Time{}) {
		s := BillState{Tenant: b.Tenant, Amount: b.Amount, Lines: []BillStateEntry{}}
		for _, l := range b.Lines {
			s.Lines = append(s.Lines, BillStateEntry{l.Item, l.Units, l.Quantity, l.Price, l.Amount})
		}
		out = append(out, s)
	}
	return out, nil
}

func (m *Manager) state() (*State, error) {
	s := &State{NowMS: m.cfg.Now().UnixMilli(), Executors: m.executorStates(), Leases: m.leaseStates(), Currency: m.accounts.tariff.Currency,
		Subscribers: m.notifier.count(), Trouble: m.accounts.state()}
	s.Tenants = m.tenantStates(s.Leases)
	var err error
	s.Bills, err = m.bills()
	if s.unconfirmed = m.unconfirmed(); s.unconfirmed != nil {
		s.Bills, s.Trouble = []BillState{}, s.unconfirmed.Error()
	}
	return s, err
}

// Observe adds the page, the API and the metrics to an HTTP server, all read-only. Data of tenants is shown only for
// requests that mayAll accepts.
func (m *Manager) Observe(s *observe.Server, mayAll func(*http.Request) bool) {
	s.Metrics.MustRegister(&collector{m})
	s.Check("ledger", m.accounts.failing)
	now := cached(m.state)
	m.observeHistory(s, mayAll)
	for name, part := range map[string]func(*State) any{
		"state":     func(s *State) any { return s },
		"executors": func(s *State) any { return s.Executors },
		"leases":    func(s *State) any { return s.Leases },
		"tenants":   func(s *State) any { return s.Tenants },
		"bills":     func(s *State) any { return s.Bills },
	} {
		s.Mux.HandleFunc("GET /api/v1/"+name, func(w http.ResponseWriter, r *http.Request) {
			secured(w)
			if name != "executors" && !mayAll(r) {
				unauthorized(w)
				return
			}
			state, err := now()
			if err == nil && name == "bills" {
				err = state.unconfirmed
			}
			if err != nil {
				http.Error(w, control.Text(err), http.StatusServiceUnavailable)
				return
			}
			writeJSON(w, part(state))
		})
	}
	files := http.FileServerFS(page)
	s.Mux.HandleFunc("GET /page/", func(w http.ResponseWriter, r *http.Request) {
		secured(w)
		files.ServeHTTP(w, r)
	})
	s.Mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		secured(w)
		http.ServeFileFS(w, r, page, "page/index.html")
	})
}

// unauthorized answers a request for data of tenants that has no valid token.
func unauthorized(w http.ResponseWriter) {
	w.Header().Set("WWW-Authenticate", `Bearer realm="rfaas"`)
	http.Error(w, "this is data of tenants: send the token of the resource manager's http-token-file (Authorization: Bearer TOKEN)", http.StatusUnauthorized)
}

// secured sets headers that forbid browsers what the page does not need: other origins, frames, inline code.
func secured(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
}

// pageCertificate returns the certificate of the HTTPS page: the one in the settings, else the identity directory's
// page certificate, else the node's own; nil: there is none.
func pageCertificate(s *config.Manager, node *identity.Node, log *slog.Logger) (func() *tls.Certificate, error) {
	if s.HTTPCert != "" {
		pair, err := identity.OpenKeyPair(s.HTTPCert, s.HTTPKey, nil, log, time.Now())
		if err != nil {
			return nil, fmt.Errorf("http-cert: %w", err)
		}
		return func() *tls.Certificate { return pair.Certificate(time.Now()) }, nil
	}
	if node == nil {
		return nil, nil
	}
	if s.HTTPListen != "" && node.Files(time.Now()).Page == nil {
		log.Warn("browsers cannot open the HTTPS page, because the identity directory has only an Ed25519 certificate: make the directory again with rfaas cluster node, or set http-cert")
	}
	return func() *tls.Certificate {
		f := node.Files(time.Now())
		if f.Page != nil {
			return f.Page
		}
		return &f.Certificate
	}, nil
}

// openHTTP starts the HTTP port if address is set. A unix socket, which only this user can reach, shows everything.
// Other addresses show data of tenants only with the token, which is created if it does not exist. Addresses that are
// not loopback use HTTPS if there is a certificate, loopback addresses only if always is set. Close the server before
// the manager.
func (m *Manager) openHTTP(address, tokenFile string, certificate func() *tls.Certificate, always bool) (*observe.Server, error) {
	mayAll := func(*http.Request) bool { return true }
	var secure *tls.Config
	a, err := control.ParseAddress(address)
	if err == nil && a.Network != "unix" {
		token, err := control.EnsureSecret(tokenFile)
		if err != nil {
			return nil, fmt.Errorf("http token: %w", err)
		}
		mayAll = bearer(token)
		if certificate != nil && (always || !a.Local()) {
			secure = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate(), nil }}
		}
	}
	s, err := observe.Open(address, secure, m.log)
	if err != nil {
		return nil, err
	}
	m.Observe(s, mayAll)
	s.Serve()
	if s.Address != "" {
		m.log.Info("http", "address", s.Address, "https", secure != nil, "token", tokenFile)
	}
	return s, nil
}

// bearer returns a function that reports whether a request has the token. It compares in constant time.
func bearer(token control.Secret) func(*http.Request) bool {
	want := sha256.Sum256([]byte(token.Hex()))
	return func(r *http.Request) bool {
		sent, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		got := sha256.Sum256([]byte(sent))
		return ok && subtle.ConstantTimeCompare(got[:], want[:]) == 1
	}
}

func closeHTTP(s *observe.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), control.CloseTimeout)
	defer cancel()
	s.Close(ctx)
}
