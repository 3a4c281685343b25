package accounting

import (
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// crashFile is a file whose unflushed writes a crash may keep, lose or tear at the sectors of a disk.
type crashFile struct {
	disk    []byte // what a crash cannot take
	seen    []byte // what a read sees
	pending []pendingWrite
	fail    func() bool // whether the next write or flush fails
}

type pendingWrite struct {
	off  int64
	data []byte
}

var errDisk = errors.New("no space left on this test's disk")

func (f *crashFile) ReadAt(b []byte, off int64) (int, error) {
	if off+int64(len(b)) > int64(len(f.seen)) {
		return 0, io.ErrUnexpectedEOF
	}
	return copy(b, f.seen[off:]), nil
}

func put(b, data []byte, off int64) []byte {
	if need := int(off) + len(data); need > len(b) {
		b = append(b, make([]byte, need-len(b))...)
	}
	copy(b[off:], data)
	return b
}

func (f *crashFile) WriteAt(b []byte, off int64) (int, error) {
	if f.fail != nil && f.fail() {
		b = b[:len(b)/2]
		f.write(b, off)
		return len(b), errDisk
	}
	f.write(b, off)
	return len(b), nil
}

func (f *crashFile) write(b []byte, off int64) {
	f.seen = put(f.seen, b, off)
	f.pending = append(f.pending, pendingWrite{off, slices.Clone(b)})
}

func (f *crashFile) Truncate(n int64) error {
	f.seen = f.seen[:n]
	return nil
}

func (f *crashFile) Sync() error {
	if f.fail != nil && f.fail() {
		return errDisk
	}
	f.disk, f.pending = slices.Clone(f.seen), nil
	return nil
}

func (f *crashFile) Close() error { return nil }

// crash returns the file as it is found afterwards.
func (f *crashFile) crash(r *rand.Rand) *crashFile {
	for _, w := range f.pending {
		for len(w.data) > 0 {
			n := min(len(w.data), 512-int(w.off%512))
			if r.IntN(2) == 0 {
				f.disk = put(f.disk, w.data[:n], w.off)
			}
			w.data, w.off = w.data[n:], w.off+int64(n)
		}
	}
	return &crashFile{disk: f.disk, seen: slices.Clone(f.disk), fail: f.fail}
}

// crashDisk holds the journal's file under its name.
type crashDisk struct {
	r    *rand.Rand
	file *crashFile
}

func (d *crashDisk) open(t *testing.T) *Journal {
	t.Helper()
	fail := d.file.fail
	d.file.fail = nil // the disk fails when it is written to, not when a process starts
	j, err := readJournal(d.file, int64(len(d.file.seen)))
	if err != nil {
		t.Fatal(err)
	}
	d.file.fail = fail
	j.replace = func(write func(journalFile) error) (journalFile, error) {
		f := &crashFile{fail: d.file.fail}
		if err := write(f); err != nil {
			return nil, err
		}
		d.file = f
		return f, nil
	}
	return j
}

func (d *crashDisk) crash() { d.file = d.file.crash(d.r) }

// What Put has acknowledged is there after any number of crashes at any moment, and nothing is there that was not put.
func TestJournalLosesNothing(t *testing.T) {
	seeds := uint64(300)
	if testing.Short() {
		seeds = 50
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 1))
		broken := false
		d := &crashDisk{r: r, file: &crashFile{fail: func() bool { return broken && r.IntN(3) == 0 }}}
		j := d.open(t)
		acked, put := map[Key]Use{}, map[Key]Use{}
		for range 200 {
			switch r.IntN(12) {
			case 0:
				d.crash()
				j = d.open(t)
			case 1:
				broken = !broken
			case 2: // the ledger has one
				for k := range put {
					j.Drop(k)
					delete(acked, k)
					break
				}
			case 3:
				j.records += 2 * journalSlack // compact with the next Put
			default:
				var batch []Entry
				for range 1 + r.IntN(3) {
					e := entry(1+r.Uint64N(5), 0)
					e.Use = put[e.Key]
					e.Use[r.IntN(NumCounters)] += r.Uint64N(100)
					batch = append(batch, e)
					put[e.Key] = e.Use
				}
				if err := j.Put(batch...); err == nil {
					for _, e := range batch {
						acked[e.Key] = put[e.Key]
					}
				} else if !errors.Is(err, errDisk) {
					t.Fatal(err)
				}
			}
			live := map[Key]Use{}
			for _, e := range j.Live() {
				live[e.Key] = e.Use
			}
			for k, u := range acked {
				if got := live[k]; !got.Covers(u) || !put[k].Covers(got) {
					t.Fatalf("seed %d: %v is %v; acknowledged %v, put %v", seed, k, got, u, put[k])
				}
			}
			for k, got := range live {
				if !put[k].Covers(got) {
					t.Fatalf("seed %d: %v is %v, only %v was put", seed, k, got, put[k])
				}
			}
		}
	}
}

func TestJournalFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	open := func() *Journal {
		t.Helper()
		j, err := OpenJournal(dir, "node/1")
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	a := open()
	if err := a.Put(entry(1, 1), entry(2, 2), entry(1, 5)); err != nil {
		t.Fatal(err)
	}
	b := open() // a is open: another file
	if n := len(b.Live()); n != 0 {
		t.Errorf("the second journal has %d entries", n)
	}
	if err := b.Put(entry(3, 3)); err != nil {
		t.Fatal(err)
	}
	a.Drop(entry(2, 0).Key)
	a.records += 2 * journalSlack
	if err := a.Put(entry(4, 4)); err != nil { // into a new file
		t.Fatal(err)
	}
	if err := a.Put(entry(5, 5)); err != nil {
		t.Fatal(err)
	}
	c := open()
	if n := len(c.Live()); n != 0 {
		t.Errorf("a third journal has %d entries: the lock was lost with the old file", n)
	}
	a.Close()
	a = open() // takes over what was left
	got := map[uint64]uint64{}
	for _, e := range a.Live() {
		got[e.Lease] = e.Use[CoreMicros]
	}
	if len(got) != 3 || got[1] != 5 || got[4] != 4 || got[5] != 5 {
		t.Errorf("%v", got)
	}
	if err := a.Put(entry(0, 1), entry(9, 1)); !errors.Is(err, ErrInvalid) || len(a.Live()) != 4 {
		t.Errorf("%v, %d entries", err, len(a.Live()))
	}
	for _, j := range []*Journal{a, b, c} {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	}
	// One bad byte costs one record.
	path := filepath.Join(dir, "1-0.journal")
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	raw[60] ^= 1
	if err := os.WriteFile(path, append(raw, "half a record"...), 0o600); err != nil {
		t.Fatal(err)
	}
	a = open()
	if a.Damaged() != 1 || len(a.Live()) != 3 {
		t.Errorf("%d damaged, %d live", a.Damaged(), len(a.Live()))
	}
	a.Close()
	if _, err := OpenJournal("/dev/null/x", "n"); err == nil || !strings.Contains(err.Error(), "/dev/null") {
		t.Errorf("%v", err)
	}
}

// A journal does not grow with time.
func TestJournalIsCompacted(t *testing.T) {
	j, err := OpenJournal(t.TempDir(), "n")
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	j.file = quick{j.file}
	for i := range uint64(3 * journalSlack) {
		if err := j.Put(entry(1, i)); err != nil {
			t.Fatal(err)
		}
		if _, ok := j.file.(quick); !ok {
			j.file = quick{j.file} // replaced: the lock is in there
		}
	}
	if j.records > journalSlack+3 || j.Live()[0].AsOf != time.Unix(7200+3*journalSlack-1, 0) {
		t.Errorf("%d records, as of %v", j.records, j.Live()[0].AsOf)
	}
}

// quick is a file that is not flushed.
type quick struct{ journalFile }

func (quick) Sync() error { return nil }

// When the ledger has everything, the next executor finds an empty journal.
func TestSettledJournalIsEmpty(t *testing.T) {
	dir := t.TempDir()
	open := func() *Journal {
		t.Helper()
		j, err := OpenJournal(dir, "n")
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	entry := func(lease, calls uint64) Entry {
		return Entry{Key: Key{Incarnation: [16]byte{1}, Lease: lease}, Tenant: "ann", AsOf: time.Unix(1e9, 0), Began: time.Unix(1e9, 0), Use: Use{Calls: calls}}
	}
	j := open()
	for n := range uint64(3) {
		if err := j.Put(entry(1, n), entry(2, n)); err != nil {
			t.Fatal(err)
		}
	}
	j.Drop(entry(1, 0).Key, entry(2, 0).Key)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = open()
	if live := j.Live(); len(live) != 0 {
		t.Errorf("came back: %+v", live)
	}
	// Only entries that are put afterwards are in the journal.
	if err := j.Put(entry(3, 7)); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = open()
	defer j.Close()
	if live := j.Live(); len(live) != 1 || live[0].Lease != 3 || live[0].Use[Calls] != 7 || j.Damaged() != 0 {
		t.Errorf("%+v, %d damaged", live, j.Damaged())
	}
}
