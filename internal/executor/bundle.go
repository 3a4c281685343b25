package executor

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/bundle"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// bundlePrefix begins the names of executors' directories in bundle-dir.
const bundlePrefix = "rfaas-bundles-"

// bundles is the directory in which this executor unpacks bundles. Each has a directory of its own there.
type bundles struct {
	path string
	lock *os.File // the directory, locked as long as an executor uses it
}

// openBundles makes the directory, and removes those of executors that were killed. Only the executor's user can list it.
// Workers that run as other users can open a directory in it if they know its name.
func openBundles(in string, own rights, log *slog.Logger) (b *bundles, err error) {
	in, err = filepath.Abs(in)
	uid := own.user.UID // own.do changes the rights on files only, not the effective user
	if uid == 0 {
		uid = uint32(os.Geteuid())
	}
	if err == nil {
		var made error
		err = own.do(func() {
			removeBundles(in, uid, log)
			b, made = makeBundles(in)
		})
		err = errors.Join(err, made)
	}
	if err != nil {
		return nil, fmt.Errorf("bundle-dir: %w", err)
	}
	return b, nil
}

// makeBundles makes a directory and locks it under a name that removeBundles does not look for, and then gives it its name.
func makeBundles(in string) (*bundles, error) {
	path, err := os.MkdirTemp(in, "."+bundlePrefix)
	if err != nil {
		return nil, err
	}
	b := &bundles{path: filepath.Join(in, strings.TrimPrefix(filepath.Base(path), "."))}
	if b.lock, err = os.Open(path); err == nil {
		err = unix.Flock(int(b.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err == nil {
		err = os.Chmod(path, 0o711)
	}
	if err == nil {
		err = os.Rename(path, b.path)
	}
	if err != nil {
		b.lock.Close()
		os.RemoveAll(path)
		return nil, err
	}
	return b, nil
}

// removeBundles removes the directories of a user that no running executor has locked.
func removeBundles(in string, uid uint32, log *slog.Logger) {
	found, _ := filepath.Glob(filepath.Join(in, bundlePrefix+"*"))
	for _, path := range found {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			continue // another user's
		}
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && st.Uid == uid && unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) == nil {
			log.Info("removing bundles of an executor that has ended", "directory", path, "error", os.RemoveAll(path))
		}
		unix.Close(fd)
	}
}

// close removes the directory.
func (b *bundles) close() {
	if b != nil {
		os.RemoveAll(b.path)
		b.lock.Close()
	}
}

// of returns the directory of a bundle.
func (b *bundles) of(id zygote.BundleID) string { return filepath.Join(b.path, id.String()) }

// unpack writes a bundle into a directory of its own.
func (b *bundles) unpack(from io.Reader, size uint64) (id zygote.BundleID, err error) {
	rand.Read(id[:])
	if err := os.Mkdir(b.of(id), 0o755); err != nil {
		return id, err
	}
	root, err := os.OpenRoot(b.of(id))
	if err == nil {
		err = errors.Join(os.Chmod(b.of(id), 0o755), bundle.Unpack(from, root, size)) // whatever the umask
		root.Close()
	}
	if err != nil {
		b.remove(id)
	}
	return id, err
}

func (b *bundles) remove(id zygote.BundleID) { os.RemoveAll(b.of(id)) }

// bundleKey identifies a bundle in the store of tables. No client can make a table with this hash.
func bundleKey(h sum) sum {
	h[0] = ^h[0]
	return h
}

// storeBundle receives a bundle for the store of tables.
func (s *tableStore) storeBundle(t *table, fetch func() (io.Reader, error)) error {
	from, err := fetch()
	if err != nil {
		return err
	}
	hash := sha256.New()
	read := &readError{r: io.LimitReader(from, int64(t.size))}
	all := io.TeeReader(read, hash)
	if t.bundle, err = s.bundles.unpack(all, t.size); err == nil {
		_, err = io.Copy(io.Discard, all)
		if got := sum(hash.Sum(nil)); err == nil && bundleKey(got) != t.sum {
			want := bundleKey(t.sum)
			err = invalidf("bundle: announced as SHA-256 %x, but the bytes have %x", want[:], got[:])
		}
		if err != nil {
			s.bundles.remove(t.bundle)
		}
	}
	switch {
	case err == nil:
		return nil
	case read.err != nil:
		return read.err
	case control.IsClassed(err), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.ENOMEM):
		return err
	}
	return invalidf("%v", err)
}

// readError remembers an error of a reader, so that a failed transfer is not reported as a damaged bundle.
type readError struct {
	r   io.Reader
	err error
}

func (r *readError) Read(b []byte) (int, error) {
	n, err := r.r.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		r.err = err
	}
	return n, err
}

// errNoBundles is the answer of an executor without a directory for bundles.
var errNoBundles = control.Errorf(control.ClassUnsupported, "this executor accepts no bundles: open the lease without files and with RFAAS_BUNDLE_LIBRARIES=off")

// bundleOf checks the bundle of a request. It returns nil if there is none.
func (e *Executor) bundleOf(t *control.Table) ([]tableRef, error) {
	if t == nil {
		return nil, nil
	}
	h, err := checkSum("sha256 of the bundle", t.GetSha256())
	switch {
	case err != nil:
		return nil, err
	case e.cfg.Bundles == nil:
		return nil, errNoBundles
	case t.GetSize() == 0 || t.GetSize() > e.tables.limit:
		return nil, invalidf("bundle of %d bytes: this executor keeps 1 to %d bytes of bundles and tables for a tenant (table-limit). "+
			"Name fewer or smaller files, or ask the administrator for more", t.GetSize(), e.tables.limit)
	}
	return []tableRef{{bundleKey(h), isBundle}}, nil
}

// bundleIDOf is the inverse of BundleID.String.
func bundleIDOf(text string) (id zygote.BundleID, err error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(id) || strings.ToLower(text) != text {
		return id, fmt.Errorf("%q does not identify a bundle", text)
	}
	return zygote.BundleID(b), nil
}
