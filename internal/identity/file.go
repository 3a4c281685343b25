package identity

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// maxFile is the largest size of a file that this package reads.
const maxFile = 1 << 20

// Environment variables that say where a user's credentials are.
const (
	TokenFileEnv = "RFAAS_TOKEN_FILE"
	CAFileEnv    = "RFAAS_CA_FILE"
)

// TokenPath returns the path of this user's token: $RFAAS_TOKEN_FILE, else ~/.rfaas/token. named is true for the
// former. The path is empty if neither variable is set.
func TokenPath(getenv func(string) string) (path string, named bool) {
	if p := getenv(TokenFileEnv); p != "" {
		return p, true
	}
	if d := getenv("HOME"); d != "" {
		return filepath.Join(d, ".rfaas", "token"), false
	}
	return "", false
}

// Credentials are the content of a user's token file.
type Credentials struct {
	Token  string
	Claims Claims
	Key    ed25519.PrivateKey // of the token's owner
	CA     []byte             // certificates to check servers with, PEM; may be nil
	Issuer string             // address of the issuer that gave the token by MUNGE, and gives the next one; empty: none
}

const (
	pemToken = "RFAAS TOKEN"
	pemKey   = "PRIVATE KEY"
	pemCert  = "CERTIFICATE"
	pemPub   = "PUBLIC KEY"
)

// issuerHeader names the header of a token file that has Credentials.Issuer.
const issuerHeader = "Issuer"

// Encode returns the content of a token file.
func (c *Credentials) Encode() ([]byte, error) {
	key, err := x509.MarshalPKCS8PrivateKey(c.Key)
	if err != nil {
		return nil, err
	}
	headers := map[string]string{"Tenant": c.Claims.Tenant, "Expires": stamp(time.Unix(c.Claims.Ends, 0))}
	if c.Issuer != "" {
		headers[issuerHeader] = c.Issuer
	}
	b := pem.EncodeToMemory(&pem.Block{Type: pemToken, Headers: headers, Bytes: []byte(c.Token)})
	b = append(b, pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: key})...)
	return append(b, c.CA...), nil
}

// LoadCredentials reads a token file. The file must belong to this user or root, and must not be accessible to others.
// The error is fs.ErrNotExist for a missing file, and an *Error for a file with other content.
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
			c.Token, c.Issuer = string(block.Bytes), block.Headers[issuerHeader]
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
			return nil, refuse(Malformed, "it contains a %.40q, want token, key and certificate", block.Type)
		}
	}
	var err error
	switch {
	case c.Token == "":
		return nil, refuse(Malformed, "it contains no token (want a PEM file of rfaas token issue)")
	case c.Key == nil:
		return nil, refuse(Malformed, "it contains no key")
	}
	if c.Claims, err = ReadClaims(c.Token); err != nil {
		return nil, err
	}
	if pub, ok := c.Key.Public().(ed25519.PublicKey); !ok || !pub.Equal(ed25519.PublicKey(c.Claims.Key)) {
		return nil, refuse(Wrong, "its key is not the one that the token names")
	}
	return &c, nil
}

// ReadPrivate reads a file that must belong to this user or root and must not be accessible to others.
func ReadPrivate(path string) ([]byte, error) { return Opener(nil).read(path, true, maxFile) }

// WriteFile writes a file atomically: a reader sees the old or the new content. If fresh is set, an existing file is an
// error (fs.ErrExist).
func WriteFile(path string, b []byte, mode os.FileMode, fresh bool) error {
	tmp, err := stage(path, b, mode)
	if err != nil {
		return err
	}
	defer os.Remove(tmp)
	if fresh {
		if err := os.Link(tmp, path); err != nil {
			return fmt.Errorf("%s: %w", path, errors.Unwrap(err))
		}
		return nil
	}
	return os.Rename(tmp, path)
}

// stage writes and syncs a temporary file beside path, and returns its path. The caller renames or removes it.
func stage(path string, b []byte, mode os.FileMode) (string, error) {
	tmp := stagedPath(filepath.Dir(path), filepath.Base(path), strconv.FormatUint(rand.Uint64(), 10))
	return tmp, stageAt(tmp, b, mode, -1, -1)
}

// stageLike is stage with a given suffix, and with the owner and the mode of the file that is at path now. If there is no such file, the new one belongs
// to this process and has the given mode. Other users get no access to a file whose mode is 0600, even if they had access before.
func stageLike(path, suffix string, b []byte, mode os.FileMode) error {
	uid, gid := -1, -1
	if st, err := os.Lstat(path); err == nil && st.Mode().IsRegular() {
		if sys, ok := st.Sys().(*syscall.Stat_t); ok {
			uid, gid = int(sys.Uid), int(sys.Gid)
		}
		if mode == 0o600 {
			mode = st.Mode().Perm() &^ 0o077
		} else {
			mode = st.Mode().Perm()
		}
	}
	return stageAt(stagedPath(filepath.Dir(path), filepath.Base(path), suffix), b, mode, uid, gid)
}

func stageAt(path string, b []byte, mode os.FileMode, uid, gid int) error {
	tmp, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if (uid >= 0 || gid >= 0) && !owns(tmp, uid, gid) {
		err = tmp.Chown(uid, gid)
	}
	if err != nil {
		err = fmt.Errorf("%s belongs to user %d and group %d, and the new file must too: %w (run the command as root or as that user)", path, uid, gid, err)
	}
	if err == nil {
		_, err = tmp.Write(b)
	}
	if err == nil {
		err = tmp.Chmod(mode)
	}
	if err == nil {
		err = tmp.Sync()
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		os.Remove(path)
	}
	return err
}

// owns reports whether a file belongs to a user and a group.
func owns(f *os.File, uid, gid int) bool {
	st, err := f.Stat()
	if err != nil {
		return false
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && int(sys.Uid) == uid && int(sys.Gid) == gid
}

// Unchanged reports whether a file is the same as when it was examined before. The modification time alone is not
// enough: it stays the same for a few milliseconds.
func Unchanged(before, now os.FileInfo) bool {
	return before != nil && os.SameFile(before, now) && before.ModTime().Equal(now.ModTime()) && before.Size() == now.Size()
}
