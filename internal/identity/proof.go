package identity

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Leeway is the largest accepted difference between the clocks of the two sides.
const Leeway = 30 * time.Second

// NonceSize is the length of a channel's nonce, in bytes.
const NonceSize = 16

// Channel describes one connection as both of its ends see it, so that a proof can be bound to it. With TLS, a proof is
// bound to a value that TLS derives for the two ends alone. Without TLS, it is bound to a nonce of the caller, which a
// server accepts on one connection only, and to the address of the server's end, so that a process that listens at
// another address cannot pass the proof on.
type Channel struct {
	Binding []byte // TLS exporter; nil without TLS
	Nonce   []byte // chosen by the caller; nil with TLS, and at the server until it has read the credential
	Address string // of the server's end; empty with TLS
	Remote  string // of the caller, for logs
	PeerUID *uint32
	Node    *Identity // from the caller's certificate; nil: it sent none
}

// message returns the bytes that a proof signs. They bind scheme, credential, connection and time.
func message(scheme, credential, ms, address string, ch *Channel) []byte {
	sum := sha256.Sum256([]byte(credential))
	return fmt.Appendf(nil, "rfaas proof v1\n%s\n%x\n%s\n%s\n%x\n%x\n", scheme, sum, ms, address, ch.Binding, ch.Nonce)
}

// proof returns the text of a proof: ms.nonce.address.signature. All parts but the time are in base64.
func proof(scheme, credential string, ch *Channel, now time.Time, sign func([]byte) []byte) string {
	ms := strconv.FormatInt(now.UnixMilli(), 10)
	b := base64.RawURLEncoding.EncodeToString
	return ms + "." + b(ch.Nonce) + "." + b([]byte(ch.Address)) + "." + b(sign(message(scheme, credential, ms, ch.Address, ch)))
}

// ProveSecret returns a credential for one connection which proves that the caller knows a secret.
func ProveSecret(secret []byte, ch *Channel, now time.Time) string {
	return proof(SchemeSecret, "", ch, now, func(m []byte) []byte { return mac(secret, m) })
}

// ProveToken returns a credential for one connection: a token, and a proof that the caller owns the token's key.
func ProveToken(token string, key ed25519.PrivateKey, ch *Channel, now time.Time) string {
	return token + " " + proof(SchemeToken, token, ch, now, func(m []byte) []byte { return ed25519.Sign(key, m) })
}

// The schemes of this package.
const (
	SchemeSecret = "secret"
	SchemeToken  = "token"
)

func mac(secret, m []byte) []byte {
	h := hmac.New(sha256.New, secret)
	h.Write(m)
	return h.Sum(nil)
}

// maxProof bounds a proof's text.
const maxProof = 512

// Replays remembers which connection used a nonce, for as long as a proof with that nonce counts as fresh. It is safe
// for concurrent use. The zero value is empty.
type Replays struct {
	mu    sync.Mutex
	first map[[NonceSize]byte]seen
	of    map[string]int // number of nonces in first, by party
	sweep time.Time
}

type seen struct {
	ch    *Channel
	party string
	until time.Time
}

// maxNonces bounds Replays. maxOfParty bounds the nonces of one tenant, so that no tenant keeps others from connecting.
// Only nonces of valid proofs are stored.
const (
	maxNonces  = 1 << 17
	maxOfParty = maxNonces / 8
)

// take assigns a nonce to a channel. It returns an error if another channel has used the nonce, or if too many nonces
// are stored. party is the tenant; empty means an operator, who may use all the space.
func (r *Replays) take(nonce [NonceSize]byte, party string, ch *Channel, now time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.first == nil {
		r.first, r.of = map[[NonceSize]byte]seen{}, map[string]int{}
	}
	if now.After(r.sweep) {
		for n, s := range r.first {
			if now.After(s.until) {
				delete(r.first, n)
				if r.of[s.party]--; r.of[s.party] == 0 {
					delete(r.of, s.party)
				}
			}
		}
		r.sweep = now.Add(Leeway)
	}
	if s, ok := r.first[nonce]; ok {
		if s.ch != ch {
			return refuse(Replayed, "the proof was already used on another connection")
		}
		return nil
	}
	if len(r.first) >= maxNonces {
		return refuse(Overload, "more than %d new connections within %v", maxNonces, 2*Leeway)
	}
	if party != "" && r.of[party] >= maxOfParty {
		return refuse(Overload, "more than %d new connections of tenant %q within %v", maxOfParty, party, 2*Leeway)
	}
	r.first[nonce] = seen{ch, party, now.Add(2*Leeway + time.Second)}
	r.of[party]++
	return nil
}

