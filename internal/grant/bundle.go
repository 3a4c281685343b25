package grant

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/bundle"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// BundleOptions say which files are sent with a library.
type BundleOptions struct {
	Directory   string   // of the library, for $ORIGIN; "": not known
	LibraryPath string   // LD_LIBRARY_PATH of the client
	NoLibraries bool     // the libraries that it needs do not travel
	Files       []string // absolute paths of files and directories
}

// Bundle lists what travels with a library: the libraries that it needs from outside the system's directories, and the files. It returns nil if
// there are none. It sends nothing. Errors: StatusBadLibrary for a library that cannot be found, StatusInvalid for a file.
func (c *Control) Bundle(ctx context.Context, lib *Library, o BundleOptions) (*Table, error) {
	w := bundle.Wanted{Directory: o.Directory, Files: o.Files}
	if !o.NoLibraries {
		w.Library = lib.needs
	}
	for _, dir := range strings.FieldsFunc(o.LibraryPath, func(r rune) bool { return r == ':' || r == ';' }) {
		if filepath.IsAbs(dir) {
			w.Search = append(w.Search, filepath.Clean(dir))
		}
	}
	b, err := c.bundles.Find(w, ctx.Err)
	var typed *bundle.Error
	switch {
	case errors.As(err, &typed) && typed.Libraries:
		return nil, fail("check the library", dataplane.StatusBadLibrary, "%v", err)
	case errors.As(err, &typed):
		return nil, fail("lease", dataplane.StatusInvalid, "%v", err)
	case err != nil:
		return nil, fail("lease", dataplane.StatusCancelled, "bundle: %v", err)
	case b == nil:
		return nil, nil
	}
	return &Table{Name: "bundle", Sum: b.Sum, Size: b.Size, bundle: b}, nil
}

// exposeBundle packs a bundle into memory that peers of a domain can read, until the memory is freed.
func (t *Table) exposeBundle(ctx context.Context, d *dataplane.Domain) (*dataplane.Memory, error) {
	fd, err := unix.MemfdCreate("rfaas-bundle", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fail("transfer a bundle", dataplane.StatusFatal, "%v", err)
	}
	f := os.NewFile(uintptr(fd), "bundle")
	defer f.Close()
	if err := t.bundle.Pack(struct{ io.Writer }{f}, ctx.Err); err != nil {
		return nil, fail("transfer a bundle", dataplane.StatusInvalid, "%v", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, tableSeals); err != nil {
		return nil, fail("transfer a bundle", dataplane.StatusFatal, "%v", err)
	}
	return d.File(f, t.Size)
}
