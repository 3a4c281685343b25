package control

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// SecretFileEnv names the environment variable that overrides the secret file's path.
const SecretFileEnv = "RFAAS_SECRET_FILE"

// Secret is the shared secret of one user's daemons and clients. It does not print itself.
type Secret [32]byte

// String hides the secret, so that no log or error shows it by accident.
func (Secret) String() string { return "(secret)" }

// GoString hides the secret from %#v too.
func (Secret) GoString() string { return "control.Secret{...}" }

// Hex returns the secret as it stands in the file.
func (s Secret) Hex() string { return hex.EncodeToString(s[:]) }

// SecretPath returns where the secret of this user is: $RFAAS_SECRET_FILE, else rfaas/secret in $XDG_RUNTIME_DIR
// if that is set, else .rfaas/secret in $HOME. getenv is usually os.Getenv. The file need not exist.
func SecretPath(getenv func(string) string) (string, error) {
	if p := getenv(SecretFileEnv); p != "" {
		return p, nil
	}
	if d := getenv("XDG_RUNTIME_DIR"); d != "" {
		return filepath.Join(d, "rfaas", "secret"), nil
	}
	if d := getenv("HOME"); d != "" {
		return filepath.Join(d, ".rfaas", "secret"), nil
	}
	return "", fmt.Errorf("no place for the secret file: none of %s, XDG_RUNTIME_DIR and HOME is set", SecretFileEnv)
}

// LoadSecret reads the secret from path. The file must belong to this user or root, and must not be accessible to
// others: otherwise another user could have chosen or read it. The error is fs.ErrNotExist for a missing file.
func LoadSecret(path string) (Secret, error) {
	var s Secret
	b, err := identity.ReadPrivate(path)
	if err != nil {
		return s, fmt.Errorf("secret: %w", err)
	}
	text := strings.TrimSpace(string(b))
	if len(text) != hex.EncodedLen(len(s)) {
		return s, fmt.Errorf("secret: %s holds %d characters, want %d hexadecimal digits", path, len(text), hex.EncodedLen(len(s)))
	}
	if _, err := hex.Decode(s[:], []byte(text)); err != nil {
		return Secret{}, fmt.Errorf("secret: %s is not hexadecimal", path)
	}
	return s, nil
}

// EnsureSecret loads the secret from path and creates it if it does not exist. Daemons that start at the same moment
// agree on one secret.
func EnsureSecret(path string) (Secret, error) {
	s, err := LoadSecret(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return s, err
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return s, fmt.Errorf("secret: %w", err)
	}
	rand.Read(s[:])
	tmp, err := os.CreateTemp(dir, ".secret-*") // mode 0600
	if err != nil {
		return Secret{}, fmt.Errorf("secret: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(s.Hex() + "\n")
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return Secret{}, fmt.Errorf("secret: %w", err)
	}
	// link, not rename: the second of two daemons must use the secret of the first.
	if err := os.Link(tmp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return Secret{}, fmt.Errorf("secret: %w", err)
	}
	return LoadSecret(path)
}
