package issuer

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// Config describes a Server.
type Config struct {
	Cluster   *identity.Cluster
	Hosts     []string         // names and addresses at which nodes and users reach the service
	Reserved  []string         // further ones that no node may choose
	NodeLife  time.Duration    // of certificates
	Tenants   identity.Tenants // of users who ask by MUNGE; nil: the service answers no users
	TokenLife time.Duration    // of their tokens
	Munge     Munge
	Audit     *identity.Audit // nil: no audit
	Log       *slog.Logger
	Now       func() time.Time // nil: time.Now
}

const (
	certificateLife = 24 * time.Hour // of the service's own certificate, which is made anew after half of it
	connectionLife  = 20 * time.Second
	headerLife      = 5 * time.Second
	requestLife     = 15 * time.Second // also of the work for a request
	atOnce          = 64               // requests of nodes that are worked on at a time
	usersAtOnce     = 8                // likewise of users; each one runs unmunge
	pruneEvery      = 24 * time.Hour
)

// Server is the service. NewServer makes it.
type Server struct {
	cfg     Config
	http    http.Server
	callers limits            // nodes and users, by requests
	tokens  limits            // users, by tokens
	errors  limits            // kinds of requests, by errors in the log
	bad     limits            // addresses, by refused requests without a certificate
	waiting [64]chan struct{} // addresses that have used up their rate in bad wait here, by their hash
	seed    maphash.Seed      // secret seed of that hash, so that nobody can choose an address that waits behind a given one

	mu     sync.Mutex
	own    *tls.Certificate
	renews time.Time
}

// NewServer returns a server. Serve starts it.
func NewServer(cfg Config) (*Server, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{cfg: cfg, seed: maphash.MakeSeed()}
	for i := range s.waiting {
		s.waiting[i] = make(chan struct{}, 1)
	}
	nodes, users := make(chan struct{}, atOnce), make(chan struct{}, usersAtOnce)
	if _, err := s.certificate(); err != nil {
		return nil, fmt.Errorf("issuer: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+pathEnrol, s.answer(nodes, s.enrol))
	mux.HandleFunc("POST "+pathRenew, s.answer(nodes, s.renew))
	mux.HandleFunc("GET "+pathRevoked, s.answer(nodes, s.revoked))
	mux.HandleFunc("POST "+pathToken, s.answer(users, s.token))
	mux.HandleFunc("POST "+pathRevoke, s.answer(users, s.revoke))
	pool := x509.NewCertPool()
	pool.AddCert(cfg.Cluster.CA())
	mux.HandleFunc("/", s.answer(nodes, func(r *http.Request, _ []byte) (any, string, error) { return nil, "", errNoSuch }))
	s.http = http.Server{Handler: mux, ReadHeaderTimeout: headerLife, ReadTimeout: requestLife, WriteTimeout: connectionLife, MaxHeaderBytes: 8 << 10,
		ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug), TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS13, ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: pool, SessionTicketsDisabled: true,
			NextProtos:     []string{"http/1.1"},
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.certificate() }}}
	s.http.SetKeepAlivesEnabled(false) // one request a connection
	return s, nil
}

// certificate returns the service's certificate, and makes another one in time.
func (s *Server) certificate() (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.cfg.Now()
	if s.own == nil || now.After(s.renews) || now.Before(s.renews.Add(-certificateLife)) {
		made, err := s.cfg.Cluster.IssuerCertificate(s.cfg.Hosts, certificateLife, now)
		if err != nil {
			return nil, err
		}
		s.own, s.renews = made, now.Add(certificateLife/2)
	}
	return s.own, nil
}

