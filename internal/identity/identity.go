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
	RoleTenant   Role = 1 // lease, call, and see what is its own
	RoleNode     Role = 2 // what an executor does with the resource manager, and a tenant's
	RoleOperator Role = 3 // everything: see and end leases of others, drain, name any tenant
)

var roleNames = [...]string{RoleTenant: "tenant", RoleNode: "node", RoleOperator: "operator"}

// String is the role's name, "none" for 0.
func (r Role) String() string {
	if r == 0 || int(r) >= len(roleNames) {
		return "none"
	}
	return roleNames[r]
}

// ParseRole reads a role's name.
func ParseRole(s string) (Role, error) {
	for r, name := range roleNames {
		if name != "" && name == s {
			return Role(r), nil
		}
	}
	return 0, fmt.Errorf("role %q is none of tenant, node, operator", s)
}

// Identity is a caller that has proved who it is.
type Identity struct {
	By      string    // what proved it: "token", "secret", "node" (a certificate), "unix" (the kernel)
	Name    string    // for logs: of whom, and by which credential
	Tenant  string    // who owns and pays; empty: whom the caller names
	UID     *uint32   // verified user id; nil: none
	Role    Role      //
	Hosts   []string  // of a node: the names and addresses that its certificate is for
	Expires time.Time // zero: never

	certificate *x509.Certificate // of a node
	generation  uint64            // of the keys that it was verified with
}

// MayUse says whether the caller may see and use what belongs to a tenant.
func (id *Identity) MayUse(tenant string) bool {
	return id.Role == RoleOperator || id.Tenant != "" && id.Tenant == tenant
}

// Covers says why an address, host:port, is not one of those that a node's certificate is for.
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

// sameName compares host names, which know no case and may end with a dot.
func sameName(a, b string) bool {
	return strings.EqualFold(strings.TrimSuffix(a, "."), strings.TrimSuffix(b, "."))
}

// Reason is why a credential is refused; the word is used in errors, in metrics and in the audit log.
type Reason string

// The reasons.
const (
	Missing   Reason = "missing"   // there is none
	Malformed Reason = "malformed" // not in the form that it should have
	Wrong     Reason = "wrong"     // a signature, a secret or a certificate is not what it claims to be
	Expired   Reason = "expired"
	TooEarly  Reason = "too_early" // not valid yet
	Skew      Reason = "skew"      // the clocks of both sides differ too much
	Replayed  Reason = "replayed"  // a proof that was made for another connection
	Revoked   Reason = "revoked"
	Plaintext Reason = "plaintext" // it came without TLS from another node
	Forbidden Reason = "forbidden" // the identity is good and may not do this
	Overload  Reason = "overload"  // more new connections than can be told from replays
)

// Reasons are all reasons, for metrics.
func Reasons() []Reason {
	return []Reason{Missing, Malformed, Wrong, Expired, TooEarly, Skew, Replayed, Revoked, Plaintext, Forbidden, Overload}
}

// Error is a refusal. Its text never holds a secret.
type Error struct {
	Reason Reason
	Text   string
}

func (e *Error) Error() string { return e.Text }

func refuse(r Reason, format string, args ...any) error {
	return &Error{Reason: r, Text: fmt.Sprintf(format, args...)}
}

// Verifier proves who a caller is by one kind of credential. Safe for concurrent use.
type Verifier interface {
	// Scheme names the kind, a short lower-case word: "token". It is part of a header's name.
	Scheme() string
	// Verify checks a credential that came over a channel. The error is an *Error.
	Verify(credential string, ch *Channel, now time.Time) (Identity, error)
	// Recheck says whether what Verify found is still so, cheaply: it is asked for every call on a connection.
	Recheck(id *Identity, credential string, now time.Time) error
}
