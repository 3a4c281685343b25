package identity

import (
	"crypto/ed25519"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

// Kinds of credentials that can be revoked.
const (
	RevokedToken = "token" // by the token's id
	RevokedNode  = "node"  // by the serial number of the certificate, as NodeSerial writes it
)

// Revocation is one line of a list.
type Revocation struct {
	Kind string
	ID   string
	Note string // for people: at most maxNote bytes of UTF-8 without control characters
}

// RevocationList lists the credentials that a cluster has revoked. It is a text, signed by the cluster's token key:
//
//	rfaas revocation list v1
//	serial 7
//	made 2026-03-01T12:00:00Z
//	token 00112233445566778899aabbccddeeff ann has left
//	node 0a0b0c0d0e0f00112233445566778899 stolen
//	signature BASE64(Ed25519 signature of all lines before)
//
// Each change has a higher serial number. A list in any other form is refused.
type RevocationList struct {
	Serial  uint64
	Made    time.Time
	Entries []Revocation
}

const (
	revokedHead = "rfaas revocation list v1\n"
	maxNote     = 200
	maxRevoked  = 16 << 20 // bytes of a list
)

// check returns an error for a malformed entry.
func (e *Revocation) check() error {
	id, err := hex.DecodeString(e.ID)
	switch {
	case e.Kind != RevokedToken && e.Kind != RevokedNode:
		return fmt.Errorf("%.40q is neither token nor node", e.Kind)
	case err != nil || len(id) < idSize || len(id) > idSize+4 || e.Kind == RevokedToken && len(id) != idSize || hex.EncodeToString(id) != e.ID:
		return fmt.Errorf("%s id %.60q is not %d hexadecimal digits in lower case", e.Kind, e.ID, 2*idSize)
	case len(e.Note) > maxNote || !utf8.ValidString(e.Note) || strings.ContainsFunc(e.Note, unicode.IsControl) || strings.TrimSpace(e.Note) != e.Note:
		return fmt.Errorf("%s %s: the note %.250q is not at most %d bytes of UTF-8 without control characters", e.Kind, e.ID, e.Note, maxNote)
	}
	return nil
}

// Has reports whether a credential is in the list.
func (l *RevocationList) Has(kind, id string) bool {
	return slices.ContainsFunc(l.Entries, func(e Revocation) bool { return e.Kind == kind && e.ID == id })
}

// Sign returns the text of a list, signed with key.
func (l *RevocationList) Sign(key ed25519.PrivateKey) ([]byte, error) {
	if l.Serial == 0 {
		return nil, errors.New("revocation list: serial 0, want 1 or more")
	}
	b := fmt.Appendf(nil, "%sserial %d\nmade %s\n", revokedHead, l.Serial, stamp(l.Made))
	for _, e := range l.Entries {
		if err := e.check(); err != nil {
			return nil, fmt.Errorf("revocation list: %w", err)
		}
		b = append(append(b, strings.TrimSpace(e.Kind+" "+e.ID+" "+e.Note)...), '\n')
	}
	b = fmt.Appendf(b, "signature %s\n", base64.StdEncoding.EncodeToString(ed25519.Sign(key, b)))
	if len(b) > maxRevoked {
		return nil, fmt.Errorf("revocation list: %d bytes, want at most %d", len(b), maxRevoked)
	}
	return b, nil
}

// ErrUnsigned means that the file is a list of revoked tokens from an earlier version, which did not sign it.
var ErrUnsigned = errors.New("the list is not signed")

// ParseRevocations reads a list that one of the keys has signed.
func ParseRevocations(b []byte, keys []ed25519.PublicKey) (*RevocationList, error) {
	text := string(b)
	switch at := strings.LastIndex(text, "\nsignature "); {
	case text == "":
		return nil, errors.New("the file is empty")
	case !strings.HasPrefix(text, revokedHead):
		return nil, fmt.Errorf("%w: its first line is not %q", ErrUnsigned, strings.TrimSpace(revokedHead))
	case at < 0:
		return nil, errors.New("the list has no signature: it is incomplete")
	default:
		signed := text[:at+1]
		last, whole := strings.CutSuffix(text[at+len("\nsignature "):], "\n")
		sig, err := base64.StdEncoding.Strict().DecodeString(last)
		if err != nil || len(sig) != ed25519.SignatureSize || !whole || strings.ContainsAny(last, "\r\n") { // base64 ignores line ends
			return nil, errors.New("the list's signature is malformed: the list is incomplete")
		}
		if !signedBy(keys, []byte(signed), sig) {
			return nil, errors.New("the list is not signed by this cluster's key")
		}
		return parseRevocations(strings.TrimPrefix(signed, revokedHead))
	}
}

// ReadRevocations reads the text of a list, unchecked. A missing file is fs.ErrNotExist.
func ReadRevocations(path string) ([]byte, error) { return Opener(nil).read(path, false, maxRevoked) }

func signedBy(keys []ed25519.PublicKey, m, sig []byte) bool {
	for _, k := range keys {
		if ed25519.Verify(k, m, sig) {
			return true
		}
	}
	return false
}

func parseRevocations(text string) (*RevocationList, error) {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if len(lines) < 2 {
		return nil, errors.New("the list has no serial number and no time")
	}
	var l RevocationList
	var err error
	serial, ok := strings.CutPrefix(lines[0], "serial ")
	if l.Serial, err = strconv.ParseUint(serial, 10, 63); !ok || err != nil || l.Serial == 0 {
		return nil, fmt.Errorf("the list's second line is %.60q, want its serial number", lines[0])
	}
	made, ok := strings.CutPrefix(lines[1], "made ")
	if l.Made, err = time.Parse(time.RFC3339, made); !ok || err != nil {
		return nil, fmt.Errorf("the list's third line is %.60q, want its time", lines[1])
	}
	for i, line := range lines[2:] {
		kind, rest, _ := strings.Cut(line, " ")
		id, note, _ := strings.Cut(rest, " ")
		e := Revocation{Kind: kind, ID: id, Note: note}
		if err := e.check(); err != nil {
			return nil, fmt.Errorf("line %d of the list: %w", i+4, err)
		}
		l.Entries = append(l.Entries, e)
	}
	return &l, nil
}

// Revocations is a list in a file that is reloaded when it changes. A newer list that another daemon sent replaces it. It is safe for
// concurrent use.
type Revocations struct {
	list reloaded[*indexed]
	keys func(now time.Time) []ed25519.PublicKey
	log  *slog.Logger

	mu   sync.Mutex
	sent *indexed // by another daemon; nil: none
}

type indexed struct {
	*RevocationList
	text string
	has  map[string]bool // "kind id"
}

func index(l *RevocationList, text []byte) *indexed {
	x := &indexed{l, string(text), make(map[string]bool, len(l.Entries))}
	for _, e := range l.Entries {
		x.has[e.Kind+" "+e.ID] = true
	}
	return x
}

// errOlder means that a list is older than the one in use.
var errOlder = errors.New("older than the list in use")

// NewRevocations returns the list in a file, which one of the keys must have signed.
func NewRevocations(path string, open Opener, keys func(now time.Time) []ed25519.PublicKey, log *slog.Logger) *Revocations {
	r := &Revocations{keys: keys, log: log}
	r.list = reloaded[*indexed]{open: open, paths: []string{path}}
	var said string
	r.list.make = func() (*indexed, error) {
		b, err := open.read(path, false, maxRevoked)
		var l *RevocationList
		if err == nil {
			l, err = ParseRevocations(b, keys(r.list.looked))
		}
		old := r.list.value
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("revocation list %s: the file is missing, so the daemon cannot tell which credentials are revoked (copy `revoked` from the cluster's "+
				"directory here; rfaas cluster revoked --new creates it there)", path)
		case errors.Is(err, ErrUnsigned):
			return nil, fmt.Errorf("revocation list %s: %w (sign it in the cluster's directory with rfaas cluster revoked --new, and copy it here)", path, err)
		case err != nil:
			return nil, fmt.Errorf("revocation list %s: %w (copy `revoked` from the cluster's directory here, by rename)", path, err)
		case old != nil && l.Serial < old.Serial:
			return nil, fmt.Errorf("revocation list %s: serial %d is %w, %d (copy the current list here; if it was lost, see docs/operations.md, "+
				"\"Revocation\")", path, l.Serial, errOlder, old.Serial)
		case old != nil && l.Serial == old.Serial && string(b) != old.text:
			return nil, fmt.Errorf("revocation list %s: it has the same serial %d as the list in use but different content, so it may be %w",
				path, l.Serial, errOlder)
		}
		return index(l, b), nil
	}
	r.list.told = func(l *indexed, err error) {
		switch {
		case err == nil:
			said = ""
			log.Info("reloaded the revocation list", "file", path, "serial", l.Serial, "entries", len(l.Entries))
		case err.Error() == said:
		case errors.Is(err, errOlder):
			said = err.Error()
			log.Warn("refused the new revocation list; the old one stays in use", "error", err)
		default:
			said = err.Error()
			log.Error("the revocation list is invalid: refusing all tokens and node certificates", "error", err)
		}
	}
	return r
}

