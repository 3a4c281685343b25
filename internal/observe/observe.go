package observe

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/quota"
)

// maxConnections is the largest number of connections.
const maxConnections = 256

// ErrStarting is the reason for which a server is not ready before SetReady.
var ErrStarting = errors.New("starting")

// Server is a daemon's HTTP port: Open binds it, Serve serves it, Close ends it. It is safe for concurrent use.
type Server struct {
	// Metrics are shown by /metrics. They include those of the process.
	Metrics *prometheus.Registry
	// Mux takes additional handlers, which must be added before Serve.
	Mux *http.ServeMux
	// Address is the bound address with its real port; empty: no address was given.
	Address string

	bound    net.Listener // what listener wraps; nil: no address was given
	listener net.Listener
	http     *http.Server
	failed   chan error

	mu       sync.Mutex
	notReady error
	checks   []check
	required []check
}

type check struct {
	name string
	f    func() error
}

// Open binds address, "host:port" or "unix:PATH" (mode 0600). With an empty address it returns a server that listens
// nowhere, so that callers need no special case. If tlsConfig is not nil, the server uses HTTPS. Requests are answered
// after Serve.
func Open(address string, tlsConfig *tls.Config, log *slog.Logger) (*Server, error) {
	if address == "" {
		return newServer(nil, nil, log), nil
	}
	l, err := control.Listen(address, true)
	if err != nil {
		return nil, fmt.Errorf("http: %w", err)
	}
	return newServer(l, tlsConfig, log), nil
}

// Inherit is Open for a descriptor from Leave, which it takes over. 0: there is none.
func Inherit(fd int, log *slog.Logger) (*Server, error) {
	if fd == 0 {
		return newServer(nil, nil, log), nil
	}
	l, err := control.Inherit(fd)
	if err != nil {
		return nil, fmt.Errorf("http: %w", err)
	}
	return newServer(l, nil, log), nil
}

// Leave accepts no more connections and returns the listener's descriptor, for a program that takes over this process; 0: no
// address was given.
func (s *Server) Leave() (fd int, err error) {
	if s.bound == nil {
		return 0, nil
	}
	return control.Leave(s.bound)
}

// newServer returns a server. A nil listener listens nowhere.
func newServer(l net.Listener, tlsConfig *tls.Config, log *slog.Logger) *Server {
	s := &Server{Metrics: prometheus.NewRegistry(), Mux: http.NewServeMux(), failed: make(chan error, 1), notReady: ErrStarting}
	s.Metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s.Mux.Handle("GET /metrics", promhttp.HandlerFor(s.Metrics, promhttp.HandlerOpts{Registry: s.Metrics,
		MaxRequestsInFlight: 4, Timeout: 10 * time.Second}))
	s.Mux.HandleFunc("GET /healthz", s.healthz)
	s.Mux.HandleFunc("GET /readyz", s.readyz)
	if l == nil {
		return s
	}
	s.bound = l
	s.Address, s.listener = control.ListenerAddress(l), &crowd{Listener: l, most: maxConnections}
	if tlsConfig != nil {
		s.listener = tls.NewListener(s.listener, tlsConfig)
	}
	s.http = &http.Server{Handler: s.Mux, ConnState: connState, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second,
		WriteTimeout: time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)} // errors of clients are not errors of the daemon
	return s
}

// CountRefusals registers metrics of a daemon's gate: refused calls and connections by reason, requests beyond a
// tenant's limit by kind, and dropped audit lines. A nil gate counts nothing.
func CountRefusals(r prometheus.Registerer, gate *control.Gate) {
	for _, kind := range quota.Kinds() {
		r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "rfaas_quota_refused_total",
			Help: "Requests, connections and log lines beyond a tenant's limit, by kind.", ConstLabels: prometheus.Labels{"kind": string(kind)}},
			func() float64 {
				if gate == nil {
					return 0
				}
				return float64(gate.RefusedByQuota(kind))
			}))
	}
	for _, role := range []identity.Role{identity.RoleTenant, identity.RoleOperator} {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "rfaas_token_expiry_timestamp_seconds",
			Help:        "When the first of the tokens expires that callers used lately, by role, in seconds since 1970; 0: none was used.",
			ConstLabels: prometheus.Labels{"role": role.String()}}, func() float64 {
			if gate != nil {
				if ends := gate.TokenExpiry(role); !ends.IsZero() {
					return float64(ends.Unix())
				}
			}
			return 0
		}))
	}
	r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "rfaas_audit_dropped_total",
		Help: "Audit lines that were dropped, because too many were waiting to be written."},
		func() float64 { return float64(gate.Audit().Dropped()) }))
	for _, reason := range identity.Reasons() {
		r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "rfaas_credentials_refused_total",
			Help: "Calls and connections that were refused, by reason.", ConstLabels: prometheus.Labels{"reason": string(reason)}},
			func() float64 {
				if gate == nil {
					return 0
				}
				return float64(gate.RefusedFor(reason))
			}))
	}
}

