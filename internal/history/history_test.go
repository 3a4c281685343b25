package history

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
)

var (
	begin = time.Unix(1_700_000_000, 0).Truncate(24 * time.Hour)
	quiet = slog.New(slog.DiscardHandler)
)

func open(t *testing.T, path string, now time.Time) *History {
	t.Helper()
	h, err := Open(path, time.Second, now, quiet)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// fill makes something happen in each bucket of a span.
func fill(h *History, from time.Time, span, every time.Duration) time.Time {
	now := from
	for ; now.Before(from.Add(span)); now = now.Add(every) {
		h.Watch(now, every, []Executor{{Node: "a", NodeCores: 8, Cores: 6, Free: 2, Open: true, Heard: true}, {Node: "b", Cores: 4, Free: 4, Heard: true}})
		h.Use(now, "a", "ann", accounting.Use{accounting.Calls: 3, accounting.Failures: 1})
		s := board.Stats{Deaths: 1}
		s.Starts[board.StartCached].Add(70 * time.Microsecond)
		h.Count(now, "a", &s)
	}
	return now
}

func total(list []Bucket) (sum Bucket) {
	for i := range list {
		sum.Add(&list[i])
	}
	return sum
}

// Each tier has everything of its time span and nothing older, and time without a resource manager is not counted.
func TestTiers(t *testing.T) {
	h := open(t, "", begin)
	now := fill(h, begin, 3*time.Hour, 10*time.Second)
	for i, want := range []int{360, 36, 3, 1} {
		if n := len(h.Since(i, begin)); n != want {
			t.Errorf("tier %d has %d buckets, want %d", i, n, want)
		}
	}
	day := total(h.Since(3, begin))
	s := uint64(3 * time.Hour / time.Microsecond)
	if day.Watched != s || day.Harvested != 4*s || day.Idle != 2*s || day.Batch != 6*s { // b drains: its cores are not offered
		t.Errorf("%d s: %d harvested, %d idle, %d batch", day.Watched/1e6, day.Harvested/s, day.Idle/s, day.Batch/s)
	}
	if day.Use[accounting.Calls] != 3*1080 || day.Tenants["ann"][accounting.Failures] != 1080 || day.Stats.Deaths != 1080 || day.Stats.Starts[board.StartCached].Count != 1080 {
		t.Errorf("%+v", day)
	}
	if a, b := total(h.Since(1, begin)), total(h.Since(2, begin)); !reflect.DeepEqual(a.Counters, day.Counters) || !reflect.DeepEqual(b.Counters, day.Counters) {
		t.Error("the tiers differ")
	}
	if list := h.Since(0, now.Add(-25*time.Second)); len(list) != 3 {
		t.Errorf("%d buckets of 10 s in 25 s", len(list))
	}
	if m := h.Node("a"); len(m) != nodeKeep || m[0].Harvested != 4*60e6 || m[0].Calls != 18 || m[0].Starts != 6 {
		t.Errorf("%d minutes, %+v", len(m), m[0])
	}
	// Nodes without an executor count as batch until they are forgotten.
	h.Watch(now, 10*time.Second, nil)
	if b := h.Since(0, now); b[0].Batch != 12*10e6 || b[0].Harvested != 0 {
		t.Errorf("%+v", b[0])
	}
	now = now.Add(forgetNode + time.Hour)
	h.Watch(now, 10*time.Second, nil)
	if b := h.Since(0, now); b[0].Batch != 0 || len(b) != 1 || len(h.Nodes()) != 0 {
		t.Errorf("%+v", b)
	}
}

// A clock that is set back a little stops nothing, and one that is set back far does not hide what follows.
func TestClockSetBack(t *testing.T) {
	h := open(t, "", begin)
	now := fill(h, begin, time.Hour, 10*time.Second)
	fill(h, now.Add(-15*time.Second), 10*time.Second, 10*time.Second)
	if n := len(h.Since(0, begin)); n > 360 {
		t.Errorf("%d buckets", n)
	}
	early := begin.Add(-48 * time.Hour)
	fill(h, early, time.Minute, 10*time.Second)
	if list := h.Since(0, early.Add(-time.Hour)); len(list) != 6 || !list[0].Start.Equal(early) {
		t.Errorf("%d buckets", len(list))
	}
}

// A bucket has a bounded number of tenants, and loses no use.
func TestManyTenants(t *testing.T) {
	h := open(t, "", begin)
	for i := range 1000 {
		h.Use(begin, "", "tenant"+strings.Repeat("x", i%200), accounting.Use{accounting.Calls: 1})
	}
	b := h.Since(0, begin)[0]
	if len(b.Tenants) > maxTenants+1 || b.Use[accounting.Calls] != 1000 {
		t.Errorf("%d tenants, %d calls", len(b.Tenants), b.Use[accounting.Calls])
	}
	sum := uint64(0)
	for _, u := range b.Tenants {
		sum += u[accounting.Calls]
	}
	if sum != 1000 || b.Tenants[""][accounting.Calls] == 0 {
		t.Errorf("%d calls of tenants", sum)
	}
}

// The file has everything after an end and, except for the last ten seconds, after a crash. It does not grow without bound.
func TestRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history")
	h := open(t, path, begin)
	now := fill(h, begin, 2*time.Hour, 10*time.Second)
	before := make([][]Bucket, len(Tiers))
	for i := range Tiers {
		before[i] = h.Since(i, begin)
	}
	nodes := h.Nodes()
	h.Close(now)
	h = open(t, path, now)
	for i := range Tiers {
		if got := h.Since(i, begin); !equal(got, before[i]) {
			t.Errorf("tier %d: %d buckets, want %d", i, len(got), len(before[i]))
		}
	}
	if !reflect.DeepEqual(h.Nodes(), nodes) && len(nodes) == 2 {
		t.Errorf("%v, want %v", h.Nodes(), nodes)
	}
	// Old buckets leave the file, too.
	now = now.Add(40 * 24 * time.Hour)
	h.Watch(now, time.Second, nil)
	h.Close(now)
	if h = open(t, path, now); len(h.Since(0, begin)) != 1 || len(h.Since(3, begin)) != 2 {
		t.Errorf("%d and %d buckets", len(h.Since(0, begin)), len(h.Since(3, begin)))
	}
	h.Close(now)
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.View(func(tx *bbolt.Tx) error {
		if n := tx.Bucket(inBuckets).Stats().KeyN; n != 1+1+1+2 {
			t.Errorf("%d records, want 5", n)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func equal(a, b []Bucket) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !a[i].Start.Equal(b[i].Start) || a[i].Counters != b[i].Counters || !reflect.DeepEqual(a[i].Tenants, b[i].Tenants) {
			return false
		}
	}
	return true
}

// Whichever byte is damaged, no counter that is shown is wrong, nothing crashes, and the history goes on.
func TestDamagedFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "history")
	h := open(t, path, begin)
	now := fill(h, begin, 10*time.Minute, 10*time.Second)
	h.Close(now)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	right := map[int64]Counters{}
	for _, b := range open(t, "", now).Since(0, begin) {
		right[b.Start.Unix()] = b.Counters
	}
	ref := empty(quiet)
	fill(ref, begin, 10*time.Minute, 10*time.Second)
	for _, b := range ref.Since(0, begin) {
		right[b.Start.Unix()] = b.Counters
	}
	damage := func(what string, b []byte) {
		t.Helper()
		path := filepath.Join(t.TempDir(), "history")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		h, err := Open(path, time.Second, now, quiet)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			return
		}
		for _, b := range h.Since(0, begin) {
			if right[b.Start.Unix()] != b.Counters {
				t.Errorf("%s: wrong counters at %v", what, b.Start)
			}
		}
		h.Watch(now, time.Second, nil)
		h.Close(now)
		if h, err = Open(path, time.Second, now, quiet); err != nil || len(h.Since(0, now)) > 1 {
			t.Errorf("%s: not usable afterwards: %v, %d buckets", what, err, len(h.Since(0, now)))
		}
		if err == nil {
			h.Close(now)
		}
	}
	for at := 0; at < len(whole); at += 211 {
		b := bytes.Clone(whole)
		b[at] ^= 0xff
		damage(fmt.Sprintf("byte %d", at), b)
	}
	damage("half", whole[:len(whole)/2])
	damage("a page", whole[:os.Getpagesize()])
	damage("nothing", nil)
	damage("text", []byte(strings.Repeat("not a history\n", 1000)))
}

