package issuer

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// MUNGE is the authentication service of many Slurm clusters: munged on each node signs who made a credential, with a key that all nodes share,
// and accepts each credential once. This package runs the programs munge and unmunge, so that nothing here parses what munged and its
// library exchange.

// Munge says how to reach munged.
type Munge struct {
	Socket string // empty: the usual one
}

const (
	mungePatience = 5 * time.Second
	maxMunge      = 4 << 10 // bytes of a credential; one for a payload of 64 bytes has some 250
)

// mungePayload is what a credential must contain: a hash of the purpose, of the TLS connection on which it is sent and of the user's key, so that
// it is worthless on another connection and for another key.
func mungePayload(purpose string, binding []byte, key []byte) string {
	return fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "rfaas munge v1\n%s\n%x\n%x\n", purpose, binding, key)))
}

func (m Munge) run(ctx context.Context, program, input string, args ...string) (output string, code int, err error) {
	ctx, cancel := context.WithTimeout(ctx, mungePatience)
	defer cancel()
	if m.Socket != "" {
		args = append(args, "--socket="+m.Socket)
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.WaitDelay = time.Second
	cmd.Stdin = strings.NewReader(input)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return "", 0, fmt.Errorf("%s: no answer within %v: is munged running?", program, mungePatience)
	case errors.Is(err, exec.ErrNotFound):
		return "", 0, fmt.Errorf("%s is not installed: install the package munge", program)
	case errors.As(err, &exit):
		text, _, _ := strings.Cut(errs.String(), "\n")
		return out.String(), exit.ExitCode(), errors.New(strings.TrimPrefix(text[:min(len(text), 200)], program+": Error: "))
	}
	return out.String(), 0, err
}

// encode returns a credential of this user.
func (m Munge) encode(ctx context.Context, payload string) (string, error) {
	text, _, err := m.run(ctx, "munge", payload)
	if err != nil {
		return "", fmt.Errorf("cannot make a MUNGE credential on this node: %w", err)
	}
	return strings.TrimSpace(text), nil
}

// Exit statuses of unmunge: munge_err_t of libmunge.
const (
	mungeSocket       = 6
	mungeTimeout      = 7
	mungeExpired      = 15
	mungeRewound      = 16
	mungeReplayed     = 17
	mungeUnauthorized = 18
)

var (
	mungeForm    = regexp.MustCompile(`^MUNGE:[A-Za-z0-9+/]+=*:$`)
	mungeDecoded = regexp.MustCompile(`^UID:\s+([0-9]{1,10})\n\n([0-9a-f]*)$`)
)

// decode returns the user who made a credential, and its payload. Errors of the caller are an *identity.Error.
func (m Munge) decode(ctx context.Context, credential string) (uid uint32, payload string, err error) {
	if len(credential) > maxMunge || !mungeForm.MatchString(credential) {
		return 0, "", &identity.Error{Reason: identity.Malformed, Text: "the request has no MUNGE credential"}
	}
	text, code, err := m.run(ctx, "unmunge", credential, "--keys=UID", "--numeric")
	refused := func(r identity.Reason, format string, args ...any) (uint32, string, error) {
		return 0, "", &identity.Error{Reason: r, Text: "the MUNGE credential " + fmt.Sprintf(format, args...)}
	}
	switch {
	case code == mungeSocket, code == mungeTimeout:
		return 0, "", unavailable{fmt.Errorf("munged does not answer on the issuer's machine: %w", err)}
	case code == mungeExpired:
		return refused(identity.Expired, "has expired: the request took too long, or the clocks of the two nodes differ")
	case code == mungeRewound:
		return refused(identity.Skew, "is from the future: the clocks of the two nodes differ")
	case code == mungeReplayed:
		return refused(identity.Replayed, "was already used")
	case code == mungeUnauthorized:
		return refused(identity.Forbidden, "is restricted to another user")
	case code != 0:
		return refused(identity.Wrong, "cannot be decoded (%v): the issuer's machine has another MUNGE key than this node", err)
	case err != nil:
		return 0, "", unavailable{fmt.Errorf("the issuer's machine: %w", err)}
	}
	parts := mungeDecoded.FindStringSubmatch(text)
	if parts == nil {
		return refused(identity.Wrong, "is for another purpose")
	}
	n, err := strconv.ParseUint(parts[1], 10, 32)
	if err != nil {
		return 0, "", fmt.Errorf("unmunge printed %.80q", text)
	}
	return uint32(n), parts[2], nil
}

