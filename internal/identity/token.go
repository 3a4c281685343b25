package identity

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// tokenPrefix begins every token and names the version of its form:
//
//	rfaas1.BASE64URL(claims as JSON).BASE64URL(Ed25519 signature of all before the last dot)
const tokenPrefix = "rfaas1."

const (
	maxToken   = 2048 // bytes
	maxTenant  = 64   // bytes, as for an account's name
	idSize     = 16
	maxTime    = 1 << 40 // Unix seconds; small enough that arithmetic does not overflow
	noneUID    = 1<<32 - 1
	defaultFor = 30 * 24 * time.Hour
)

// Claims are what a token says. All but UID are mandatory.
type Claims struct {
	ID     string  `json:"id"`     // 16 random bytes, hexadecimal; revocation lists name it
	Tenant string  `json:"tenant"` // 1 to 64 bytes of UTF-8 without control characters
	UID    *uint32 `json:"uid,omitempty"`
	Role   string  `json:"role"` // "tenant" or "operator"
	Key    []byte  `json:"key"`  // Ed25519 public key of the owner
	Begins int64   `json:"nbf"`  // Unix seconds
	Ends   int64   `json:"exp"`  // after Begins
}

// Check returns an error for malformed claims. It does not check the signature or the time.
func (c *Claims) Check() error {
	if !IsTokenID(c.ID) {
		return refuse(Malformed, "token: id %.40q is not %d bytes of hexadecimal", c.ID, idSize)
	}
	if err := CheckTenant(c.Tenant); err != nil {
		return err
	}
	if r, err := ParseRole(c.Role); err != nil || r == RoleNode { // only certificates have that role
		return refuse(Malformed, "token: role %.40q is neither tenant nor operator", c.Role)
	}
	if len(c.Key) != ed25519.PublicKeySize {
		return refuse(Malformed, "token: the owner's key has %d bytes, want %d", len(c.Key), ed25519.PublicKeySize)
	}
	if c.UID != nil && (*c.UID == 0 || *c.UID == noneUID) {
		return refuse(Malformed, "token: uid %d is root or invalid, want an ordinary user", *c.UID)
	}
	if c.Begins < 0 || c.Ends <= c.Begins || c.Ends > maxTime {
		return refuse(Malformed, "token: valid from %d to %d (Unix seconds) is not a valid interval", c.Begins, c.Ends)
	}
	return nil
}

// IsTokenID reports whether a text has the form of a token's id: 32 hexadecimal digits in lower case.
func IsTokenID(s string) bool {
	id, err := hex.DecodeString(s)
	return err == nil && len(id) == idSize && hex.EncodeToString(id) == s
}

// CheckTenant returns an error for a name that a tenant in a token may not have.
func CheckTenant(name string) error {
	if name == "" || len(name) > maxTenant || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
		return refuse(Malformed, "tenant %.80q has %d bytes, want 1 to %d of UTF-8 without control characters", name, len(name), maxTenant)
	}
	return nil
}

// Issue signs a token. An empty ID is chosen at random. An empty Ends is 30 days after Begins; an empty Begins is now.
func Issue(key ed25519.PrivateKey, c Claims, now time.Time) (string, Claims, error) {
	if c.ID == "" {
		var id [idSize]byte
		rand.Read(id[:])
		c.ID = hex.EncodeToString(id[:])
	}
	if c.Begins == 0 {
		c.Begins = now.Unix()
	}
	if c.Ends == 0 {
		c.Ends = c.Begins + int64(defaultFor/time.Second)
	}
	if err := c.Check(); err != nil {
		return "", c, err
	}
	text, err := json.Marshal(c)
	if err != nil {
		return "", c, err
	}
	signed := tokenPrefix + base64.RawURLEncoding.EncodeToString(text)
	return signed + "." + base64.RawURLEncoding.EncodeToString(ed25519.Sign(key, []byte(signed))), c, nil
}

// ReadClaims returns the claims of a token without checking its signature.
func ReadClaims(token string) (Claims, error) {
	c, _, _, err := parseToken(token)
	return c, err
}

func parseToken(token string) (c Claims, signed, sig []byte, err error) {
	if len(token) > maxToken {
		return c, nil, nil, refuse(Malformed, "token: it has %d bytes, want at most %d", len(token), maxToken)
	}
	body, ok := strings.CutPrefix(token, tokenPrefix)
	if !ok {
		return c, nil, nil, refuse(Malformed, "token: it does not begin with %q", tokenPrefix)
	}
	claims, tail, ok := strings.Cut(body, ".")
	if !ok {
		return c, nil, nil, refuse(Malformed, "token: the signature is missing")
	}
	strict := base64.RawURLEncoding.Strict()
	if sig, err = strict.DecodeString(tail); err != nil || len(sig) != ed25519.SignatureSize {
		return c, nil, nil, refuse(Malformed, "token: the signature is not %d bytes of base64", ed25519.SignatureSize)
	}
	text, err := strict.DecodeString(claims)
	if err != nil {
		return c, nil, nil, refuse(Malformed, "token: the claims are not base64")
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields() // a claim that this version does not know cannot be enforced
	if err := d.Decode(&c); err != nil {
		return c, nil, nil, refuse(Malformed, "token: the claims: %v", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return c, nil, nil, refuse(Malformed, "token: more than one set of claims")
	}
	if err := c.Check(); err != nil {
		return c, nil, nil, err
	}
	return c, []byte(tokenPrefix + claims), sig, nil
}

// verifyToken checks the form and the signature with any of the keys, but not the time.
func verifyToken(token string, keys []ed25519.PublicKey) (Claims, error) {
	c, signed, sig, err := parseToken(token)
	if err != nil {
		return c, err
	}
	for _, k := range keys {
		if ed25519.Verify(k, signed, sig) {
			return c, nil
		}
	}
	return c, refuse(Wrong, "token %s of tenant %q: not signed by this cluster's key", c.ID, c.Tenant)
}

// checkTime returns an error if claims are not valid now. The clock may differ by Leeway.
func (c *Claims) checkTime(now time.Time) error {
	begins, ends := time.Unix(c.Begins, 0), time.Unix(c.Ends, 0)
	switch {
	case now.Add(Leeway).Before(begins):
		return refuse(TooEarly, "token %s of tenant %q: valid from %s, but it is %s here: %v too early, or a clock is wrong",
			c.ID, c.Tenant, stamp(begins), stamp(now), begins.Sub(now).Round(time.Second))
	case !now.Before(ends):
		return refuse(Expired, "token %s of tenant %q: expired at %s, %v ago: ask the administrator to renew it by `rfaas token renew`", c.ID, c.Tenant, stamp(ends),
			now.Sub(ends).Round(time.Second))
	}
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