// An error of the file system does not put the file aside: it may be whole.
func TestFileThatCannotBeOpened(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history")
	h := open(t, path, begin)
	h.Close(fill(h, begin, time.Minute, 10*time.Second))
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	none := before
	none.Cur = 0
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	_, err := Open(path, time.Second, begin, quiet)
	if rerr := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); rerr != nil {
		t.Fatal(rerr)
	}
	if !errors.Is(err, unix.EMFILE) {
		t.Errorf("%v, want that too many files are open", err)
	}
	if h = open(t, path, begin.Add(time.Minute)); len(h.Since(0, begin)) != 6 {
		t.Errorf("%d buckets, want 6", len(h.Since(0, begin)))
	}
	h.Close(begin.Add(time.Minute))
}

// A node that changes its name leaves no records in the file after they are forgotten.
func TestForgottenNodesLeaveTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history")
	h := open(t, path, begin)
	now := begin
	for i := range 3 {
		h.Watch(now, time.Second, []Executor{{Node: fmt.Sprint(i), Cores: 1}})
		h.Save(now, false)
		now = now.Add(forgetNode + time.Hour)
	}
	count := 0
	if err := h.file.db.View(func(tx *bbolt.Tx) error {
		count = tx.Bucket(inNodes).Stats().KeyN
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if count != 1 {
		t.Errorf("the file has %d nodes, want 1", count)
	}
	h.Close(now)
}

// Whatever executors report, no counter gets smaller.
func TestCountersDoNotOverflow(t *testing.T) {
	h := open(t, "", begin)
	var s board.Stats
	s.Each(func(n *uint64) { *n = math.MaxUint64 - 1 })
	var u accounting.Use
	for i := range u {
		u[i] = math.MaxUint64 - 1
	}
	for range 3 {
		h.Watch(begin, math.MaxInt64, []Executor{{Node: "a", NodeCores: math.MaxUint32, Cores: math.MaxUint32, Open: true, Heard: true}})
		h.Use(begin, "a", "ann", u)
		h.Count(begin, "a", &s)
	}
	b := h.Since(0, begin)[0]
	for i, n := range append(b.Stats.Values(), b.Harvested, b.Use[accounting.Calls], b.Tenants["ann"][accounting.CoreMicros]) {
		if n != math.MaxUint64 {
			t.Errorf("counter %d is %d", i, n)
		}
	}
	if m := h.Node("a")[0]; m.Calls != math.MaxUint64 || m.Starts != math.MaxUint64 || m.Harvested != math.MaxUint64 {
		t.Errorf("%+v", m)
	}
	b.Stats.Starts[0].Quantile(0.5) // does not panic
}

func TestQuantile(t *testing.T) {
	var c board.StartCounts
	if c.Quantile(0.5) != 0 {
		t.Error("a quantile of nothing")
	}
	for range 90 {
		c.Add(150 * time.Microsecond) // 100 to 200 us
	}
	for range 10 {
		c.Add(time.Hour)
	}
	if q := c.Quantile(0.5); q < 100*time.Microsecond || q > 200*time.Microsecond {
		t.Errorf("median %v", q)
	}
	if q := c.Quantile(0.99); q != board.StartBound(board.StartBuckets-2) {
		t.Errorf("p99 %v", q)
	}
}