// Serve answers requests on l until ctx ends. It closes l.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), control.CloseTimeout)
		defer cancel()
		if s.http.Shutdown(ctx) != nil {
			s.http.Close()
		}
	})
	go s.prune(ctx)
	err := s.http.ServeTLS(control.Bound(l, connectionLife), "", "")
	if !stop() {
		<-done
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// prune forgets tokens and certificates that expired long ago.
func (s *Server) prune(ctx context.Context) {
	tick := time.NewTicker(pruneEvery)
	defer tick.Stop()
	for {
		if err := s.cfg.Cluster.Prune(s.cfg.Now()); err != nil {
			s.cfg.Log.Error("cannot remove expired entries from the lists of nodes and tokens", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// unavailable is an error of the service whose text the caller may see. The texts of other such errors stay in the log.
type unavailable struct{ error }

// errBusy means that other requests left no time for this one.
var errBusy = unavailable{errors.New("the issuer is busy: try again later")}

// errNoSuch is the answer to requests that the service does not know.
var errNoSuch = &identity.Error{Reason: identity.Malformed, Text: "the issuer has no such request"}

// errCut means that a request did not arrive completely: it took too long, or its connection ended.
var errCut = errors.New("the request is incomplete")

// answer returns the handler of a request: f gets the body and returns the reply, and for the audit log the caller's name as far as it is known.
// It runs while it is in working.
func (s *Server) answer(working chan struct{}, f func(r *http.Request, body []byte) (reply any, who string, err error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), requestLife)
		defer cancel()
		reply, who, err := s.work(r.WithContext(ctx), working, f)
		w.Header().Set("Content-Type", "application/json")
		if err != nil {
			reply = s.refused(w, r, who, err)
		}
		if err := json.NewEncoder(w).Encode(reply); err != nil {
			s.cfg.Log.Debug("reply", "error", err)
		}
	}
}

// work answers a request when there is room in working. A request that is still being received takes no room, and a caller that has gone gets no answer.
func (s *Server) work(r *http.Request, working chan struct{}, f func(*http.Request, []byte) (any, string, error)) (reply any, who string, err error) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxRequest+1))
	if err != nil {
		return nil, "", errCut
	}
	at := hostOf(r.RemoteAddr)
	spent := func() bool { return len(r.TLS.VerifiedChains) == 0 && s.bad.spent(at, s.cfg.Now()) }
	for turn := (chan struct{})(nil); ; {
		if turn == nil && spent() {
			turn = s.waiting[maphash.String(s.seed, at)%uint64(len(s.waiting))]
			select {
			case turn <- struct{}{}:
				defer func() { <-turn }()
			case <-r.Context().Done():
				return nil, "", errBusy
			}
		}
		select {
		case working <- struct{}{}:
		case <-r.Context().Done():
			return nil, "", errBusy
		}
		if turn == nil && spent() { // others of the address were refused meanwhile
			<-working
			continue
		}
		defer func() { <-working }()
		if r.Context().Err() != nil {
			return nil, "", errBusy
		}
		return f(r, body)
	}
}

// refused logs a refused request and sets the status. It returns the reply.
func (s *Server) refused(w http.ResponseWriter, r *http.Request, who string, err error) failure {
	var e *identity.Error
	refusal := errors.As(err, &e)
	if (refusal || errors.Is(err, errCut)) && len(r.TLS.VerifiedChains) == 0 {
		s.bad.take(hostOf(r.RemoteAddr), rate.Every(badEvery), badBurst, s.cfg.Now())
	}
	if errors.Is(err, errCut) || r.Context().Err() != nil { // the caller has gone
		w.WriteHeader(http.StatusRequestTimeout)
		return failure{Error: err.Error()}
	}
	if !refusal {
		level := slog.LevelDebug
		if s.errors.take(r.URL.Path, rate.Every(time.Minute), 10, s.cfg.Now()) { // so that callers do not fill the log
			level = slog.LevelError
		}
		s.cfg.Log.Log(r.Context(), level, "cannot answer a request", "request", r.URL.Path, "remote", r.RemoteAddr, "who", who, "error", err)
		w.WriteHeader(http.StatusServiceUnavailable)
		if public := (unavailable{}); errors.As(err, &public) {
			return failure{Error: public.Error()}
		}
		return failure{Error: "the request failed: the issuer's log says why"}
	}
	if e == errNoSuch {
		s.cfg.Audit.Refused(e, "/", r.RemoteAddr, who, s.cfg.Now()) // not the path, which the caller has chosen
		w.WriteHeader(http.StatusNotFound)
		return failure{e.Reason, e.Text}
	}
	s.cfg.Audit.Refused(e, r.URL.Path, r.RemoteAddr, who, s.cfg.Now())
	status := map[identity.Reason]int{identity.Malformed: http.StatusBadRequest, identity.Forbidden: http.StatusForbidden, identity.Overload: http.StatusTooManyRequests}
	w.WriteHeader(cmp.Or(status[e.Reason], http.StatusUnauthorized))
	return failure{e.Reason, e.Text}
}

func malformed(err error) error {
	return &identity.Error{Reason: identity.Malformed, Text: "the request: " + err.Error()}
}

