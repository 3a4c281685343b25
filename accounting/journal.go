package accounting

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// journalSlack is how many superseded records a journal may have before it is rewritten.
const journalSlack = 1024

// Journal keeps the sums of the leases of one executor on disk until the ledger has them. It is a file of records. Each
// record has the newest sums of a Key, and is appended and flushed before Put returns. After a crash all complete
// records are read, and the newest of each Key counts, which is the largest. An incomplete record at the end is cut
// off. A damaged record in the middle is skipped. Not safe for concurrent use.
type Journal struct {
	file    journalFile
	replace func(write func(journalFile) error) (journalFile, error) // see openReplacement; nil in tests: never compacted
	live    map[Key]*Entry
	size    int64 // bytes of complete, flushed records
	records int
	damaged int
	failed  error
}

// journalFile has the methods of a file that a journal needs.
type journalFile interface {
	io.ReaderAt
	io.WriterAt
	Truncate(size int64) error
	Sync() error
	Close() error
}

// maxJournals bounds the executors of one node that share a state directory.
const maxJournals = 256

// OpenJournal opens a journal in a directory, which it creates if necessary. It opens a journal that an earlier
// executor of this node has left, so that its sums are not lost, or a new one. It skips journals that another process
// has open. The node's name is part of the file's name, so nodes may share the directory.
func OpenJournal(dir, node string) (*Journal, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	for i := range maxJournals {
		path := filepath.Join(dir, fmt.Sprintf("%s-%d.journal", filepath.Base(node), i))
		lock, err := lockFile(path + ".lock")
		if err != nil {
			return nil, fmt.Errorf("journal: %w", err)
		}
		if lock == nil {
			continue
		}
		j, err := openJournalFile(path, lock)
		if err != nil {
			lock.Close()
			return nil, fmt.Errorf("journal: %w", err)
		}
		return j, nil
	}
	return nil, fmt.Errorf("journal: all %d journals of node %s in %s are in use", maxJournals, node, dir)
}

// lockFile locks a separate file, so that the journal itself can be replaced. It returns nil if another process has the
// lock.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, nil
		}
		return nil, &fs.PathError{Op: "lock", Path: path, Err: err}
	}
	return f, nil
}

// lockedFile is a journal's file together with its lock.
type lockedFile struct {
	*os.File
	lock *os.File
}

func (f lockedFile) Close() error {
	err := f.File.Close()
	if f.lock != nil {
		f.lock.Close()
	}
	return err
}

func openJournalFile(path string, lock *os.File) (*Journal, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	j, err := readJournal(lockedFile{f, lock}, size)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	j.replace = func(write func(journalFile) error) (journalFile, error) { return openReplacement(path, lock, write) }
	return j, nil
}

// openReplacement replaces the journal at path by a file with the output of write.
func openReplacement(path string, lock *os.File, write func(journalFile) error) (journalFile, error) {
	f, err := os.OpenFile(path+".new", os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	if err = write(f); err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		f.Close()
		return nil, errors.Join(err, os.Remove(path+".new"))
	}
	// If the rename is not on disk yet, the old file is, which has the same sums.
	if err := syncDir(filepath.Dir(path)); err != nil {
		f.Close()
		return nil, err
	}
	return lockedFile{f, lock}, nil
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// readJournal reads all records and cuts off an incomplete one at the end.
func readJournal(f journalFile, size int64) (*Journal, error) {
	j := &Journal{file: f, live: map[Key]*Entry{}}
	buf := make([]byte, recordSize)
	for ; j.size+recordSize <= size; j.size += recordSize {
		if _, err := f.ReadAt(buf, j.size); err != nil {
			return nil, err
		}
		e, err := parseEntry(buf)
		if err != nil {
			j.damaged++
			continue
		}
		j.records++
		j.note(&e)
	}
	if j.size == size {
		return j, nil
	}
	if err := f.Truncate(j.size); err != nil {
		return nil, err
	}
	return j, f.Sync()
}

func (j *Journal) note(e *Entry) {
	if old := j.live[e.Key]; old != nil {
		old.merge(e)
		return
	}
	c := *e
	j.live[e.Key] = &c
}

// Live returns all entries that were not dropped, in no particular order.
func (j *Journal) Live() []Entry {
	all := make([]Entry, 0, len(j.live))
	for _, e := range j.live {
		all = append(all, *e)
	}
	return all
}

// Damaged returns how many records could not be read when the journal was opened.
func (j *Journal) Damaged() int { return j.damaged }

// Put stores the newest sums of some Keys and returns when they are on disk. Even after an error they are in Live, and
// the next successful Put stores them too.
func (j *Journal) Put(entries ...Entry) error {
	var errs []error
	var good []*Entry
	for i := range entries {
		if err := entries[i].Check(); err != nil {
			errs = append(errs, err)
			continue
		}
		j.note(&entries[i])
		good = append(good, j.live[entries[i].Key])
	}
	if j.failed != nil || j.records+len(good) > 2*len(j.live)+journalSlack {
		return errors.Join(append(errs, j.compact())...)
	}
	if len(good) > 0 {
		n, err := writeRecords(j.file, j.size, good)
		if err != nil {
			j.failed = fmt.Errorf("journal: %w", err)
			return errors.Join(append(errs, j.failed)...)
		}
		j.size += n
		j.records += len(good)
	}
	return errors.Join(errs...)
}

// Drop forgets Keys that the ledger has. Their records stay in the file until it is rewritten or no Key is left, so
// some may return when the journal is opened again. The ledger counts them once: it merges them with what it has, or
// refuses them if it has pruned the lease in the meantime (Ledger.Prune).
func (j *Journal) Drop(keys ...Key) {
	for _, k := range keys {
		delete(j.live, k)
	}
	// Not flushed: after a crash or an error the records may still be there.
	if len(j.live) == 0 && j.records > 0 && j.failed == nil && j.file.Truncate(0) == nil {
		j.size, j.records = 0, 0
	}
}

// compact writes all live entries to a new file, which also repairs a write that failed.
func (j *Journal) compact() error {
	all := make([]*Entry, 0, len(j.live))
	for _, e := range j.live {
		all = append(all, e)
	}
	var n int64
	write := func(f journalFile) (err error) {
		n, err = writeRecords(f, 0, all)
		return err
	}
	if j.replace == nil {
		j.failed = errors.New("journal: cannot be replaced")
		return j.failed
	}
	f, err := j.replace(write)
	if err != nil {
		j.failed = fmt.Errorf("journal: %w", err)
		return j.failed
	}
	if l, ok := j.file.(lockedFile); ok {
		l.lock = nil // f has taken it over
		j.file = l
	}
	j.file.Close()
	j.file, j.size, j.records, j.failed = f, n, len(all), nil
	return nil
}

// writeRecords writes entries at an offset, flushes, and returns the number of bytes.
func writeRecords(f journalFile, at int64, entries []*Entry) (int64, error) {
	buf := make([]byte, 0, len(entries)*recordSize)
	for _, e := range entries {
		end := len(buf) + recordSize
		buf = appendEntry(buf, e)
		buf = append(buf, make([]byte, end-len(buf))...)
	}
	if len(buf) > 0 {
		if _, err := f.WriteAt(buf, at); err != nil {
			return 0, err
		}
	}
	return int64(len(buf)), f.Sync()
}

// Close closes the file. The content of Live is on disk if the last Put succeeded.
func (j *Journal) Close() error { return j.file.Close() }