// ShowBuild registers a metric with the daemon's version.
func ShowBuild(r prometheus.Registerer, version string) {
	r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "rfaas_build_info", Help: "1. The labels have the daemon's version and that of Go.",
		ConstLabels: prometheus.Labels{"version": version, "go_version": runtime.Version()}}, func() float64 { return 1 }))
}

// WatchIdentity registers metrics for the expiry of a daemon's certificates and for its revocation list. It makes the
// daemon not ready when it cannot authenticate itself or check others. node may be nil.
func WatchIdentity(s *Server, node *identity.Node) {
	if node == nil {
		return
	}
	gauge := func(name, help string, labels prometheus.Labels, value func() float64) {
		s.Metrics.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, value))
	}
	for _, name := range []string{"node", "ca", "page"} {
		gauge("rfaas_certificate_expiry_timestamp_seconds", "When a certificate of the identity directory expires, in seconds since 1970; 0: no such certificate.",
			prometheus.Labels{"certificate": name}, func() float64 {
				if ends := node.Ends(time.Now())[name]; !ends.IsZero() {
					return float64(ends.Unix())
				}
				return 0
			})
	}
	gauge("rfaas_revocation_list_serial", "Serial number of the revocation list in use; 0: there is no valid list, so all tokens and node certificates are refused.",
		nil, func() float64 { return float64(node.Revoked.Serial(time.Now())) })
	s.Require("identity", func() error { return node.Trouble(time.Now()) })
}

// CountRenewals registers the metric of a daemon's renewals of its certificate.
func CountRenewals(r prometheus.Registerer, counts func() (done, failed uint64)) {
	for _, result := range []string{"renewed", "failed"} {
		r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "rfaas_certificate_renewals_total",
			Help:        "Renewals of the node's certificate at the issuer, and failed attempts. An attempt also gets the list of revoked credentials.",
			ConstLabels: prometheus.Labels{"result": result}}, func() float64 {
			done, failed := counts()
			if result == "failed" {
				return float64(failed)
			}
			return float64(done)
		}))
	}
}

// Serve starts to answer requests and does not block. Failed receives an error if the server ends by itself.
func (s *Server) Serve() {
	if s.listener == nil {
		return
	}
	go func() {
		if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			s.failed <- err
		}
	}()
}

// Failed returns a channel that receives the reason if the server ends before Close.
func (s *Server) Failed() <-chan error { return s.failed }

// Close lets running answers finish until ctx ends, then aborts them.
func (s *Server) Close(ctx context.Context) {
	if s.listener == nil {
		return
	}
	if s.http.Shutdown(ctx) != nil {
		s.http.Close()
	}
	s.listener.Close() // if it was never served
}

// SetReady sets whether the daemon accepts work: nil, or the reason why not, which /readyz shows.
func (s *Server) SetReady(reason error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notReady = reason
}

// Check adds a check to /healthz. f returns what is wrong. It must be fast and safe for concurrent use.
func (s *Server) Check(name string, f func() error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checks = append(s.checks, check{name, f})
}

// Require adds a check to /readyz for conditions that prevent work and that a restart does not fix. /healthz shows the
// error too, but with status 200. f is as for Check.
func (s *Server) Require(name string, f func() error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.required = append(s.required, check{name, f})
}

// failing runs checks and returns their errors.
func failing(checks []check) (wrong []string) {
	for _, c := range checks {
		if err := c.f(); err != nil {
			wrong = append(wrong, c.name+": "+err.Error())
		}
	}
	return wrong
}

// healthz answers 200 if no check fails. A draining daemon is healthy.
func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	checks, required := slices.Clone(s.checks), slices.Clone(s.required)
	s.mu.Unlock()
	answer(w, failing(checks), failing(required))
}

// readyz answers 200 if the daemon accepts work.
func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	reason, required := s.notReady, slices.Clone(s.required)
	s.mu.Unlock()
	wrong := failing(required)
	if reason != nil {
		wrong = append(wrong, reason.Error())
	}
	answer(w, wrong, nil)
}

// answer writes 503 with the errors in wrong, or 200 with the notes in known.
func answer(w http.ResponseWriter, wrong, known []string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	if len(wrong) == 0 {
		io.WriteString(w, "ok\n")
		for _, line := range known {
			fmt.Fprintln(w, line)
		}
		return
	}
	w.WriteHeader(http.StatusServiceUnavailable)
	for _, line := range wrong {
		fmt.Fprintln(w, line)
	}
}
