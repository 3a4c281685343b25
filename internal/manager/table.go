package manager

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/control"
)

const (
	// missed is how many heartbeats may stay away before an executor counts as dead.
	missed = 3
	// forgetAfter is how long a dead executor is still listed.
	forgetAfter = time.Hour
	// maxExecutors bounds the table.
	maxExecutors = 100_000
)

// entry is one executor.
type entry struct {
	id      uint64
	address string
	key     string
	info    *control.InfoReply
	seen    time.Time // last heartbeat
	dead    bool      // as far as the log is told
}

// table is the executors by id and by address. All methods may be called from any goroutine.
type table struct {
	interval time.Duration // of heartbeats
	now      func() time.Time

	mu     sync.Mutex
	nextID uint64
	byID   map[uint64]*entry
	byKey  map[string]*entry
}

func newTable(interval time.Duration, firstID uint64, now func() time.Time) *table {
	return &table{interval: interval, now: now, nextID: firstID, byID: map[uint64]*entry{}, byKey: map[string]*entry{}}
}

// key is what two executors cannot share: an address, which for a local one means the address on that node.
func key(address string, info *control.InfoReply) string {
	if a, err := control.ParseAddress(address); err == nil && a.Local() {
		return info.GetNodeId() + " " + address
	}
	return address
}

// register adds an executor. An earlier one at the same address is replaced: it is gone, since its address is taken.
// The same incarnation keeps its id. 0: the table is full.
func (t *table) register(address string, info *control.InfoReply) (id uint64, replaced bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := key(address, info)
	old := t.byKey[k]
	if old != nil && string(old.info.GetIncarnation()) == string(info.GetIncarnation()) {
		old.info, old.seen, old.dead = info, t.now(), false
		return old.id, false
	}
	if old != nil {
		delete(t.byID, old.id)
	} else if len(t.byID) >= maxExecutors {
		return 0, false
	}
	e := &entry{id: t.nextID, address: address, key: k, info: info, seen: t.now()}
	t.nextID++
	t.byID[e.id], t.byKey[k] = e, e
	return e.id, old != nil
}

// heartbeat notes that an executor lives. known is false if it must register; back is true if it had counted as dead.
func (t *table) heartbeat(id uint64, info *control.InfoReply) (known, back bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byID[id]
	if e == nil || string(e.info.GetIncarnation()) != string(info.GetIncarnation()) {
		return false, false
	}
	back = e.dead
	e.info, e.seen, e.dead = info, t.now(), false
	return true, back
}

// deregister forgets an executor and returns its address, empty if it is not there.
func (t *table) deregister(id uint64) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byID[id]
	if e == nil {
		return ""
	}
	t.drop(e)
	return e.address
}

func (t *table) drop(e *entry) {
	delete(t.byID, e.id)
	delete(t.byKey, e.key)
}

func (t *table) silent(e *entry, now time.Time) bool { return now.Sub(e.seen) >= missed*t.interval }

// list returns all executors by address, dead ones marked.
func (t *table) list() []*control.ExecutorEntry {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	out := make([]*control.ExecutorEntry, 0, len(t.byID))
	for _, e := range t.byID {
		out = append(out, &control.ExecutorEntry{ExecutorId: e.id, Address: e.address,
			Info: proto.CloneOf(e.info), AgeMs: uint64(max(0, now.Sub(e.seen)).Milliseconds()), Alive: !t.silent(e, now)})
	}
	slices.SortFunc(out, func(a, b *control.ExecutorEntry) int {
		return cmp.Or(cmp.Compare(a.GetAddress(), b.GetAddress()), cmp.Compare(a.GetExecutorId(), b.GetExecutorId()))
	})
	return out
}

// sweep marks the silent ones dead, returns the addresses of those that were not marked before, and forgets those
// that are dead for long.
func (t *table) sweep() (died []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	for _, e := range t.byID {
		if !t.silent(e, now) {
			continue
		}
		if !e.dead {
			e.dead = true
			died = append(died, e.address)
		}
		if now.Sub(e.seen) >= forgetAfter {
			t.drop(e)
		}
	}
	slices.Sort(died)
	return died
}
