package issuer

import (
	"bytes"
	"crypto/ed25519"
	"crypto/subtle"
	"crypto/tls"
	"fmt"
	"net/http"
	"time"

	"golang.org/x/time/rate"

	"github.com/rfaas-go/rfaas/internal/identity"
)

const (
	userBurst = 20 // requests of a user at once, and then one every userEvery
	userEvery = time.Minute

	tokenBurst = 32 // tokens of a user at once, and then as many again in the life of one
)

// user returns the user who made the MUNGE credential of a request.
func (s *Server) user(r *http.Request, credential, purpose string, key []byte) (uid uint32, who string, err error) {
	if len(s.cfg.Tenants) == 0 {
		return 0, "", &identity.Error{Reason: identity.Forbidden, Text: "this issuer serves no users: its setting tenants is empty"}
	}
	bound, err := binding(r.TLS)
	if err != nil {
		return 0, "", err
	}
	uid, payload, err := s.cfg.Munge.decode(r.Context(), credential)
	if err != nil {
		return 0, "", err
	}
	who = fmt.Sprintf("uid %d by MUNGE", uid)
	if subtle.ConstantTimeCompare([]byte(payload), []byte(mungePayload(purpose, bound, key))) != 1 {
		return 0, who, &identity.Error{Reason: identity.Replayed, Text: "the MUNGE credential was made for another connection, key or purpose"}
	}
	if !s.callers.take(who, rate.Every(userEvery), userBurst, s.cfg.Now()) {
		return 0, who, &identity.Error{Reason: identity.Overload, Text: fmt.Sprintf("more than %d requests of this user: try again in %v", userBurst, userEvery)}
	}
	return uid, who, nil
}

// token gives a user a token.
func (s *Server) token(r *http.Request, body []byte) (any, string, error) {
	var q tokenRequest
	if err := parse(bytes.NewReader(body), maxRequest, &q); err != nil {
		return nil, "", malformed(err)
	}
	if len(q.Key) != ed25519.PublicKeySize {
		return nil, "", malformed(fmt.Errorf("the key has %d bytes, want %d", len(q.Key), ed25519.PublicKeySize))
	}
	uid, who, err := s.user(r, q.Munge, purposeToken, q.Key)
	if err != nil {
		return nil, who, err
	}
	tenant, err := s.cfg.Tenants.Of(uid)
	if err != nil {
		return nil, who, err
	}
	now := s.cfg.Now()
	if !s.tokens.take(who, rate.Every(s.cfg.TokenLife/tokenBurst), tokenBurst, now) {
		return nil, who, &identity.Error{Reason: identity.Overload, Text: fmt.Sprintf("more than %d tokens of this user: try again in %v", tokenBurst, s.cfg.TokenLife/tokenBurst)}
	}
	claims := identity.Claims{Tenant: tenant, UID: &uid, Role: identity.RoleTenant.String(), Key: q.Key, Ends: now.Add(s.cfg.TokenLife).Unix()}
	token, claims, err := s.cfg.Cluster.SignToken(claims, now)
	if err != nil {
		return nil, who, err
	}
	s.cfg.Audit.Write(identity.AuditEntry{Event: identity.AuditToken, Who: who, Remote: r.RemoteAddr, Tenant: tenant, UID: &uid,
		Detail: fmt.Sprintf("token %s until %s", claims.ID, time.Unix(claims.Ends, 0).UTC().Format(time.RFC3339))})
	return tokenReply{token, string(s.cfg.Cluster.CAPEM())}, who, nil
}

// revoke revokes tokens of a user.
func (s *Server) revoke(r *http.Request, body []byte) (any, string, error) {
	var q revokeRequest
	if err := parse(bytes.NewReader(body), maxRequest, &q); err != nil {
		return nil, "", malformed(err)
	}
	uid, who, err := s.user(r, q.Munge, purposeRevoke, []byte(q.ID))
	if err != nil {
		return nil, who, err
	}
	now := s.cfg.Now()
	ids, err := s.cfg.Cluster.RevokeOf(uid, q.ID, now)
	if err != nil {
		return nil, who, err
	}
	for _, id := range ids {
		s.cfg.Audit.Write(identity.AuditEntry{Event: identity.AuditRevoke, Who: who, Remote: r.RemoteAddr, UID: &uid, Detail: "token " + id})
	}
	return revokeReply{append([]string{}, ids...)}, who, nil
}

func binding(s *tls.ConnectionState) ([]byte, error) {
	return s.ExportKeyingMaterial(bindingLabel, nil, 32)
}

// bindingLabel is the label of the TLS exporter value by which a credential belongs to its connection (RFC 5705).
const bindingLabel = "EXPORTER-rfaas-issuer-v1"
