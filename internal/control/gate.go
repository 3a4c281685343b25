package control

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/quota"
)

// header returns the metadata key for a credential of a scheme.
func header(scheme string) string { return "rfaas-" + scheme }

// Gate admits calls whose caller is authenticated and may make them. It counts and audits the refused ones.
type Gate struct {
	verifiers []identity.Verifier // in order of preference
	audit     *identity.Audit
	now       func() time.Time
	owner     uint32 // user that started the daemon; the daemon may run as another user now
	refused   map[identity.Reason]*atomic.Uint64
	tenants   *quota.Tenants
	expiries  map[identity.Role]*expiries // of tokens
}

// NewGate returns a gate. If a call has several credentials, the first verifier that knows one of them decides. The
// caller closes audit.
func NewGate(audit *identity.Audit, limits quota.Limits, verifiers ...identity.Verifier) *Gate {
	g := &Gate{verifiers: verifiers, audit: audit, now: now, owner: uint32(os.Geteuid()), refused: map[identity.Reason]*atomic.Uint64{}, tenants: quota.New(limits, now),
		expiries: map[identity.Role]*expiries{identity.RoleTenant: {}, identity.RoleOperator: {}}}
	for _, r := range identity.Reasons() {
		g.refused[r] = new(atomic.Uint64)
	}
	return g
}

// Refused returns how many calls and connections were refused.
func (g *Gate) Refused() (n uint64) {
	for _, c := range g.refused {
		n += c.Load()
	}
	return n
}

// RefusedFor returns how many calls and connections were refused for a reason.
func (g *Gate) RefusedFor(r identity.Reason) uint64 { return g.refused[r].Load() }

// RefusedByQuota returns how often a limit of a tenant was reached.
func (g *Gate) RefusedByQuota(k quota.Kind) uint64 { return g.tenants.Refused(k) }

// Take uses n units of a rate limit of the caller's tenant. The error is of class busy. Operators and nodes have no
// limits, and a nil gate has none for any caller.
func (g *Gate) Take(ctx context.Context, k quota.Kind, n int) error {
	who := Caller(ctx)
	if g == nil || who.Role != identity.RoleTenant {
		return nil
	}
	if err := g.tenants.Take(who.Tenant, k, n); err != nil {
		return Errorf(ClassBusy, "%v", err)
	}
	return nil
}

// MayLog reports whether one more line about a tenant's leases may be logged.
func (g *Gate) MayLog(tenant string) bool {
	return g == nil || g.tenants.Take(tenant, quota.LogLines, 1) == nil
}

// Audit returns the daemon's audit log. A nil audit writes nothing.
func (g *Gate) Audit() *identity.Audit {
	if g == nil {
		return nil
	}
	return g.audit
}

type callerKey struct{}

// Caller returns the caller of the call with ctx. Outside of a call through a gate it returns an identity without any
// rights.
func Caller(ctx context.Context) *identity.Identity {
	if id, ok := ctx.Value(callerKey{}).(*identity.Identity); ok {
		return id
	}
	return &identity.Identity{}
}

// WithCaller returns a context with a caller, for calls that do not come through a gate.
func WithCaller(ctx context.Context, id *identity.Identity) context.Context {
	return context.WithValue(ctx, callerKey{}, id)
}

// Refuse counts and audits that the caller of ctx may not make a call, and returns the error to send.
func (g *Gate) Refuse(ctx context.Context, method, format string, args ...any) error {
	e := &identity.Error{Reason: identity.Forbidden, Text: fmt.Sprintf(format, args...)}
	return g.refuse(e, method, Remote(ctx), Caller(ctx).Name)
}

// otherMethod stands for every method that no service here has. The caller chooses such a name, so each call could have a
// new one.
const otherMethod = "unknown"

func (g *Gate) refuse(e *identity.Error, method, remote, who string) error {
	if _, known := roles[method]; !known && strings.HasPrefix(method, "/") {
		method = otherMethod
	}
	g.refused[e.Reason].Add(1)
	g.audit.Refused(e, method, remote, who, g.now())
	switch e.Reason {
	case identity.Forbidden:
		return CodeErrorf(ClassInvalid, codes.PermissionDenied, "%s", e.Text)
	case identity.Overload:
		return Errorf(ClassBusy, "%s", e.Text)
	}
	if e.Reason == identity.Wrong && strings.HasPrefix(e.Text, "wrong "+identity.SchemeSecret) { // the audit record has only e.Text
		return Errorf(ClassCredential, "%s%s", e.Text, wrongHint)
	}
	return Errorf(ClassCredential, "%s", e.Text)
}

