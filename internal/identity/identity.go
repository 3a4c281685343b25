package identity

import (
	"crypto/x509"
	"fmt"
	"net"
	"strings"
	"time"
)

// Role is what an identity may do.
type Role uint8

// The roles.
const (
	RoleTenant   Role = 1 // lease, call, see its own leases and libraries
	RoleNode     Role = 2 // an executor's calls to the resource manager, and those of a tenant
	RoleOperator Role = 3 // everything: see and end leases of all tenants, drain, act for any tenant
)

var roleNames = [...]string{RoleTenant: "tenant", RoleNode: "node", RoleOperator: "operator"}

// String returns the role's name, "none" for 0.
func (r Role) String() string {
	if r == 0 || int(r) >= len(roleNames) {
		return "none"
	}
	return roleNames[r]
}

// ParseRole returns the role with a name.
func ParseRole(s string) (Role, error) {
	for r, name := range roleNames {
		if name != "" && name == s {
			return Role(r), nil
		}
	}
	return 0, fmt.Errorf("unknown role %q, want tenant, node or operator", s)
}

// Identity is an authenticated caller.
type Identity struct {
	By      string    // kind of credential: "token", "secret", "node" (a certificate), "unix" (the kernel's peer credentials)
	Name    string    // for logs: the caller and its credential
	Tenant  string    // owns and pays for leases; empty: the tenant that the caller names
	UID     *uint32   // verified user id; nil: none
	Role    Role      //
	Hosts   []string  // names and addresses of a node's certificate
	Expires time.Time // zero: never

	certificate *x509.Certificate // of a node
	generation  uint64            // of the keys that verified it
}

// MayUse reports whether the caller may see and use a tenant's leases and libraries.
func (id *Identity) MayUse(tenant string) bool {
	return id.Role == RoleOperator || id.Tenant != "" && id.Tenant == tenant
}

// Covers returns an error if a node's certificate is not for an address, host:port.
func (id *Identity) Covers(address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	ip := net.ParseIP(host)
	for _, h := range id.Hosts {
		if other := net.ParseIP(h); ip != nil && other != nil && ip.Equal(other) || ip == nil && other == nil && sameName(h, host) {
			return nil
		}
	}
	return fmt.Errorf("the certificate of %s is for %s, not for %q", id.Name, strings.Join(id.Hosts, ", "), host)
}

// sameName compares host names. They are not case-sensitive and may end with a dot.
func sameName(a, b string) bool {
	return strings.EqualFold(strings.TrimSuffix(a, "."), strings.TrimSuffix(b, "."))
}

// Reason is why a credential is refused. The word is used in errors, in metrics and in the audit log.
type Reason string

// The reasons.
const (
	Missing   Reason = "missing"   // no credential
	Malformed Reason = "malformed" // wrong form
	Wrong     Reason = "wrong"     // a signature, secret or certificate does not verify
	Expired   Reason = "expired"
	TooEarly  Reason = "too_early" // not valid yet
	Skew      Reason = "skew"      // the clocks of the two sides differ too much
	Replayed  Reason = "replayed"  // a proof that was made for another connection
	Revoked   Reason = "revoked"
	Plaintext Reason = "plaintext" // sent from another node without TLS
	Forbidden Reason = "forbidden" // the identity is valid, but may not do this
	Overload  Reason = "overload"  // too many new connections to check for replays
)

// Reasons returns all reasons, for metrics.
func Reasons() []Reason {
	return []Reason{Missing, Malformed, Wrong, Expired, TooEarly, Skew, Replayed, Revoked, Plaintext, Forbidden, Overload}
}

// Error is a refusal. Its text never contains a secret.
type Error struct {
	Reason Reason
	Text   string
}

func (e *Error) Error() string { return e.Text }

func refuse(r Reason, format string, args ...any) error {
	return &Error{Reason: r, Text: fmt.Sprintf(format, args...)}
}

// Verifier authenticates callers by one kind of credential. It is safe for concurrent use.
type Verifier interface {
	// Scheme returns the name of the kind, a short lower-case word such as "token". It is part of a header's name.
	Scheme() string
	// Verify checks a credential that came over ch. The error is an *Error.
	Verify(credential string, ch *Channel, now time.Time) (Identity, error)
	// Recheck returns an *Error if an identity that Verify returned is no longer valid. It is cheap: it runs for every
	// call on a connection.
	Recheck(id *Identity, credential string, now time.Time) error
}
