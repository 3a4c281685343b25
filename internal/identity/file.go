package identity

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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
func ReadPrivate(path string) ([]byte, error) { return Opener(nil).read(path, true, maxFile) }

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