// check verifies a proof of a party that came over ch. good verifies its signature.
func (r *Replays) check(scheme, credential, text, party string, ch *Channel, now time.Time, good func(m, sig []byte) bool) error {
	if len(text) > maxProof {
		return refuse(Malformed, "%s: the proof has %d bytes, want at most %d", scheme, len(text), maxProof)
	}
	parts := strings.Split(text, ".")
	if len(parts) != 4 {
		return refuse(Malformed, "%s: the proof has %d parts, want 4", scheme, len(parts))
	}
	ms, err := strconv.ParseInt(parts[0], 10, 64)
	if err != nil || ms < 0 || ms > maxTime*1000 {
		return refuse(Malformed, "%s: the proof's time %.30q is not a number of milliseconds", scheme, parts[0])
	}
	var raw [3][]byte
	for i := range raw {
		if raw[i], err = base64.RawURLEncoding.Strict().DecodeString(parts[i+1]); err != nil {
			return refuse(Malformed, "%s: part %d of the proof is not base64", scheme, i+2)
		}
	}
	nonce, address, sig := raw[0], string(raw[1]), raw[2]
	if ch.Binding == nil && len(nonce) != NonceSize || ch.Binding != nil && len(nonce) != 0 {
		return refuse(Malformed, "%s: the proof's nonce has %d bytes", scheme, len(nonce))
	}
	signed := &Channel{Binding: ch.Binding, Nonce: nonce}
	if !good(message(scheme, credential, parts[0], address, signed), sig) {
		if ch.Binding != nil {
			return refuse(Wrong, "wrong %s, or a proof that was made for another connection", scheme)
		}
		return refuse(Wrong, "wrong %s", scheme)
	}
	if made := time.UnixMilli(ms); now.Sub(made).Abs() > Leeway {
		return refuse(Skew, "%s: the caller's clock said %s and this clock says %s: they differ by %v, at most %v is accepted; set the clocks",
			scheme, stamp(made), stamp(now), now.Sub(made).Abs().Round(time.Second), Leeway)
	}
	if address != ch.Address {
		return refuse(Replayed, "%s: the proof was made for the address %q, but this is %q (address translation needs TLS)", scheme, address, ch.Address)
	}
	if ch.Binding != nil {
		return nil
	}
	return r.take([NonceSize]byte(nonce), party, ch, now)
}

// SecretVerifier accepts proofs of a shared secret. A caller with the secret is an operator: all of them are one user.
type SecretVerifier struct {
	Secret  []byte
	Replays *Replays
}

// Scheme returns SchemeSecret.
func (v *SecretVerifier) Scheme() string { return SchemeSecret }

// Verify implements Verifier.
func (v *SecretVerifier) Verify(credential string, ch *Channel, now time.Time) (Identity, error) {
	err := v.Replays.check(SchemeSecret, "", credential, "", ch, now, func(m, sig []byte) bool {
		return hmac.Equal(mac(v.Secret, m), sig)
	})
	if err != nil {
		return Identity{}, err
	}
	return Identity{By: SchemeSecret, Name: "operator by secret", Role: RoleOperator}, nil
}

// Recheck implements Verifier. It always succeeds: a secret does not expire.
func (v *SecretVerifier) Recheck(*Identity, string, time.Time) error { return nil }

// TokenVerifier accepts tokens with proofs.
type TokenVerifier struct {
	// Keys returns the public keys of issuers, and a generation that changes with them.
	Keys    func(now time.Time) ([]ed25519.PublicKey, uint64)
	Revoked *Revocations
	Replays *Replays
}

// Scheme returns SchemeToken.
func (v *TokenVerifier) Scheme() string { return SchemeToken }

// Verify checks signature, proof, revocation and time.
func (v *TokenVerifier) Verify(credential string, ch *Channel, now time.Time) (Identity, error) {
	token, text, ok := strings.Cut(credential, " ")
	if !ok {
		return Identity{}, refuse(Malformed, "token: the proof that the caller owns it is missing")
	}
	keys, generation := v.Keys(now)
	c, err := verifyToken(token, keys)
	if err != nil {
		return Identity{}, err
	}
	role, err := ParseRole(c.Role)
	if err != nil {
		return Identity{}, err // impossible: Check has parsed it
	}
	party := c.Tenant
	if role == RoleOperator {
		party = ""
	}
	err = v.Replays.check(SchemeToken, token, text, party, ch, now, func(m, sig []byte) bool {
		return ed25519.Verify(c.Key, m, sig)
	})
	if err != nil {
		return Identity{}, err
	}
	if err := v.standing(&c, now); err != nil {
		return Identity{}, err
	}
	return Identity{By: SchemeToken, Name: c.Tenant + " by token " + c.ID, Tenant: c.Tenant, UID: c.UID, Role: role,
		Expires: time.Unix(c.Ends, 0), generation: generation}, nil
}

// standing returns an error if claims have expired or are revoked.
func (v *TokenVerifier) standing(c *Claims, now time.Time) error {
	if err := c.checkTime(now); err != nil {
		return err
	}
	return v.Revoked.refuse(RevokedToken, c.ID, fmt.Sprintf("token %s of tenant %q", c.ID, c.Tenant), now)
}

// Recheck checks the time, the list of revoked tokens and, if the issuers' keys have changed, the signature.
func (v *TokenVerifier) Recheck(id *Identity, credential string, now time.Time) error {
	token, _, _ := strings.Cut(credential, " ")
	var c Claims
	var err error
	if keys, generation := v.Keys(now); generation != id.generation {
		c, err = verifyToken(token, keys)
	} else {
		c, err = ReadClaims(token)
	}
	if err != nil {
		return err
	}
	return v.standing(&c, now)
}
