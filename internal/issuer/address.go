package issuer

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// AddressEnv names the environment variable with the address of the cluster's issuer.
const AddressEnv = "RFAAS_ISSUER"

// Address is where an issuer listens, and the SHA-256 of its cluster's certificate. Its text is HOST:PORT#HASH.
type Address struct {
	Target string // host:port
	CA     [sha256.Size]byte
}

// Code is an enrolment code: the address of the issuer and a secret. Its text is HOST:PORT#HASH#SECRET.
type Code struct {
	Address
	Secret [identity.SecretSize]byte
}

var encoding = base64.RawURLEncoding.Strict()

func (a Address) String() string { return a.Target + "#" + encoding.EncodeToString(a.CA[:]) }

// Text returns the code, which is secret.
func (c *Code) Text() string {
	return c.Address.String() + "#" + encoding.EncodeToString(c.Secret[:])
}

// Host returns the name or the IP address of the issuer.
func (a Address) Host() string {
	host, _, _ := net.SplitHostPort(a.Target) // ParseAddress has checked it
	return host
}

// ParseAddress reads an address.
func ParseAddress(text string) (a Address, err error) {
	target, hash, _ := strings.Cut(text, "#")
	if err := parts(target, hash, a.CA[:]); err != nil {
		return Address{}, fmt.Errorf("issuer %.300q: %w (want HOST:PORT#HASH, as `rfaas cluster serve` logs it)", text, err)
	}
	a.Target = target
	return a, nil
}

// ParseCode reads a code. Errors do not contain it.
func ParseCode(text string) (c Code, err error) {
	address, secret, _ := strings.Cut(text, "#")
	hash, secret, _ := strings.Cut(secret, "#")
	err = parts(address, hash, c.CA[:])
	if err == nil {
		err = decode(secret, c.Secret[:])
	}
	if err != nil {
		return Code{}, fmt.Errorf("the enrolment code is malformed or incomplete: %w (want all of what rfaas cluster enrol-code printed)", err)
	}
	c.Target = address
	return c, nil
}

// parts checks a target and decodes a hash.
func parts(target, hash string, into []byte) error {
	host, port, err := net.SplitHostPort(target)
	if err != nil || len(host) > 253 || host == "" || strings.ContainsFunc(target, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return errors.New("no HOST:PORT")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || strconv.FormatUint(n, 10) != port {
		return errors.New("the port is not a number in 1..65535")
	}
	return decode(hash, into)
}

func decode(text string, into []byte) error {
	b, err := encoding.DecodeString(text)
	if err != nil || len(b) != len(into) || strings.ContainsAny(text, "\r\n") { // base64 ignores line ends
		return fmt.Errorf("a part is not %d bytes in base64", len(into))
	}
	copy(into, b)
	return nil
}

// AddressOf returns the address of the issuer at host:port of the cluster with this certificate.
func AddressOf(target string, ca *x509.Certificate) Address {
	return Address{target, sha256.Sum256(ca.Raw)}
}
