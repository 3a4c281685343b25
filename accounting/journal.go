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

// journalSlack is how many superseded records a journal holds before it is written anew.
const journalSlack = 1024

// Journal keeps the sums of the leases of one executor on disk until the ledger has them. It is a file of records, each
// the newest sums of a Key, written behind the earlier ones and flushed before Put returns. After a crash the whole
// records are read and the newest counts, which is the largest; half a record at the end is cut off, and a damaged one in
// the middle costs itself only. Not safe for concurrent use.
type Journal struct {
	file    journalFile
	replace func(write func(journalFile) error) (journalFile, error) // see openReplacement; nil in tests: never compacted
	live    map[Key]*Entry
	size    int64 // bytes of whole, flushed records
	records int
	damaged int
	failed  error
}

// journalFile is what a journal needs of a file.
type journalFile interface {
	io.ReaderAt
	io.WriterAt
	Truncate(size int64) error
	Sync() error
	Close() error
}

// maxJournals bounds the executors of one node that share a state directory.
const maxJournals = 256

// OpenJournal opens a journal in a directory, which is made if there is none: one that an executor of this node has left
// behind, so that its sums are not lost, or a new one. Journals that another process has open are left alone. The
// node's name is part of the file's name, so nodes may share the directory.
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

// lockFile locks a file that stays, so that the journal itself can be replaced. nil: somebody else has the lock.
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

// openReplacement puts a file with what write writes in the place of the journal at path.
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
	// The name may not be on disk yet, but then the old file is, and it says no less.
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

// readJournal reads what is there and cuts off what was not written to its end.
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

// Live returns all entries that have not been dropped, in no order.
func (j *Journal) Live() []Entry {
	all := make([]Entry, 0, len(j.live))
	for _, e := range j.live {
		all = append(all, *e)
	}
	return all
}

// Damaged is how many records could not be read when the journal was opened.
func (j *Journal) Damaged() int { return j.damaged }

// Put stores the newest sums of some Keys and returns when they are on disk. Whatever the error, they are in Live, and
// the next Put that succeeds has stored them too.
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

// Drop forgets Keys that the ledger has. Their records stay in the file until it is written anew or nothing is alive, so some may
// come back when the journal is opened again. The ledger counts them once: it merges them with what it has, or refuses them
// if it has forgotten the lease meanwhile (Ledger.Prune).
func (j *Journal) Drop(keys ...Key) {
	for _, k := range keys {
		delete(j.live, k)
	}
	// Not flushed: after a crash they may be there again. An error leaves them there, too.
	if len(j.live) == 0 && j.records > 0 && j.failed == nil && j.file.Truncate(0) == nil {
		j.size, j.records = 0, 0
	}
}

// compact writes everything that is alive into a new file, which also makes good for a write that failed.
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
		l.lock = nil // goes on in f
		j.file = l
	}
	j.file.Close()
	j.file, j.size, j.records, j.failed = f, n, len(all), nil
	return nil
}

// writeRecords writes entries at an offset and flushes. It returns the bytes.
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

// Close closes the file. What is in Live is on disk if the last Put said so.
func (j *Journal) Close() error { return j.file.Close() }