// enrol gives a certificate to a node that has a code.
func (s *Server) enrol(r *http.Request, body []byte) (any, string, error) {
	var q enrolRequest
	if err := parse(bytes.NewReader(body), maxRequest, &q); err != nil {
		return nil, "", malformed(err)
	}
	reply, err := s.cfg.Cluster.Enrol(q.Secret, &q.NodeRequest, append(slices.Clone(s.cfg.Hosts), s.cfg.Reserved...), s.cfg.NodeLife, s.cfg.Now())
	if err != nil {
		return nil, "", err
	}
	return reply, "", s.gave(r, identity.AuditEnrol, reply)
}

// renew gives a new certificate to a node that has one.
func (s *Server) renew(r *http.Request, body []byte) (any, string, error) {
	cert, who, err := s.node(r)
	if err != nil {
		return nil, who, err
	}
	var q identity.NodeRequest
	if err := parse(bytes.NewReader(body), maxRequest, &q); err != nil {
		return nil, who, malformed(err)
	}
	every := renewRate(min(s.cfg.NodeLife, cert.NotAfter.Sub(cert.NotBefore)))
	if !s.callers.take(who, rate.Every(every), renewBurst, s.cfg.Now()) {
		return nil, who, &identity.Error{Reason: identity.Overload, Text: fmt.Sprintf("more than %d renewals of this node: try again in %v", renewBurst, every)}
	}
	reply, err := s.cfg.Cluster.Renew(cert, &q, s.cfg.NodeLife, s.cfg.Now())
	if err != nil {
		return nil, who, err
	}
	return reply, who, s.gave(r, identity.AuditRenew, reply)
}

// gave writes the audit line of a new certificate.
func (s *Server) gave(r *http.Request, event string, reply *identity.NodeReply) error {
	cert, err := identity.ParseCertificate([]byte(reply.Certificate))
	if err != nil {
		return err
	}
	id := identity.NodeIdentity(cert)
	s.cfg.Audit.Write(identity.AuditEntry{Event: event, Who: id.Name, Remote: r.RemoteAddr,
		Detail: fmt.Sprintf("certificate %s for %q until %s", identity.NodeSerial(cert), id.Hosts, cert.NotAfter.UTC().Format(time.RFC3339))})
	return nil
}

// node returns the certificate of the node that asks.
func (s *Server) node(r *http.Request) (*x509.Certificate, string, error) {
	if len(r.TLS.VerifiedChains) == 0 {
		return nil, "", &identity.Error{Reason: identity.Missing, Text: "the request needs the certificate of a node"}
	}
	cert := r.TLS.PeerCertificates[0]
	return cert, identity.NodeIdentity(cert).Name, s.cfg.Cluster.CheckNode(cert, s.cfg.Now())
}

// revokedReply has the signed list of revoked credentials; empty: the caller's is as new.
type revokedReply struct {
	List string `json:"list"`
}

// revoked gives the list to a node.
func (s *Server) revoked(r *http.Request, _ []byte) (any, string, error) {
	_, who, err := s.node(r)
	if err != nil {
		return nil, who, err
	}
	serial, err := strconv.ParseUint(r.URL.Query().Get(serialQuery), 10, 64)
	if err != nil {
		return nil, who, malformed(fmt.Errorf("%s: %w", serialQuery, err))
	}
	text, err := s.cfg.Cluster.NewerRevocations(serial)
	return revokedReply{string(text)}, who, err
}

// An address may cause badBurst refusals at once, and then one every badEvery. Beyond that, the issuer works on its requests one at
// a time, except requests of nodes with a certificate. It does not refuse them, because several users can share an address.
const (
	badBurst = 100
	badEvery = time.Second
)

// hostOf returns the part of a remote address that counts as one caller: the IP address or, of IPv6, its network of 64 bits.
func hostOf(remote string) string {
	at, err := netip.ParseAddrPort(remote)
	if err != nil {
		return ""
	}
	ip := at.Addr().Unmap().WithZone("")
	if ip.Is4() {
		return ip.String()
	}
	net, err := ip.Prefix(64)
	if err != nil {
		return ""
	}
	return net.String()
}

// A node may renew renewBurst times at once. After that it may renew once per renewEvery, or once per 1/renewShare of the life of its certificate if that is
// shorter. A daemon renews at most three times in the life of a certificate, and two daemons can share a directory.
const (
	renewBurst = 5
	renewEvery = time.Hour
	renewShare = 6
)

// renewRate returns the least time between renewals of a node, after the burst, for certificates of this life.
func renewRate(life time.Duration) time.Duration { return min(renewEvery, life/renewShare) }
