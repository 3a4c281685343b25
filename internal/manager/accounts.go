package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
)

// ledgerWait is how long to wait for the ledger's lock while another resource manager ends.
const ledgerWait = 5 * time.Second

// Limits of operations on the ledger.
const (
	harvestBound = 30 * time.Second
	askBound     = 2 * time.Second // for a caller that waits: less than the three seconds for which an executor waits
)

// batchEvery is accounts.batch with a replica. Each write of a record is a revision, which etcd keeps until it is compacted. It is the
// step of the history, into which written charges are entered.
const batchEvery = 10 * time.Second

// accounts merges the charges of executors into the ledger.
type accounts struct {
	ledger    *accounting.Ledger
	tariff    accounting.Tariff
	temporary bool // the ledger is in memory
	log       *slog.Logger
	now       func() time.Time

	keep time.Duration // how long records of ended leases are kept; 0: for ever

	batch time.Duration // shortest time from one harvest that writes to the next, unless something cannot wait; 0: every harvest writes

	harvesting chan struct{} // capacity 1: full during harvest
	pruned     time.Time     // last pruning of ended leases, during harvesting
	wrote      time.Time     // last harvest that wrote, during harvesting

	mu       sync.Mutex
	fenced   []*attachment      // attachments of executors that have gone, until the ledger has their cells
	failures [updateKinds]error // of the last ledger update of each kind; nil: it succeeded
	failed   time.Time          // last failure of charges by message
	refused  map[string]bool    // reasons for which the last harvest refused charges
	refusals uint64             // refused charges; each counts once, even if several harvests find it
	unlogged int                // refused charges since the last log line about them
	lines    *rate.Limiter      // limits the log lines about refused charges; nil before the first one

	unsettled atomic.Uint64 // refused messages with charges

	byMessage map[accounting.Key]accounting.Entry // running leases that are charged by message
}

// forgetMessage is how long after its last message a lease that is charged by message counts as running.
const forgetMessage = time.Minute

// running returns the entries of running leases, from cells and from messages.
func (a *accounts) running(live []*attachment) []accounting.Entry {
	now := a.now()
	a.forget(now)
	all := map[accounting.Key]accounting.Entry{}
	a.mu.Lock()
	maps.Copy(all, a.byMessage)
	a.mu.Unlock()
	for _, x := range live {
		for _, e := range x.entries(now) {
			all[e.Key] = e // preferred: the executor has attached since its last message
		}
	}
	return slices.Collect(maps.Values(all))
}

// forget drops entries from messages for which no further message came.
func (a *accounts) forget(now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.byMessage, func(_ accounting.Key, e accounting.Entry) bool { return now.Sub(e.AsOf) > forgetMessage })
}

// entries returns the entries of used cells that are not final.
func (a *attachment) entries(now time.Time) (all []accounting.Entry) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil
	}
	b := a.cells.Bytes()
	for i := range a.merged {
		if e, used, err := accounting.ReadCell(b[i*accounting.CellSize:][:accounting.CellSize], a.node, now); err == nil && used && !e.Final {
			all = append(all, e)
		}
	}
	return all
}

// heard records entries that came by message.
func (a *accounts) heard(entries []accounting.Entry) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	for _, e := range entries {
		if e.AsOf = now; e.Final { // the time by the manager's clock
			delete(a.byMessage, e.Key)
		} else {
			a.byMessage[e.Key] = e
		}
	}
}

// Kinds of ledger updates: indices of accounts.failures.
const (
	ofCells = iota
	ofMessages
	ofClaims // of registrations
	updateKinds
)

// failing returns why the ledger does not accept charges, or nil.
func (a *accounts) failing() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.failingLocked()
}

// failingLocked is failing for a caller that holds the lock.
func (a *accounts) failingLocked() error { return cmp.Or(a.failures[:]...) }