// refuseConnection counts and audits a connection that failed before its first call.
func (g *Gate) refuseConnection(remote string, err error) {
	e := &identity.Error{Reason: identity.Wrong, Text: "TLS: " + err.Error()}
	var invalid x509.CertificateInvalidError
	if errors.As(err, &invalid) && invalid.Reason == x509.Expired { // crypto/x509 also uses Expired for a certificate that is not valid yet
		e.Reason = identity.Expired
	}
	g.refused[e.Reason].Add(1)
	g.audit.Refused(e, "", remote, "", g.now())
}

func linkOf(ctx context.Context) *link {
	if p, ok := peer.FromContext(ctx); ok {
		if l, ok := p.AuthInfo.(*link); ok {
			return l
		}
	}
	return nil
}

// Remote returns the address from which the call with ctx was made; empty outside of a call.
func Remote(ctx context.Context) string {
	if l := linkOf(ctx); l != nil {
		return l.channel.Remote
	}
	return ""
}

// check authenticates and authorizes a call. It returns a context with the caller.
func (g *Gate) check(ctx context.Context, method string) (context.Context, error) {
	id, err := g.identify(ctx)
	if err != nil {
		e, ok := err.(*identity.Error) //nolint:errorlint // verifiers return it unwrapped
		if !ok {
			e = &identity.Error{Reason: identity.Wrong, Text: err.Error()}
		}
		return nil, g.refuse(e, method, Remote(ctx), "")
	}
	if e := g.expiries[id.Role]; e != nil && !id.Expires.IsZero() {
		e.used(id.Expires, g.now())
	}
	ctx = WithCaller(ctx, &id)
	need := needed(method)
	if id.Role < need || id.Role == identity.RoleNode && !forNodes[method] {
		return nil, g.Refuse(ctx, method, "%.100s needs the role %s, but %s has the role %s", method, need, id.Name, id.Role)
	}
	if need == identity.RoleOperator {
		g.audit.Did(method, Remote(ctx), id.Name)
	}
	return ctx, nil
}

// identify returns the caller. The first verifier that has a credential in the headers decides.
func (g *Gate) identify(ctx context.Context) (identity.Identity, error) {
	l := linkOf(ctx)
	if l == nil {
		return identity.Identity{}, missing("the call has no connection information")
	}
	if l.plain {
		return identity.Identity{}, &identity.Error{Reason: identity.Plaintext, Text: "the call came from another node without TLS, " +
			"which this daemon requires (set " + identity.TokenFileEnv + " or " + identity.CAFileEnv + ", and not --allow-plaintext)"}
	}
	md, _ := metadata.FromIncomingContext(ctx)
	for _, v := range g.verifiers {
		sent := md.Get(header(v.Scheme()))
		if len(sent) == 0 {
			continue
		}
		if len(sent) != 1 {
			return identity.Identity{}, &identity.Error{Reason: identity.Malformed, Text: fmt.Sprintf("%s: the call has %d of these credentials, want one", v.Scheme(), len(sent))}
		}
		return l.identify(v, sent[0], g.now())
	}
	if id := l.channel.Node; id != nil {
		return *id, l.node.Standing(id, g.now())
	}
	if uid := l.channel.PeerUID; uid != nil && (*uid == g.owner || *uid == 0) {
		return identity.Identity{By: "unix", Name: fmt.Sprintf("uid %d by unix socket", *uid), Role: identity.RoleOperator}, nil
	}
	return identity.Identity{}, missing("the call has no credential that this daemon accepts")
}

func missing(why string) error {
	return &identity.Error{Reason: identity.Missing, Text: why + hint}
}

// hint tells a caller where credentials are looked for.
const hint = ": a token (" + identity.TokenFileEnv + ", else ~/.rfaas/token), or the secret file that client and daemon must share " +
	"(" + SecretFileEnv + ", else $XDG_RUNTIME_DIR/rfaas/secret, else ~/.rfaas/secret)"

// wrongHint tells a caller with the wrong secret in which files the client looks for the secret.
const wrongHint = ": the client's secret file (" + SecretFileEnv + ", else $XDG_RUNTIME_DIR/rfaas/secret, else ~/.rfaas/secret) is not the daemon's"

