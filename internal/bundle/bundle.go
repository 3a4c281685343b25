package bundle

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// Mine is the directory of a bundle for the libraries that this package adds. The client's files are beside it.
	Mine       = ".rfaas"
	libraries  = Mine + "/lib"
	loaderName = "libraries.so" // in Mine; DP_BUNDLE_LOADER of worker/bundle.c

	maxItems = 65536   // files, directories and links
	maxSize  = 1 << 40 // bytes
	maxDepth = 64      // nested directories
	maxName  = 1024    // bytes of a relative path
)

// Error is a bundle that cannot be made. Of: "the library" or "bundle".
type Error struct {
	Libraries bool // the error concerns the libraries that the library needs, not the files that the program names
	Text      string
}

func (e *Error) Error() string { return e.Text }

func badFiles(format string, args ...any) error {
	return &Error{Text: fmt.Sprintf(format, args...)}
}

// item is a file, directory or symbolic link.
type item struct {
	name  string // relative, with slashes
	from  string // path on the client's node; "" for data
	mode  fs.FileMode
	size  int64
	link  string // target of a link
	data  []byte // content of a file without from
	state syscall.Stat_t
}

func fileItem(name, from string, st fs.FileInfo) item {
	i := item{name: name, from: from, mode: 0o444}
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		i.state = *s
	}
	if st.IsDir() {
		i.mode = fs.ModeDir | 0o755
		return i
	}
	i.size = st.Size()
	if st.Mode()&0o111 != 0 {
		i.mode = 0o555
	}
	return i
}

// Finder finds what travels with libraries. Safe for concurrent use.
type Finder struct {
	mu                 sync.Mutex
	checked            time.Time // change of the linker's cache when the directories were read
	configured, system []string
	hashes             map[[sha256.Size]byte]hashed
}

type hashed struct {
	sum  [sha256.Size]byte
	size uint64
}

// maxHashes bounds the bundles whose hashes are remembered.
const maxHashes = 64

// directories returns systemDirectories. They are read again when the linker's cache has changed.
func (f *Finder) directories() (configured, system []string) {
	var changed time.Time
	if st, err := os.Stat("/etc/ld.so.cache"); err == nil {
		changed = st.ModTime()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.system == nil || !f.checked.Equal(changed) {
		f.configured, f.system = systemDirectories()
		f.checked = changed
	}
	return f.configured, f.system
}

// Wanted says what travels with a library.
type Wanted struct {
	Library   *Object  // nil: the libraries that it needs do not travel
	Directory string   // of the library, for $ORIGIN; "": it is in none
	Search    []string // LD_LIBRARY_PATH of the client
	Files     []string // absolute paths of files and directories; each is in the bundle under its last name
}

// Bundle is the list of what travels. It does not change.
type Bundle struct {
	items []item // directories before what is in them
	Sum   [sha256.Size]byte
	Size  uint64 // bytes of the packed bundle
}

// Find lists and hashes the files that travel. It returns nil if there are none. It caches hashes, and reads the files again only if one has
// changed. stop ends it early.
func (f *Finder) Find(w Wanted, stop func() error) (*Bundle, error) {
	b := &Bundle{}
	if w.Library != nil {
		if err := b.addLibraries(f, w); err != nil {
			return nil, &Error{Libraries: true, Text: err.Error()}
		}
	}
	if err := b.addFiles(w.Files); err != nil {
		return nil, err
	}
	if len(b.items) == 0 {
		return nil, nil
	}
	return b, f.hash(b, stop)
}

// addLibraries adds the libraries that a library needs, and the library that loads them.
func (b *Bundle) addLibraries(f *Finder, w Wanted) error {
	configured, system := f.directories()
	o := *w.Library
	o.origin = w.Directory
	c := closure{search: w.Search, configured: configured, system: system}
	if err := c.needs(&o); err != nil || len(c.private) == 0 {
		return err
	}
	for _, dir := range []string{Mine, libraries} {
		b.items = append(b.items, item{name: dir, mode: fs.ModeDir | 0o755})
	}
	loader := loaderLibrary(o.machine, c.order)
	b.items = append(b.items, item{name: Mine + "/" + loaderName, mode: 0o555, data: loader, size: int64(len(loader))})
	b.items = append(b.items, c.private...)
	return nil
}

// addFiles adds the files and directories that the program names.
func (b *Bundle) addFiles(paths []string) error {
	names := map[string]string{Mine: "rfaas"}
	for _, p := range paths {
		name := filepath.Base(p)
		if name == "/" {
			return badFiles("bundle: / cannot be bundled, because it has no name: name files or directories below it")
		}
		if other := names[name]; other != "" {
			return badFiles("bundle: %s and %s have the same name in the bundle: rename one, or put both into one directory", p, other)
		}
		names[name] = p
		if err := b.walk(p, name, 0, nil); err != nil {
			return err
		}
	}
	total := uint64(0)
	for i := range b.items {
		total += uint64(b.items[i].size)
	}
	if total > maxSize {
		return badFiles("bundle: %d bytes, want at most %d: name fewer or smaller files", total, uint64(maxSize))
	}
	return nil
}

// walk adds a file or directory. above lists the directories that contain it, so that cycles of links are detected.
func (b *Bundle) walk(p, name string, depth int, above []fs.FileInfo) error {
	st, err := os.Lstat(p)
	if err == nil && st.Mode()&fs.ModeSymlink != 0 {
		var link string
		if link, err = os.Readlink(p); err == nil && depth > 0 && inside(name, link) {
			return b.add(item{name: name, from: p, mode: fs.ModeSymlink | 0o777, link: link})
		}
		if err == nil {
			st, err = os.Stat(p) // a link to a path outside is replaced by its target
			if errors.Is(err, fs.ErrNotExist) {
				return badFiles("bundle: %s is a symbolic link to %s, which does not exist: remove the link, or create its target", p, link)
			}
		}
	}
	switch {
	case err != nil:
		return badFiles("bundle: %v", err)
	case len(name) > maxName:
		return badFiles("bundle: %s: its path in the bundle has %d bytes, want at most %d", p, len(name), maxName)
	case !st.IsDir() && !st.Mode().IsRegular():
		return badFiles("bundle: %s is neither a file nor a directory", p)
	case !st.IsDir():
		return b.add(fileItem(name, p, st))
	case depth == maxDepth:
		return badFiles("bundle: %s: directories are nested more than %d deep", p, maxDepth)
	case slices.ContainsFunc(above, func(x fs.FileInfo) bool { return os.SameFile(x, st) }):
		return badFiles("bundle: %s links to a directory that contains it: remove the link", p)
	}
	if err := b.add(fileItem(name, p, st)); err != nil {
		return err
	}
	entries, err := os.ReadDir(p)
	if err != nil {
		return badFiles("bundle: %v", err)
	}
	above = append(above, st)
	for _, e := range entries {
		if err := b.walk(filepath.Join(p, e.Name()), name+"/"+e.Name(), depth+1, above); err != nil {
			return err
		}
	}
	return nil
}

func (b *Bundle) add(i item) error {
	if len(b.items) == maxItems {
		return badFiles("bundle: more than %d files and directories, with %s: name fewer, or pack them into one file", maxItems, i.from)
	}
	b.items = append(b.items, i)
	return nil
}

// inside reports whether a link leads to something under the first directory of its name, whatever other links there are. So `..` may only
// come first in it: behind a name, which may be that of a link, it may lead anywhere.
func inside(name, link string) bool {
	up := link
	for strings.HasPrefix(up, "../") {
		up = strings.TrimLeft(up[len(".."):], "/")
	}
	if path.IsAbs(link) || tooDeep(link) || strings.Contains("/"+up+"/", "/../") && up != ".." {
		return false
	}
	top, _, _ := strings.Cut(name, "/")
	to := path.Join(path.Dir(name), link)
	return to == top || strings.HasPrefix(to, top+"/")
}

// tooDeep reports whether a path has more than maxDepth directories and a last name. So the kernel's work for each path is bounded.
func tooDeep(name string) bool { return strings.Count(name, "/") > maxDepth }

// settled is the age of a file's last change from which on its hash is cached. Two changes at about the same time may have the same time
// stamp.
const settled = 2 * time.Second

// hash fills in the sum and the size.
func (f *Finder) hash(b *Bundle, stop func() error) error {
	key, old := b.state(time.Now())
	f.mu.Lock()
	known, ok := f.hashes[key]
	f.mu.Unlock()
	if !ok {
		h := sha256.New()
		n, err := b.pack(h, stop)
		if err != nil {
			return err
		}
		h.Sum(known.sum[:0])
		known.size = uint64(n)
		if again, _ := b.again(); old && again == key {
			f.remember(key, known)
		}
	}
	b.Sum, b.Size = known.sum, known.size
	return nil
}

func (f *Finder) remember(key [sha256.Size]byte, h hashed) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.hashes == nil {
		f.hashes = map[[sha256.Size]byte]hashed{}
	}
	for k := range f.hashes {
		if len(f.hashes) < maxHashes {
			break
		}
		delete(f.hashes, k)
	}
	f.hashes[key] = h
}