// openLedger opens the ledger that a configuration names.
func openLedger(cfg *Config) (*accounts, error) {
	if cfg.Replica == nil {
		return openAccounts(cfg.StateDir, cfg.Tariff, cfg.Log, cfg.Now)
	}
	began := time.Now()
	a := newAccounts(cfg.Tariff, cfg.Log, cfg.Now)
	a.batch = batchEvery
	var err error
	if a.ledger, err = accounting.OpenReplicatedLedger(cfg.Replica, cfg.Load); err != nil {
		return nil, err
	}
	cfg.Log.Info("read the ledger", "bytes", a.ledger.Size(), "took", time.Since(began))
	return a, nil
}

func newAccounts(tariff accounting.Tariff, log *slog.Logger, now func() time.Time) *accounts {
	return &accounts{tariff: tariff, log: log, now: now, byMessage: map[accounting.Key]accounting.Entry{}, harvesting: make(chan struct{}, 1)}
}

// openAccounts opens the ledger in a directory. Without a directory the ledger is temporary and ends with the manager.
func openAccounts(dir string, tariff accounting.Tariff, log *slog.Logger, now func() time.Time) (*accounts, error) {
	a := newAccounts(tariff, log, now)
	var err error
	if dir == "" {
		a.temporary = true
		a.ledger, err = accounting.OpenTemporaryLedger()
		return a, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	path := filepath.Join(dir, "ledger")
	if a.ledger, err = accounting.OpenLedger(path, ledgerWait); err != nil || !a.ledger.Wasteful() {
		return a, err
	}
	a.ledger.Close()
	if before, after, err := accounting.CompactLedger(path, ledgerWait); err != nil {
		log.Warn("cannot compact the ledger, more than half of which is unused; continuing with it as it is", "error", err)
	} else {
		log.Info("compacted the ledger", "bytes", after, "before", before)
	}
	a.ledger, err = accounting.OpenLedger(path, ledgerWait)
	return a, err
}

func (a *accounts) close() { a.ledger.Close() }

// drop takes over the attachment of an executor that has gone, until its last charges are in the ledger. It does not
// block.
func (a *accounts) drop(x *attachment) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fenced = append(a.fenced, x)
}

// cell is an entry and the cell in which it was found.
type cell struct {
	from  *attachment
	index int
	entry accounting.Entry
}

// harvest reads the cells, merges new charges into the ledger and, when they are on disk, writes the receipts. With batch, it
// may leave charges to a later harvest unless all is set. It returns an error if charges are not in the ledger, unless the ledger has refused them.
func (a *accounts) harvest(ctx context.Context, live []*attachment, all bool) error {
	select {
	case a.harvesting <- struct{}{}:
		defer func() { <-a.harvesting }()
	case <-ctx.Done():
		return fmt.Errorf("%w: another harvest has not ended in time", accounting.ErrBusy)
	}
	a.mu.Lock()
	fenced := a.fenced
	a.fenced = nil
	a.mu.Unlock()
	var cells []cell
	now := a.now()
	a.forget(now)
	a.clearMessageFailure(now, forgetMessage)
	full := false
	for _, x := range live {
		more := x.read(now)
		full = full || 2*ended(more) > len(x.merged)
		cells = append(cells, more...)
	}
	if !all && !full && len(fenced) == 0 && now.Sub(a.wrote) < a.batch {
		return nil
	}
	for _, x := range fenced {
		cells = append(cells, x.read(now)...)
	}
	slices.SortStableFunc(cells, func(x, y cell) int { return cmp.Compare(ended([]cell{y}), ended([]cell{x})) }) // the executors wait for their receipts
	cells, foreign, err := a.claimed(ctx, now, cells)
	if err == nil {
		err = a.merge(ctx, now, cells, foreign)
	} else {
		a.note(ofCells, err)
	}
	if err != nil {
		a.mu.Lock()
		a.fenced = append(a.fenced, fenced...)
		a.mu.Unlock()
		return err // the cells and the executors' journals still have the charges
	}
	a.wrote = now
	for _, x := range fenced {
		x.free()
	}
	if a.keep > 0 && now.Sub(a.pruned) >= pruneEvery {
		a.pruned = now
		if n, err := a.ledger.Prune(ctx, now.Add(-a.keep)); err != nil {
			a.log.Warn("cannot prune old leases from the ledger", "error", err)
		} else if n > 0 {
			a.log.Info("pruned old leases from the ledger; bills keep their usage", "leases", n, "older", a.keep)
		}
	}
	return nil
}