// Current returns the list in use, or an error if there is no valid list.
func (r *Revocations) Current(now time.Time) (*RevocationList, error) {
	l, err := r.current(now)
	if err != nil {
		return nil, err
	}
	return l.RevocationList, nil
}

func (r *Revocations) current(now time.Time) (*indexed, error) {
	l, generation, err := r.list.get(now)
	if err != nil && (generation == 0 || !errors.Is(err, errOlder)) {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sent != nil && r.sent.Serial > l.Serial {
		return r.sent, nil
	}
	return l, nil
}

// Adopt replaces the list in use by text, a list that another daemon sent. It returns false without an error if the list is not newer than
// the one in use, and an error if the list is not signed by the cluster. Without a valid list in the file, all credentials
// stay refused.
func (r *Revocations) Adopt(text []byte, now time.Time) (bool, error) {
	if len(text) > maxRevoked {
		return false, fmt.Errorf("revocation list: %d bytes, want at most %d", len(text), maxRevoked)
	}
	l, err := ParseRevocations(text, r.keys(now))
	if err != nil {
		return false, fmt.Errorf("revocation list: %w", err)
	}
	if l.Serial <= r.Serial(now) {
		return false, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sent != nil && l.Serial <= r.sent.Serial {
		return false, nil
	}
	r.sent = index(l, text)
	r.log.Info("adopted a newer revocation list", "serial", l.Serial, "entries", len(l.Entries))
	return true, nil
}

// Text returns the signed text and the serial number of the list in use, or an error if there is no valid list.
func (r *Revocations) Text(now time.Time) (string, uint64, error) {
	l, err := r.current(now)
	if err != nil {
		return "", 0, err
	}
	return l.text, l.Serial, nil
}

// Serial returns the serial number of the list in use, or 0 if there is no valid list.
func (r *Revocations) Serial(now time.Time) uint64 {
	l, err := r.current(now)
	if err != nil {
		return 0
	}
	return l.Serial
}

// Has reports whether a credential is revoked. It returns an error if there is no valid list.
func (r *Revocations) Has(kind, id string, now time.Time) (bool, error) {
	l, err := r.current(now)
	if err != nil {
		return false, err
	}
	return l.has[kind+" "+id], nil
}

// nextStep says what to do about a revoked credential.
var nextStep = map[string]string{
	RevokedToken: "get another one with rfaas token get, or from the administrator",
	RevokedNode:  "the node needs another one, by rfaas cluster join --again with a new code or rfaas cluster node",
}

// refuse returns an error if a credential is revoked, or if there is no valid list. what names the credential.
func (r *Revocations) refuse(kind, id, what string, now time.Time) error {
	revoked, err := r.Has(kind, id, now)
	switch {
	case err != nil:
		return refuse(Revoked, "%s: cannot check whether it is revoked: %v", what, err)
	case revoked:
		return refuse(Revoked, "%s: revoked: %s", what, nextStep[kind])
	}
	return nil
}
