package bundle

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// page is the unit of memory in bytes: a file's content is rounded up to it, and each name takes one more.
const page = 4096

// footprint returns the memory of an unpacked item.
func footprint(size int64) int64 { return page + (size+page-1)/page*page }

// counter counts bytes, and ends early when stop returns an error.
type counter struct {
	w    io.Writer
	stop func() error
	n    int64
}

func (c *counter) Write(b []byte) (int, error) {
	if err := c.stop(); err != nil {
		return 0, err
	}
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// pack writes the archive and the zeros after it, and returns how many bytes that are.
func (b *Bundle) pack(w io.Writer, stop func() error) (int64, error) {
	c := &counter{w: w, stop: stop}
	t := tar.NewWriter(c)
	need := int64(0)
	for i := range b.items {
		need += footprint(b.items[i].size)
		if err := b.items[i].pack(t); err != nil {
			var typed *Error
			if err2 := stop(); err2 != nil {
				return 0, err2
			}
			if errors.As(err, &typed) {
				return 0, err
			}
			return 0, badFiles("bundle: %s: %v", b.items[i].name, err)
		}
	}
	if err := t.Close(); err != nil {
		return 0, err
	}
	if c.n < need {
		if _, err := io.CopyN(c, zeros{}, need-c.n); err != nil {
			return 0, err
		}
	}
	return c.n, nil
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

func (i *item) pack(t *tar.Writer) error {
	h := tar.Header{Name: i.name, Mode: int64(i.mode.Perm()), Size: i.size, Linkname: i.link, Typeflag: tar.TypeReg}
	switch {
	case i.mode.IsDir():
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case i.mode&fs.ModeSymlink != 0:
		h.Typeflag = tar.TypeSymlink
	}
	if err := t.WriteHeader(&h); err != nil {
		return err
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	if i.from == "" {
		_, err := t.Write(i.data)
		return err
	}
	f, err := os.Open(i.from)
	if err != nil {
		return err
	}
	defer f.Close()
	if n, err := io.CopyN(t, f, i.size); errors.Is(err, io.EOF) {
		return badFiles("bundle: %s has %d bytes now, and had %d: %v", i.from, n, i.size, errChanged)
	} else if err != nil {
		return err
	}
	return nil
}

// Unpack writes the files of a packed bundle into an empty directory. It does not trust the archive: it refuses names that lead outside the
// directory or through links, and files that take more than limit bytes of memory. It does not read beyond the archive's end.
func Unpack(r io.Reader, into *os.Root, limit uint64) error {
	t := tar.NewReader(r)
	left := int64(min(limit, maxSize))
	directories := map[string]bool{".": true}
	for n := 0; ; n++ {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("bundle: entry %d: %w", n, err)
		}
		name := strings.TrimSuffix(h.Name, "/")
		if n == maxItems || h.Size < 0 || h.Size > left || footprint(h.Size) > left {
			return fmt.Errorf("bundle: entry %d, %q of %d bytes: more than was announced, or more than %d entries", n, name, h.Size, maxItems)
		}
		left -= footprint(h.Size)
		if len(name) > maxName || strings.ContainsRune(name, 0) || !filepath.IsLocal(name) || path.Clean(name) != name || name == "." {
			return fmt.Errorf("bundle: entry %d: %q is not a relative path of at most %d bytes in its shortest form", n, name, maxName)
		}
		if tooDeep(name) {
			return fmt.Errorf("bundle: entry %d, %q: in more than %d directories", n, name, maxDepth)
		}
		if !directories[path.Dir(name)] {
			return fmt.Errorf("bundle: entry %d, %q: no entry before it is its directory", n, name)
		}
		if err := unpackEntry(t, h, name, into); err != nil {
			return fmt.Errorf("bundle: entry %d, %q: %w", n, name, err)
		}
		if h.Typeflag == tar.TypeDir {
			directories[strings.Clone(name)] = true // the name is a part of a longer string
		}
	}
}

func unpackEntry(t *tar.Reader, h *tar.Header, name string, into *os.Root) error {
	switch h.Typeflag {
	case tar.TypeDir:
		return unpackDirectory(name, into)
	case tar.TypeSymlink:
		if strings.ContainsRune(h.Linkname, 0) || !inside(name, h.Linkname) {
			return fmt.Errorf("a link to %q, which is or may be outside, or is more than %d names long", h.Linkname, maxDepth+1)
		}
		return into.Symlink(h.Linkname, name)
	case tar.TypeReg:
		return unpackFile(t, h, name, into)
	}
	return fmt.Errorf("type %q, want files, directories and symbolic links", h.Typeflag)
}

func unpackDirectory(name string, into *os.Root) error {
	if err := into.Mkdir(name, 0o755); err != nil {
		return err
	}
	d, err := into.Open(name)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Chmod(0o755) // whatever the umask. Root.Chmod makes a system call that executors do not have
}

func unpackFile(t *tar.Reader, h *tar.Header, name string, into *os.Root) error {
	f, err := into.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	mode := fs.FileMode(0o444)
	if h.Mode&0o111 != 0 {
		mode = 0o555
	}
	_, err = io.CopyBuffer(struct{ io.Writer }{f}, t, make([]byte, 256<<10))
	if err == nil {
		err = f.Chmod(mode)
	}
	return errors.Join(err, f.Close())
}
