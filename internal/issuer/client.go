package issuer

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// clientPatience bounds a request, with its connection.
const clientPatience = 30 * time.Second

// client is one connection to an issuer, for one request. The connection is made at once, so that the request can depend on it.
type client struct {
	at   Address
	conn *tls.Conn
}

// connect connects to an issuer, and checks that it is the right one. cert is that of a node; nil: none.
func (a Address) connect(ctx context.Context, cert *tls.Certificate) (*client, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS13, ServerName: a.Host(), NextProtos: []string{"http/1.1"},
		InsecureSkipVerify: true, // VerifyConnection checks instead: the cluster's certificate is known by its hash
		VerifyConnection: func(s tls.ConnectionState) error {
			return identity.CheckIssuer(s.PeerCertificates, a.Host(), a.CA, time.Now())
		}}
	if cert != nil {
		config.Certificates = []tls.Certificate{*cert}
	}
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", a.Target)
	if err != nil {
		return nil, fmt.Errorf("issuer: %w", err)
	}
	conn := tls.Client(raw, config)
	if err := conn.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, fmt.Errorf("issuer %s: TLS: %w", a.Target, err)
	}
	return &client{a, conn}, nil
}

// ask sends a request on a connection and closes it. body is nil for a GET request.
func (c *client) ask(ctx context.Context, path string, body, reply any) error {
	defer c.conn.Close()
	used := false
	transport := &http.Transport{DisableKeepAlives: true, MaxResponseHeaderBytes: 16 << 10, DialTLSContext: func(context.Context, string, string) (net.Conn, error) {
		if used {
			return nil, errors.New("the connection was closed")
		}
		used = true
		return c.conn, nil
	}}
	method, text := http.MethodGet, []byte(nil)
	if body != nil {
		method = http.MethodPost
		var err error
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	r, err := http.NewRequestWithContext(ctx, method, "https://"+c.at.Target+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	answer, err := transport.RoundTrip(r)
	if err != nil {
		return fmt.Errorf("issuer %s: %w", c.at.Target, err)
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusOK {
		if err := parse(answer.Body, maxReply, reply); err != nil {
			return fmt.Errorf("issuer %s: the reply: %w", c.at.Target, err)
		}
		return nil
	}
	var f failure
	if err := parse(answer.Body, maxRequest, &f); err != nil || f.Error == "" {
		return fmt.Errorf("issuer %s: %s", c.at.Target, answer.Status)
	}
	if f.Reason != "" {
		return &identity.Error{Reason: f.Reason, Text: "issuer: " + f.Error}
	}
	return fmt.Errorf("issuer %s: %s", c.at.Target, f.Error)
}

// ask connects, sends one request, and returns when it is answered.
func (a Address) ask(ctx context.Context, cert *tls.Certificate, path string, body, reply any) error {
	ctx, cancel := context.WithTimeout(ctx, clientPatience)
	defer cancel()
	c, err := a.connect(ctx, cert)
	if err != nil {
		return err
	}
	return c.ask(ctx, path, body, reply)
}

// revoked returns the signed list of revoked credentials, or nothing if its serial number is not above serial. cert is that of a node.
func (a Address) revoked(ctx context.Context, cert *tls.Certificate, serial uint64) ([]byte, error) {
	var reply revokedReply
	err := a.ask(ctx, cert, fmt.Sprintf("%s?%s=%d", pathRevoked, serialQuery, serial), nil, &reply)
	return []byte(reply.List), err
}

// Join makes the directory of a node that has a code. again replaces a certificate that the directory has. It returns when the certificate
// expires.
func Join(ctx context.Context, code Code, dir string, hosts []string, again bool) (time.Time, error) {
	return identity.JoinNode(dir, code.Address.String(), code.CA, hosts, again, func(q *identity.NodeRequest) (*identity.NodeReply, error) {
		var reply identity.NodeReply
		err := code.ask(ctx, nil, pathEnrol, enrolRequest{code.Secret[:], *q}, &reply)
		return &reply, err
	}, time.Now())
}

// AtFirst is the longest time for Renew: it renews a certificate as soon as the issuer's rule permits.
const AtFirst = time.Duration(math.MaxInt64)

// RenewFrom returns when Renew first renews a certificate: when two thirds of its life are left.
func RenewFrom(c *x509.Certificate) time.Time { return c.NotAfter.Add(-longest(c)) }

func longest(c *x509.Certificate) time.Duration { return c.NotAfter.Sub(c.NotBefore) * 2 / 3 }

// Renew renews the certificate in a node's directory that came from an issuer, if it expires within some time and at most two thirds of its life
// are left. It returns when the certificate expires, and whether it is new. If the issuer has a newer revocation list, that replaces the one in
// the directory. The error is fs.ErrNotExist for a directory that did not come from an issuer.
func Renew(ctx context.Context, dir string, within time.Duration) (ends time.Time, renewed bool, err error) {
	return renewAt(ctx, dir, within, time.Now())
}

func renewAt(ctx context.Context, dir string, within time.Duration, now time.Time) (ends time.Time, renewed bool, err error) {
	if err := identity.Complete(dir); err != nil {
		return ends, false, err
	}
	text, err := identity.RemoteNode(dir, nil)
	if err != nil {
		return ends, false, err
	}
	at, err := ParseAddress(text)
	if err != nil { // without the text: the owner of the directory chooses which file root reads here
		return ends, false, fmt.Errorf("%s: the file issuer has no address of an issuer (HOST:PORT#HASH): run rfaas cluster join --again with a new code", dir)
	}
	hosts, pair, err := identity.NodeHosts(dir)
	if err != nil {
		return ends, false, err
	}
	ends = pair.Leaf.NotAfter
	within = min(within, longest(pair.Leaf))
	if now.Add(within).Before(ends) {
		serial := uint64(0) // without a valid list, any is newer
		if l, err := identity.OpenRevocations(dir); err == nil {
			serial = l.Serial
		}
		list, err := at.revoked(ctx, &pair, serial)
		if err == nil && len(list) > 0 {
			err = identity.UpdateRevocations(dir, list, now)
		}
		return ends, false, err
	}
	if now.After(ends) {
		return ends, false, fmt.Errorf("the certificate in %s expired at %s, so the issuer does not renew it: run rfaas cluster join --again with a new code",
			dir, ends.UTC().Format(time.RFC3339))
	}
	ends, err = identity.JoinNode(dir, text, at.CA, hosts, true, func(q *identity.NodeRequest) (*identity.NodeReply, error) {
		var reply identity.NodeReply
		err := at.ask(ctx, &pair, pathRenew, q, &reply)
		return &reply, err
	}, now)
	return ends, err == nil, err
}