// tokenRequest asks for a token for a user's key.
type tokenRequest struct {
	Munge string `json:"munge"`
	Key   []byte `json:"key"` // Ed25519 public key
}

// tokenReply has a token.
type tokenReply struct {
	Token string `json:"token"`
	CA    string `json:"ca"` // certificate of the cluster, PEM
}

// revokeRequest revokes tokens of the user.
type revokeRequest struct {
	Munge string `json:"munge"`
	ID    string `json:"id,omitempty"` // of one token; empty: all
}

// revokeReply names the revoked tokens.
type revokeReply struct {
	IDs []string `json:"ids"`
}

// The purposes of credentials.
const (
	purposeToken  = "token"
	purposeRevoke = "revoke"
)

// askMunge connects and sends a request with a credential for the connection. request returns it.
func (a Address) askMunge(ctx context.Context, m Munge, path, purpose string, key []byte, request func(credential string) any, reply any) error {
	ctx, cancel := context.WithTimeout(ctx, clientPatience)
	defer cancel()
	c, err := a.connect(ctx, nil)
	if err != nil {
		return err
	}
	state := c.conn.ConnectionState()
	bound, err := binding(&state)
	var credential string
	if err == nil {
		credential, err = m.encode(ctx, mungePayload(purpose, bound, key))
	}
	if err != nil {
		c.conn.Close()
		return err
	}
	return c.ask(ctx, path, request(credential), reply)
}

// GetToken gets a token for this user by a credential of MUNGE. key is the user's; nil makes a new one.
func (a Address) GetToken(ctx context.Context, m Munge, key ed25519.PrivateKey) (*identity.Credentials, error) {
	if key == nil {
		var err error
		if _, key, err = ed25519.GenerateKey(nil); err != nil {
			return nil, err
		}
	}
	pub, ok := key.Public().(ed25519.PublicKey)
	if !ok {
		return nil, errors.New("the user's key is not an Ed25519 key")
	}
	var reply tokenReply
	err := a.askMunge(ctx, m, pathToken, purposeToken, pub, func(c string) any { return tokenRequest{c, pub} }, &reply)
	if err != nil {
		return nil, err
	}
	ca, err := identity.ParseCertificate([]byte(reply.CA))
	if err == nil && AddressOf(a.Target, ca) != a {
		err = errors.New("the certificate of another cluster")
	}
	if err != nil {
		return nil, fmt.Errorf("issuer %s: the reply: %w", a.Target, err)
	}
	cred := &identity.Credentials{Token: reply.Token, Key: key, CA: []byte(reply.CA), Issuer: a.String()}
	b, err := cred.Encode()
	if err == nil {
		cred, err = identity.ParseCredentials(b) // checks it
	}
	if err != nil {
		return nil, fmt.Errorf("issuer %s: the reply: %w", a.Target, err)
	}
	return cred, nil
}

// RevokeTokens revokes a token of this user, or all with an empty id, by a credential of MUNGE. It returns the ids.
func (a Address) RevokeTokens(ctx context.Context, m Munge, id string) ([]string, error) {
	var reply revokeReply
	err := a.askMunge(ctx, m, pathRevoke, purposeRevoke, []byte(id), func(c string) any { return revokeRequest{c, id} }, &reply)
	return reply.IDs, err
}

// RenewToken gets another token for a token file that came from an issuer, with the same key, and replaces the file.
func RenewToken(ctx context.Context, m Munge, path string, cred *identity.Credentials) (*identity.Credentials, error) {
	at, err := ParseAddress(cred.Issuer)
	if err != nil {
		return nil, fmt.Errorf("token file %s: %w", path, err)
	}
	made, err := at.GetToken(ctx, m, cred.Key)
	if err != nil {
		return nil, err
	}
	if made.Claims.Tenant != cred.Claims.Tenant {
		return nil, fmt.Errorf("token file %s: the issuer gives this user tokens of tenant %q now, not of %q: run rfaas token get when no program uses the old one",
			path, made.Claims.Tenant, cred.Claims.Tenant)
	}
	b, err := made.Encode()
	if err != nil {
		return nil, err
	}
	return made, identity.WriteFile(path, b, 0o600, false)
}
