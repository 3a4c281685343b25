package identity

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// maxFile bounds every file that is read here.
const maxFile = 1 << 20

// Environment variables that say where a user's credentials are.
const (
	TokenFileEnv = "RFAAS_TOKEN_FILE"
	CAFileEnv    = "RFAAS_CA_FILE"
)

// TokenPath returns where the token of this user is: $RFAAS_TOKEN_FILE, else ~/.rfaas/token. named says that it was the
// former. Empty: nowhere.
func TokenPath(getenv func(string) string) (path string, named bool) {
	if p := getenv(TokenFileEnv); p != "" {
		return p, true
	}
	if d := getenv("HOME"); d != "" {
		return filepath.Join(d, ".rfaas", "token"), false
	}
	return "", false
}

// Credentials are what a user has: the content of a token file.
type Credentials struct {
	Token  string
	Claims Claims
	Key    ed25519.PrivateKey // of the holder
	CA     []byte             // certificates that servers are checked with, PEM; nil: none
}

const (
	pemToken = "RFAAS TOKEN"
	pemKey   = "PRIVATE KEY"
	pemCert  = "CERTIFICATE"
	pemPub   = "PUBLIC KEY"
)

// Encode writes the content of a token file.
func (c *Credentials) Encode() ([]byte, error) {
	key, err := x509.MarshalPKCS8PrivateKey(c.Key)
	if err != nil {
		return nil, err
	}
	b := pem.EncodeToMemory(&pem.Block{Type: pemToken, Headers: map[string]string{"Tenant": c.Claims.Tenant, "Expires": stamp(time.Unix(c.Claims.Ends, 0))},
		Bytes: []byte(c.Token)})
	b = append(b, pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: key})...)
	return append(b, c.CA...), nil
}

// LoadCredentials reads a token file. It must be closed to everybody but its owner, who is this user or root. An absent
// file is fs.ErrNotExist, a file that holds something else an *Error.
func LoadCredentials(path string) (*Credentials, error) {
	b, err := ReadPrivate(path)
	if err != nil {
		return nil, fmt.Errorf("token: %w", err)
	}
	c, err := ParseCredentials(b)
	if err != nil {
		var e *Error
		if errors.As(err, &e) {
			return nil, refuse(e.Reason, "token file %s: %s", path, e.Text)
		}
		return nil, fmt.Errorf("token file %s: %w", path, err)
	}
	return c, nil
}

// ParseCredentials reads the content of a token file.
func ParseCredentials(b []byte) (*Credentials, error) {
	var c Credentials
	for rest := b; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		switch block.Type {
		case pemToken:
			c.Token = string(block.Bytes)
		case pemKey:
			key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
			k, ok := key.(ed25519.PrivateKey)
			if err != nil || !ok {
				return nil, refuse(Malformed, "its key is not an Ed25519 key")
			}
			c.Key = k
		case pemCert:
			c.CA = append(c.CA, pem.EncodeToMemory(block)...)
		default:
			return nil, refuse(Malformed, "it holds a %.40q, want token, key and certificate", block.Type)
		}
	}
	var err error
	switch {
	case c.Token == "":
		return nil, refuse(Malformed, "there is no token in it (want a PEM file of rfaas token issue)")
	case c.Key == nil:
		return nil, refuse(Malformed, "there is no key in it")
	}
	if c.Claims, err = ReadClaims(c.Token); err != nil {
		return nil, err
	}
	if pub, ok := c.Key.Public().(ed25519.PublicKey); !ok || !pub.Equal(ed25519.PublicKey(c.Claims.Key)) {
		return nil, refuse(Wrong, "its key is not the one that the token names")
	}
	return &c, nil
}

// ReadPrivate reads a file that only its owner, this user or root, may reach.
func ReadPrivate(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s has mode %04o, others can reach it; chmod 600 it", path, st.Mode().Perm())
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) != os.Geteuid() && sys.Uid != 0 {
		return nil, fmt.Errorf("%s belongs to user %d, not to this user (%d)", path, sys.Uid, os.Geteuid())
	}
	return readAll(f, path)
}

func readAll(f *os.File, path string) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(b) > maxFile {
		err = fmt.Errorf("%s has more than %d bytes", path, maxFile)
	}
	return b, err
}

// WriteFile writes a file as a whole: whoever opens it sees the old or the new one. With fresh an existing file is an error
// (fs.ErrExist).
func WriteFile(path string, b []byte, mode os.FileMode, fresh bool) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(b)
	if err == nil {
		err = tmp.Chmod(mode)
	}
	if err == nil {
		err = tmp.Sync()
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	switch {
	case err != nil:
		return err
	case fresh:
		if err := os.Link(tmp.Name(), path); err != nil {
			return fmt.Errorf("%s: %w", path, errors.Unwrap(err))
		}
		return nil
	}
	return os.Rename(tmp.Name(), path)
}

// Unchanged says whether a file is still as it was when it was looked at before. Its time alone would not tell: within a few
// milliseconds it stays the same.
func Unchanged(before, now os.FileInfo) bool {
	return before != nil && os.SameFile(before, now) && before.ModTime().Equal(now.ModTime()) && before.Size() == now.Size()
}

// Revocations is the list of revoked tokens: a file with a token's id on each line, text after it ignored, and lines that begin
// with # too. It is read again when it has changed. Safe for concurrent use.
type Revocations struct {
	path string

	mu     sync.Mutex
	looked time.Time // when the file was last looked at
	last   os.FileInfo
	ids    map[string]bool
	err    error
}

// lookAgain is how long a look at the file counts.
const lookAgain = time.Second

// NewRevocations makes the list of a file. A file that is not there is an empty list.
func NewRevocations(path string) *Revocations { return &Revocations{path: path} }

// Has says whether a token is revoked. A list that cannot be read is an error: nobody knows what is in it.
func (r *Revocations) Has(id string, now time.Time) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ids == nil || now.Sub(r.looked).Abs() >= lookAgain {
		r.looked = now
		r.read()
	}
	return r.ids[id], r.err
}

func (r *Revocations) read() {
	st, err := os.Stat(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		r.ids, r.err, r.last = map[string]bool{}, nil, nil
		return
	}
	if err != nil {
		r.ids, r.err = map[string]bool{}, err
		return
	}
	if r.err == nil && Unchanged(r.last, st) {
		return
	}
	ids := map[string]bool{}
	b, err := os.ReadFile(r.path)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 0 && !strings.HasPrefix(f[0], "#") {
			ids[f[0]] = true
		}
	}
	r.ids, r.err, r.last = ids, err, st
}