// maxVerified bounds the identities that are remembered for a connection.
const maxVerified = 8

// identify verifies a credential once for each connection, and rechecks it for later calls.
func (l *link) identify(v identity.Verifier, credential string, now time.Time) (identity.Identity, error) {
	key := v.Scheme() + " " + credential
	l.mu.Lock()
	id, known := l.verified[key]
	l.mu.Unlock()
	if known {
		return id, v.Recheck(&id, credential, now)
	}
	id, err := v.Verify(credential, l.channel, now)
	if err != nil {
		return id, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.verified == nil || len(l.verified) >= maxVerified {
		l.verified = map[string]identity.Identity{}
	}
	l.verified[key] = id
	return id, nil
}

// service is the prefix of method names.
const service = "/rfaas.control.v1."

// roles maps methods to the role that they need. A method that is not listed is for operators.
var roles = map[string]identity.Role{
	service + "Executor/Info":         identity.RoleTenant,
	service + "Executor/Lease":        identity.RoleTenant,
	service + "Executor/Leasing":      identity.RoleTenant,
	service + "Executor/Upload":       identity.RoleTenant,
	service + "Executor/Fetch":        identity.RoleTenant,
	service + "Executor/Lend":         identity.RoleTenant,
	service + "Executor/AttachClaims": identity.RoleTenant,
	service + "Executor/DetachClaims": identity.RoleTenant,
	service + "Executor/Replace":      identity.RoleTenant,
	service + "Executor/Release":      identity.RoleTenant,
	service + "Executor/Renew":        identity.RoleTenant,
	service + "Executor/Leases":       identity.RoleTenant,
	service + "Executor/Inspect":      identity.RoleTenant,
	service + "Executor/Events":       identity.RoleTenant,
	service + "Executor/Room":         identity.RoleTenant,
	service + "Executor/CreateSeed":   identity.RoleTenant,
	service + "Executor/DescribeSeed": identity.RoleTenant,
	service + "Executor/RenewSeed":    identity.RoleTenant,
	service + "Executor/ReleaseSeed":  identity.RoleTenant,
	service + "Executor/Revoke":       identity.RoleTenant, // only its own leases
	service + "Executor/Drain":        identity.RoleOperator,
	service + "Executor/Cordon":       identity.RoleOperator,
	service + "Executor/Until":        identity.RoleOperator,

	service + "Manager/Hello":          identity.RoleTenant,
	service + "Manager/List":           identity.RoleTenant,
	service + "Manager/AttachClient":   identity.RoleTenant,
	service + "Manager/Bill":           identity.RoleTenant, // its own
	service + "Manager/History":        identity.RoleTenant, // its own use, and the cluster's cores and starts
	service + "Manager/Register":       identity.RoleNode,
	service + "Manager/Heartbeat":      identity.RoleNode,
	service + "Manager/Deregister":     identity.RoleNode,
	service + "Manager/AttachExecutor": identity.RoleNode,
	service + "Manager/Settle":         identity.RoleNode,
	service + "Manager/Limit":          identity.RoleNode,
	service + "Manager/Reserve":        identity.RoleNode,
	service + "Manager/Revocations":    identity.RoleNode,
}

// forNodes are the methods that a node may call. They do not include leasing.
var forNodes = map[string]bool{
	service + "Executor/Info":          true,
	service + "Manager/Hello":          true,
	service + "Manager/List":           true,
	service + "Manager/Register":       true,
	service + "Manager/Heartbeat":      true,
	service + "Manager/Deregister":     true,
	service + "Manager/AttachExecutor": true,
	service + "Manager/Settle":         true,
	service + "Manager/Limit":          true,
	service + "Manager/Reserve":        true,
	service + "Manager/Revocations":    true,
}

func needed(method string) identity.Role {
	if r, ok := roles[method]; ok {
		return r
	}
	return identity.RoleOperator
}

// tap authenticates a call by its headers, before gRPC makes a stream for it and stores any of its bytes. gRPC calls it
// in the goroutine that reads the connection. It closes a connection on which too many calls are refused.
func (g *Gate) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	l, c := linkOf(ctx), ctx.Value(connKey{}).(*conn)
	admitted, err := g.check(ctx, info.FullMethodName)
	if err == nil {
		admitted, err = g.hold(admitted, c)
	}
	if err != nil {
		c.refuse(ctx, l)
		return nil, err
	}
	if l.bounded != nil {
		l.bounded.known()
	}
	return admitted, nil
}

