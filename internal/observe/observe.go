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
	"os"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// maxConnections bounds how many are served at a time; more wait.
const maxConnections = 64

// ErrStarting is why a server is not ready before SetReady was called.
var ErrStarting = errors.New("starting")

// Server is a daemon's HTTP port: bound by Open, served by Serve, ended by Close. Safe for concurrent use.
type Server struct {
	// Metrics is what /metrics shows. The process's own are in it already.
	Metrics *prometheus.Registry
	// Mux is for more handlers, to be added before Serve.
	Mux *http.ServeMux
	// Address is the bound one, with its real port; empty: none was asked for.
	Address string

	listener net.Listener
	http     *http.Server
	failed   chan error

	mu       sync.Mutex
	notReady error
	checks   []check
}

type check struct {
	name string
	f    func() error
}

// Open binds address, "host:port" or "unix:PATH" (mode 0600). An empty address gives a server that nobody can ask, so that callers
// need not tell. tlsConfig, unless nil, makes it HTTPS. Nobody is answered before Serve.
func Open(address string, tlsConfig *tls.Config, log *slog.Logger) (*Server, error) {
	s := &Server{Metrics: prometheus.NewRegistry(), Mux: http.NewServeMux(), failed: make(chan error, 1), notReady: ErrStarting}
	s.Metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s.Mux.Handle("GET /metrics", promhttp.HandlerFor(s.Metrics, promhttp.HandlerOpts{Registry: s.Metrics,
		MaxRequestsInFlight: 4, Timeout: 10 * time.Second}))
	s.Mux.HandleFunc("GET /healthz", s.healthz)
	s.Mux.HandleFunc("GET /readyz", s.readyz)
	if address == "" {
		return s, nil
	}
	l, err := control.Listen(address, true)
	if err != nil {
		return nil, fmt.Errorf("http: %w", err)
	}
	s.Address, s.listener = control.ListenerAddress(l), netutil.LimitListener(l, maxConnections)
	if tlsConfig != nil {
		s.listener = tls.NewListener(s.listener, tlsConfig)
	}
	s.http = &http.Server{Handler: s.Mux, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second,
		WriteTimeout: time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)} // what strangers do wrong is their business
	return s, nil
}

// CountRefusals shows how often a daemon's gate has refused a call or a connection, by reason, and how many audit lines were
// dropped. nil has refused nothing.
func CountRefusals(r prometheus.Registerer, gate *control.Gate) {
	r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "rfaas_audit_dropped_total",
		Help: "Audit lines that were dropped, since more waited to be written than there is room for."},
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

// Serve begins to answer. Failed receives if the server ends by itself.
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

// Failed receives why the server ended before Close.
func (s *Server) Failed() <-chan error { return s.failed }

// Close lets running answers finish until ctx ends, then breaks them.
func (s *Server) Close(ctx context.Context) {
	if s.listener == nil {
		return
	}
	if s.http.Shutdown(ctx) != nil {
		s.http.Close()
	}
	s.listener.Close() // if it was never served
}

// SetReady says whether the daemon takes work: nil, or why not, in words that /readyz shows.
func (s *Server) SetReady(reason error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notReady = reason
}

// Check adds a check to /healthz: f returns what is wrong, soon, and may be called at any time from any goroutine.
func (s *Server) Check(name string, f func() error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checks = append(s.checks, check{name, f})
}

// healthz is 200 if no check finds anything wrong. A daemon that drains is healthy.
func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	checks := slices.Clone(s.checks)
	s.mu.Unlock()
	var wrong []string
	for _, c := range checks {
		if err := c.f(); err != nil {
			wrong = append(wrong, c.name+": "+err.Error())
		}
	}
	answer(w, wrong)
}

// readyz is 200 if the daemon takes work.
func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	reason := s.notReady
	s.mu.Unlock()
	if reason != nil {
		answer(w, []string{reason.Error()})
		return
	}
	answer(w, nil)
}

func answer(w http.ResponseWriter, wrong []string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	if len(wrong) == 0 {
		io.WriteString(w, "ok\n")
		return
	}
	w.WriteHeader(http.StatusServiceUnavailable)
	for _, line := range wrong {
		fmt.Fprintln(w, line)
	}
}

// Notify tells systemd what the daemon does, as sd_notify(3) has it ("READY=1", "STOPPING=1"). Without $NOTIFY_SOCKET nothing.
func Notify(state string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if path[0] == '@' {
		path = "\x00" + path[1:]
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(state)); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return nil
}