// again returns the state with the files as they are now.
func (b *Bundle) again() (key [sha256.Size]byte, err error) {
	now := Bundle{items: slices.Clone(b.items)}
	for i := range now.items {
		x := &now.items[i]
		if x.from == "" || x.link != "" {
			continue
		}
		st, err := os.Stat(x.from)
		if err != nil {
			return key, err
		}
		*x = fileItem(x.name, x.from, st)
	}
	key, _ = now.state(time.Time{})
	return key, nil
}

// state identifies the files of a bundle and their versions. old: the last change of each is older than settled.
func (b *Bundle) state(now time.Time) (key [sha256.Size]byte, old bool) {
	h := sha256.New()
	old = true
	for i := range b.items {
		x := &b.items[i]
		s := &x.state
		fmt.Fprintf(h, "%q %v %q %d ", x.name, x.mode, x.link, len(x.data))
		h.Write(x.data)
		if x.mode.IsRegular() { // a directory's time stamps also change with entries that are not in the list, and b lists its entries anyway
			for _, n := range []int64{int64(s.Dev), int64(s.Ino), s.Size, s.Mtim.Sec, s.Mtim.Nsec, s.Ctim.Sec, s.Ctim.Nsec} {
				_ = binary.Write(h, binary.LittleEndian, n) // a hash returns no error
			}
			old = old && now.Sub(time.Unix(s.Ctim.Unix())) > settled
		}
	}
	h.Sum(key[:0])
	return key, old
}

// errChanged means that a file was changed while it was read.
var errChanged = errors.New("the file changed while it was read: start again when it is complete")

// Pack writes the packed bundle. It fails if a file has changed.
func (b *Bundle) Pack(w io.Writer, stop func() error) error {
	h := sha256.New()
	_, err := b.pack(io.MultiWriter(w, h), stop)
	if err == nil && [sha256.Size]byte(h.Sum(nil)) != b.Sum {
		err = badFiles("bundle: a file has changed since the lease was requested: open the lease again")
	}
	return err
}