// ended returns how many cells are of ended leases.
func ended(cells []cell) (n int) {
	for i := range cells {
		if cells[i].entry.Final {
			n++
		}
	}
	return n
}

// pruneEvery is how often old leases are pruned.
const pruneEvery = time.Hour

// claimed returns the cells that their owner may charge. For the others it returns why they are refused, once for each
// owner and incarnation.
func (a *accounts) claimed(ctx context.Context, now time.Time, cells []cell) (good []cell, foreign []string, err error) {
	type claim struct { // once for each executor, not for each lease
		incarnation [16]byte
		owner       string
	}
	var claims []accounting.Claim
	asked := map[claim]int{}
	for i := range cells {
		c := claim{cells[i].entry.Incarnation, cells[i].from.owner.name}
		if _, ok := asked[c]; !ok {
			asked[c] = len(claims)
			claims = append(claims, cells[i].from.owner.claim(c.incarnation))
		}
	}
	if len(claims) == 0 {
		return nil, nil, nil
	}
	refused, err := a.ledger.Claim(ctx, now, claims...)
	if err != nil {
		return nil, nil, err
	}
	for _, c := range cells {
		if refused[asked[claim{c.entry.Incarnation, c.from.owner.name}]] == nil {
			good = append(good, c)
		}
	}
	for _, why := range refused {
		if why != nil {
			foreign = append(foreign, why.Error())
		}
	}
	return good, foreign, nil
}

// mayUse returns an error if an owner may not charge under an incarnation because it belongs to another owner.
func (a *accounts) mayUse(o *owner, incarnation [16]byte) error {
	switch name, known, err := a.ledger.Owner(incarnation); {
	case err != nil:
		return control.Errorf(control.ClassBusy, "%v", err)
	case known && !o.may(name):
		return fmt.Errorf("%w: incarnation %x", errOwner, incarnation)
	}
	return nil
}

// merge merges cells into the ledger and writes the receipts of cells that are on disk. It returns an error if a cell is not on disk, unless the
// ledger has refused its charges. foreign lists why claimed refused charges.
func (a *accounts) merge(ctx context.Context, now time.Time, cells []cell, foreign []string) error {
	if len(cells) == 0 {
		a.refuse(foreign)
		return nil
	}
	entries := make([]accounting.Entry, len(cells))
	for i := range cells {
		entries[i] = cells[i].entry
	}
	err := a.ledger.Merge(ctx, now, entries...)
	refused, ledgerErr := splitErrors(err)
	a.note(ofCells, ledgerErr)
	if ledgerErr == nil {
		a.clearMessageFailure(now, clearAfterMerge)
	}
	incomplete := ledgerErr != nil && !errors.Is(ledgerErr, accounting.ErrLedger)
	if !incomplete {
		a.refuse(append(refused, foreign...))
	}
	partial := err != nil // with a replica, some entries may be stored even then
	for i := range cells {
		c := &cells[i]
		if partial {
			if e, known, err := a.ledger.Lease(c.entry.Key); err != nil || !known || e.Tenant != c.entry.Tenant || !e.Use.Covers(c.entry.Use) ||
				c.entry.Final && !e.Final {
				continue
			}
		}
		c.from.receipt(c.index, &c.entry)
	}
	if incomplete {
		return ledgerErr
	}
	return nil
}

// splitErrors separates the errors of Merge: refused has the reasons for which single charges were refused; ledgerErr is an
// error of the ledger itself.
func splitErrors(err error) (refused []string, ledgerErr error) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil, err // no error, or nothing is on disk
	}
	var others []error
	for _, err := range joined.Unwrap() {
		if errors.Is(err, accounting.ErrLedger) { // an entry in the ledger may be invalid too
			others = append(others, err)
		} else {
			refused = append(refused, err.Error())
		}
	}
	return refused, errors.Join(others...)
}

