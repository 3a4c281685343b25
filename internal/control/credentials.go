package control

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"google.golang.org/grpc/credentials"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// caller has a client's credentials and makes a proof with them for each connection. There may be several, since the
// client does not know which ones a daemon accepts. A daemon that does not accept one learns nothing from its proof.
type caller struct {
	secret *Secret
	token  *Token
}

// GetRequestMetadata returns the headers with the credentials. gRPC calls it for every call.
func (c *caller) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	ri, _ := credentials.RequestInfoFromContext(ctx)
	l, ok := ri.AuthInfo.(*link)
	if !ok {
		return nil, errors.New("credentials: the connection was not made by this package")
	}
	md := map[string]string{}
	if c.token != nil {
		t := c.token.get(now())
		md[header(identity.SchemeToken)] = l.make(identity.SchemeToken, t.Token, func(ch *identity.Channel) string {
			return identity.ProveToken(t.Token, t.Key, ch, now())
		})
	}
	if c.secret != nil {
		md[header(identity.SchemeSecret)] = l.make(identity.SchemeSecret, "", func(ch *identity.Channel) string {
			return identity.ProveSecret(c.secret[:], ch, now())
		})
	}
	return md, nil
}

// RequireTransportSecurity returns false: a proof can be sent in plain text, and Dial has checked the address.
func (*caller) RequireTransportSecurity() bool { return false }

// make returns the credential of a scheme for this connection. It calls prove only if from differs from the last time.
func (l *link) make(scheme, from string, prove func(*identity.Channel) string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if m, ok := l.made[scheme]; ok && m.from == from {
		return m.credential
	}
	if l.made == nil {
		l.made = map[string]made{}
	}
	m := made{from, prove(l.channel)}
	l.made[scheme] = m
	return m.credential
}

// places returns the paths of the token and the secret: those in the settings, else those in the environment, else the
// default ones, which need not exist. named is false for default paths.
func (c *DialConfig) places() (token, secret string, named bool) {
	if token, secret = c.TokenFile, c.SecretFile; token == "" && secret == "" {
		token, secret = c.getenv(identity.TokenFileEnv), c.getenv(SecretFileEnv)
	}
	if token != "" || secret != "" {
		return token, secret, true
	}
	token, _ = identity.TokenPath(c.getenv)
	secret, _ = SecretPath(c.getenv) // empty if there is no default path
	return token, secret, false
}

// Files returns the paths of the token and the secret that Dial loads, "" for none. named is false for default paths,
// where there need not be files.
func (c *DialConfig) Files() (token, secret string, named bool) { return c.places() }

// credentials loads the credentials to use at an address.
func (c *DialConfig) credentials(a Address) (*caller, error) {
	if c.Secret != nil {
		return &caller{secret: c.Secret}, nil
	}
	var found caller
	if c.Node != nil && !a.Local() && !c.AllowPlaintext { // the certificate is enough; nodes may have different secrets
		return &found, nil
	}
	token, secret, named := c.places()
	missing := func(err error) bool { return !named && errors.Is(err, fs.ErrNotExist) }
	if c.Token != nil {
		found.token = c.Token
	} else if token != "" {
		t, err := OpenToken(token)
		switch {
		case err == nil || missing(err):
		case errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("%w%s", err, remedy)
		default: // the text says what is wrong with the file
			return nil, err
		}
		found.token = t
	}
	var err error
	if secret != "" && c.ReadSecret != nil {
		found.secret = c.ReadSecret
	} else if secret != "" {
		var s Secret
		if s, err = LoadSecret(secret); err == nil {
			found.secret = &s
		} else if !missing(err) {
			if errors.Is(err, fs.ErrNotExist) {
				err = fmt.Errorf("%w%s", err, remedy)
			}
			return nil, err
		}
	} else if !named {
		_, err = SecretPath(c.getenv)
	}
	if found.token == nil && found.secret == nil && a.Network != "unix" { // on a unix socket the kernel identifies this user
		return nil, fmt.Errorf("%w: %w%s", errNobody, err, remedy)
	}
	return &found, nil
}

// errNobody means that this user has no credential.
var errNobody = errors.New("no token and no secret")

const remedy = " (start a daemon as this user, which makes the secret, or set " + SecretFileEnv + " to the secret file of the daemon; on a cluster set " +
	identity.TokenFileEnv + ", or ask the administrator for a token)"

// tls returns a function that makes the TLS configuration for an address; nil: no TLS. The function is called for each
// handshake and reads files that may have changed.
func (c *DialConfig) tls(a Address, who *caller) (func() (*tls.Config, error), error) {
	if a.Local() || c.AllowPlaintext {
		return nil, nil
	}
	host, _, err := net.SplitHostPort(a.Target)
	if err != nil {
		return nil, Errorf(ClassInvalid, "%v", err)
	}
	var roots func() (*x509.CertPool, error)
	switch ca := cmp.Or(c.CAFile, c.getenv(identity.CAFileEnv)); {
	case c.Node != nil:
		return func() (*tls.Config, error) { return clientTLS(c.Node, host), nil }, nil
	case ca != "":
		roots = func() (*x509.CertPool, error) {
			b, err := os.ReadFile(ca)
			if err != nil {
				return nil, Errorf(ClassInvalid, "%s: %v", identity.CAFileEnv, err)
			}
			p, err := identity.Pool(b)
			if err != nil {
				return nil, Errorf(ClassInvalid, "%s: %s: %v", identity.CAFileEnv, ca, err)
			}
			return p, nil
		}
	case who.token != nil && who.token.get(now()).CA != nil:
		roots = func() (*x509.CertPool, error) {
			p, err := identity.Pool(who.token.get(now()).CA)
			if err != nil {
				return nil, Errorf(ClassInvalid, "token file %s: the certificate in it: %v", who.token.path, err)
			}
			return p, nil
		}
	default:
		return nil, Errorf(ClassInvalid, "%v", a.CheckPlaintext(false))
	}
	make := func() (*tls.Config, error) {
		p, err := roots()
		return &tls.Config{MinVersion: tls.VersionTLS13, ServerName: host, NextProtos: []string{"h2"}, RootCAs: p}, err
	}
	_, err = make() // report errors now
	return make, err
}