// partyOf returns the name under which a caller's simultaneous use is counted: its tenant or its node. Operators have no
// limits.
func partyOf(who *identity.Identity) (party string, counts bool) {
	switch who.Role {
	case identity.RoleTenant:
		return who.Tenant, true
	case identity.RoleNode:
		return quota.Node(who.Name), true
	}
	return "", false
}

// hold counts a call for its tenant or node until the call ends, and on the first call also its connection. A connection
// that is refused here still counts as unauthenticated.
func (g *Gate) hold(ctx context.Context, c *conn) (context.Context, error) {
	party, counts := partyOf(Caller(ctx))
	if !counts {
		return ctx, nil
	}
	if !c.held {
		release, err := g.tenants.Hold(party, quota.Connections)
		if err != nil {
			return nil, Errorf(ClassBusy, "%v", err)
		}
		c.held = true
		context.AfterFunc(c.ctx, release)
	}
	release, err := g.tenants.Hold(party, quota.Streams)
	if err != nil {
		return nil, Errorf(ClassBusy, "%v", err)
	}
	h := &heldCall{release: release}
	context.AfterFunc(ctx, h.ended)
	return context.WithValue(ctx, heldCallKey{}, h), nil
}

type heldCallKey struct{}

// heldCall is a call that counts until its stream has ended and its handler has returned. A caller that cancels its
// calls therefore has no more of them running than a caller that waits for them.
type heldCall struct {
	release func() // may be called more than once

	mu      sync.Mutex
	running bool // the handler runs
	over    bool // the stream has ended
}

func (h *heldCall) ended() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over = true; !h.running {
		h.release()
	}
}

// begin records that the handler of the call with ctx starts, and done that it has returned. It returns an error if the
// caller has gone, in which case the call no longer counts.
func begin(ctx context.Context) (done func(), err error) {
	h, ok := ctx.Value(heldCallKey{}).(*heldCall)
	if !ok {
		return func() {}, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		return nil, status.FromContextError(context.Canceled).Err()
	}
	h.running = true
	return h.release, nil
}

// unary and stream handle a call after tap has admitted it and its stream exists.
func (g *Gate) unary(ctx context.Context, req any, i *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
	done, err := begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := g.narrow(ctx, i.FullMethod, req); err != nil {
		return nil, err
	}
	reply, err := h(ctx, req)
	if err != nil {
		return nil, err
	}
	return g.holdReply(ctx, reply)
}

// narrow restricts a request for bills or use to the tenants whose bills its caller may see.
func (g *Gate) narrow(ctx context.Context, method string, req any) error {
	var tenant *string
	switch req := req.(type) {
	case *BillRequest:
		tenant = &req.Tenant
	case *HistoryRequest:
		tenant = &req.Tenant
	default:
		return nil
	}
	who := Caller(ctx)
	if who.Role == identity.RoleOperator {
		return nil
	}
	if *tenant == "" {
		*tenant = who.Tenant
	}
	if !who.MayUse(*tenant) {
		return g.Refuse(ctx, method, "%[2]s may not see the bill of tenant %[1]q, only that of %[3]q", *tenant, who.Name, who.Tenant)
	}
	return nil
}

func (g *Gate) stream(srv any, s grpc.ServerStream, i *grpc.StreamServerInfo, h grpc.StreamHandler) error {
	over, err := begin(s.Context())
	if err != nil {
		return err
	}
	defer over()
	s = &replying{s, g}
	if i.FullMethod != Executor_Leasing_FullMethodName {
		return h(srv, s)
	}
	done := countAsking(s.Context())
	if done == nil {
		return status.Errorf(codes.ResourceExhausted, "this connection already has %d streams of requests, the most allowed", mostAsking)
	}
	defer done()
	return h(srv, &asking{s, s.Context(), g})
}

// asking is a stream on which each message counts as a call. A message is refused if the credential has expired or was
// revoked since the last one. Only one goroutine may read from the stream and use its context.
type asking struct {
	grpc.ServerStream
	ctx  context.Context
	gate *Gate
}

// Context returns a context with the caller of the last message.
func (s *asking) Context() context.Context { return s.ctx }

func (s *asking) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	ctx, err := s.gate.check(s.ServerStream.Context(), Executor_Leasing_FullMethodName)
	if err == nil {
		s.ctx = ctx
	}
	return err
}