// refuse logs and counts refused charges, given all reasons of one harvest. Each is logged and counted once, although
// every harvest finds it again until its executor has gone.
func (a *accounts) refuse(texts []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	known := a.refused
	a.refused = make(map[string]bool, len(texts))
	var fresh []string
	for _, text := range texts {
		if !known[text] && !a.refused[text] {
			fresh = append(fresh, text)
		}
		a.refused[text] = true
	}
	if len(fresh) == 0 {
		return
	}
	a.refusals += uint64(len(fresh))
	a.unlogged += len(fresh)
	if a.lines == nil {
		a.lines = rate.NewLimiter(rate.Every(refusedLineEvery), refusedLines)
	}
	if !a.lines.AllowN(a.now(), 1) {
		return // the next line has their number
	}
	slices.Sort(fresh)
	fresh = fresh[:min(len(fresh), refusedTexts)]
	a.log.Warn("refused some charges; all others are in the ledger", "error", strings.Join(fresh, "\n"), "more", a.unlogged-len(fresh))
	a.unlogged = 0
}

// Limits of the log lines about refused charges. An executor can have new charges refused at each harvest.
const (
	refusedLines     = 10          // burst
	refusedLineEvery = time.Minute // after a burst
	refusedTexts     = 16          // reasons in a line
)

// refusedCharges returns how many charges were refused so far.
func (a *accounts) refusedCharges() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.refusals
}

// note records whether an update of the ledger succeeded, and logs when updates begin to fail and when they succeed again.
func (a *accounts) note(kind int, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	had := a.failingLocked() != nil
	a.failures[kind] = err
	switch {
	case err != nil && !had:
		a.log.Error("the ledger does not accept charges; keeping them in memory and at the executors, and trying again", "error", err)
	case had && a.failingLocked() == nil:
		a.log.Info("the ledger accepts charges again")
	}
	if kind == ofMessages && err != nil {
		a.failed = a.now()
	}
}

// clearAfterMerge is how long after the last failed message that failure is cleared if the ledger accepts charges from cells.
// It is several charge intervals long, so that the failure is not cleared between two messages that fail.
const clearAfterMerge = 5 * time.Second

// clearMessageFailure clears the failure of messages if none has failed for some time: their executors have stopped, or use
// cells now.
func (a *accounts) clearMessageFailure(now time.Time, after time.Duration) {
	a.mu.Lock()
	over := a.failures[ofMessages] != nil && now.Sub(a.failed) > after
	a.mu.Unlock()
	if over {
		a.note(ofMessages, nil)
	}
}

// read returns the cells whose charges are not yet in the ledger.
func (a *attachment) read(now time.Time) []cell {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil
	}
	var cells []cell
	b := a.cells.Bytes()
	for i := range a.merged {
		e, used, err := accounting.ReadCell(b[i*accounting.CellSize:][:accounting.CellSize], a.node, now)
		if err != nil || !used {
			continue // an incomplete write is complete at the next harvest
		}
		if m := &a.merged[i]; m.Key == e.Key && m.Use.Covers(e.Use) && m.Final == e.Final {
			continue
		}
		cells = append(cells, cell{a, i, e})
	}
	return cells
}

// receipt tells the executor that an entry is on disk.
func (a *attachment) receipt(i int, e *accounting.Entry) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return
	}
	a.merged[i] = *e
	r := accounting.Receipt{Key: e.Key, Final: e.Final, Use: e.Use}
	var b [accounting.ReceiptSize]byte
	r.Encode(b[:])
	copy(a.cells.Bytes()[i*accounting.CellSize+accounting.ReceiptOffset:], b[:])
}

// state returns why charges fail or may be lost, or "".
func (a *accounts) state() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.failingLocked() != nil:
		return a.failingLocked().Error()
	case a.temporary:
		return "the accounts are in memory only and will be lost when the resource manager ends (use --state-dir to keep them)"
	}
	return ""
}
