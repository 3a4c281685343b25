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

// ledgerWait is how long another resource manager that ends may hold the ledger.
const ledgerWait = 5 * time.Second

// accounts brings what executors charge into the ledger.
type accounts struct {
	ledger *accounting.Ledger
	tariff accounting.Tariff
	path   string // of a ledger that is to vanish, empty if it is kept
	log    *slog.Logger
	now    func() time.Time

	keep time.Duration // how long leases are kept that are over; 0: for good

	harvesting sync.Mutex // one at a time
	pruned     time.Time  // when leases were last forgotten, under harvesting

	mu       sync.Mutex
	fenced   []*attachment   // whose executors have gone, until the ledger has their cells
	trouble  [ways]error     // why the ledger did not take the last charges of cells, those of messages, and the last claims
	failed   time.Time       // when it last did not take those of a message
	refused  map[string]bool // why charges were refused in the last harvest that said so
	refusals uint64          // charges that were refused, each counted once while it is met again
	untold   int             // of these, since the last line in the log
	lines    *rate.Limiter   // of the log; nil: there was none yet

	unsettled atomic.Uint64 // messages of charges that were refused

	byMessage map[accounting.Key]accounting.Entry // running leases whose sums come so
}

// forgetMessage is after which time without a word a lease counts as over whose sums came by message.
const forgetMessage = time.Minute

// running are the entries of leases that go on: those of cells, and those that came by message.
func (a *accounts) running(live []*attachment) []accounting.Entry {
	now := a.now()
	a.forget(now)
	all := map[accounting.Key]accounting.Entry{}
	a.mu.Lock()
	maps.Copy(all, a.byMessage)
	a.mu.Unlock()
	for _, x := range live {
		for _, e := range x.entries(now) {
			all[e.Key] = e // an executor that found a way meanwhile
		}
	}
	return slices.Collect(maps.Values(all))
}

// forget drops what came by message of leases of which nothing more comes.
func (a *accounts) forget(now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.byMessage, func(_ accounting.Key, e accounting.Entry) bool { return now.Sub(e.AsOf) > forgetMessage })
}

// entries are those of cells in use that are not final.
func (x *attachment) entries(now time.Time) (all []accounting.Entry) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return nil
	}
	b := x.cells.Bytes()
	for i := range x.merged {
		if e, used, err := accounting.ReadCell(b[i*accounting.CellSize:][:accounting.CellSize], x.node, now); err == nil && used && !e.Final {
			all = append(all, e)
		}
	}
	return all
}

// heard notes what came by message.
func (a *accounts) heard(entries []accounting.Entry) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	for _, e := range entries {
		if e.AsOf = now; e.Final { // by our clock
			delete(a.byMessage, e.Key)
		} else {
			a.byMessage[e.Key] = e
		}
	}
}

// What the ledger is given: indexes of accounts.trouble.
const (
	ofCells = iota
	ofMessages
	ofClaims // of registrations
	ways
)

// failing is why the ledger does not take charges, nil if it does.
func (a *accounts) failing() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.wrong()
}

// wrong is failing, under the lock.
func (a *accounts) wrong() error { return cmp.Or(a.trouble[:]...) }

// openAccounts opens the ledger in a directory; with none it is kept in memory, for as long as the manager runs.
func openAccounts(dir string, tariff accounting.Tariff, log *slog.Logger, now func() time.Time) (*accounts, error) {
	a := &accounts{tariff: tariff, log: log, now: now, byMessage: map[accounting.Key]accounting.Entry{}}
	if dir == "" {
		tmp, err := os.MkdirTemp("", "rfaas-ledger-")
		if err != nil {
			return nil, fmt.Errorf("ledger: %w", err)
		}
		dir, a.path = tmp, tmp
	} else if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	var err error
	if a.ledger, err = accounting.OpenLedger(filepath.Join(dir, "ledger"), ledgerWait); err != nil && a.path != "" {
		os.RemoveAll(a.path)
	}
	if a.path != "" && err == nil {
		os.RemoveAll(a.path) // the open file stays until it is closed
	}
	return a, err
}

func (a *accounts) close() { a.ledger.Close() }

// drop takes over an attachment whose executor has gone, until its last charges are in the ledger. It does not block.
func (a *accounts) drop(x *attachment) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fenced = append(a.fenced, x)
}

// cell is where an entry was found.
type cell struct {
	from  *attachment
	index int
	entry accounting.Entry
}

// harvest reads the cells, merges what is new into the ledger and, when that is on disk, gives the receipts.
func (a *accounts) harvest(live []*attachment) {
	a.harvesting.Lock()
	defer a.harvesting.Unlock()
	a.mu.Lock()
	fenced := a.fenced
	a.fenced = nil
	a.mu.Unlock()
	var cells []cell
	now := a.now()
	a.forget(now)
	a.forgive(now)
	for _, x := range live {
		cells = append(cells, x.read(now)...)
	}
	for _, x := range fenced {
		cells = append(cells, x.read(now)...)
	}
	cells, foreign, err := a.claimed(now, cells)
	if err != nil {
		a.note(ofCells, err)
	}
	if err != nil || !a.merge(now, cells, foreign) {
		a.mu.Lock()
		a.fenced = append(a.fenced, fenced...)
		a.mu.Unlock()
		return // the cells and the journals still have it
	}
	for _, x := range fenced {
		x.free()
	}
	if a.keep > 0 && now.Sub(a.pruned) >= pruneEvery {
		a.pruned = now
		if n, err := a.ledger.Prune(now.Add(-a.keep)); err != nil {
			a.log.Warn("old leases cannot be forgotten", "error", err)
		} else if n > 0 {
			a.log.Info("leases were forgotten; what they used stays on the bills", "leases", n, "older", a.keep)
		}
	}
}

// pruneEvery is how often old leases are looked for.
const pruneEvery = time.Hour

// claimed returns the cells that their owner may charge, and of the others, once for each owner and incarnation, why they are refused.
func (a *accounts) claimed(now time.Time, cells []cell) (good []cell, foreign []string, err error) {
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
	refused, err := a.ledger.Claim(now, claims...)
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

// mayUse says why an owner may not charge under an incarnation: it belongs to another one.
func (a *accounts) mayUse(o *owner, incarnation [16]byte) error {
	switch name, known, err := a.ledger.Owner(incarnation); {
	case err != nil:
		return control.Errorf(control.ClassBusy, "%v", err)
	case known && !o.may(name):
		return fmt.Errorf("%w: incarnation %x", errOwner, incarnation)
	}
	return nil
}

// merge brings cells into the ledger and gives the receipts; false: nothing is on disk. foreign are charges that were refused before.
func (a *accounts) merge(now time.Time, cells []cell, foreign []string) bool {
	if len(cells) == 0 {
		a.refuse(foreign)
		return true
	}
	entries := make([]accounting.Entry, len(cells))
	for i := range cells {
		entries[i] = cells[i].entry
	}
	err := a.ledger.Merge(now, entries...)
	refused, trouble := sift(err)
	a.note(ofCells, trouble)
	if trouble != nil && !errors.Is(trouble, accounting.ErrLedger) {
		return false
	}
	partial := err != nil
	a.refuse(append(refused, foreign...))
	for i := range cells {
		c := &cells[i]
		if partial {
			if e, known, err := a.ledger.Lease(c.entry.Key); err != nil || !known || e.Tenant != c.entry.Tenant || !e.Use.Covers(c.entry.Use) {
				continue
			}
		}
		c.from.receipt(c.index, &c.entry)
	}
	return true
}

// sift parts what Merge says: what single charges were refused for, an executor's fault and nobody else's trouble, from the ledger's trouble.
func sift(err error) (refused []string, trouble error) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil, err // nothing, or nothing is on disk
	}
	var others []error
	for _, err := range joined.Unwrap() {
		if errors.Is(err, accounting.ErrLedger) { // an entry there may be invalid, too
			others = append(others, err)
		} else {
			refused = append(refused, err.Error())
		}
	}
	return refused, errors.Join(others...)
}

// refuse logs and counts charges that executors should not have made, given all that one harvest has met: each once, since it is met
// again at each harvest, in any order, until its executor has gone.
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
	a.untold += len(fresh)
	if a.lines == nil {
		a.lines = rate.NewLimiter(rate.Every(refusedLineEvery), refusedLines)
	}
	if !a.lines.AllowN(a.now(), 1) {
		return // the next line says how many
	}
	slices.Sort(fresh)
	fresh = fresh[:min(len(fresh), refusedTexts)]
	a.log.Warn("charges are refused, all others are taken", "error", strings.Join(fresh, "\n"), "more", a.untold-len(fresh))
	a.untold = 0
}

// An executor can have other charges refused at each harvest. The log has so many lines about them at once and then one in a while, each with so
// many reasons.
const (
	refusedLines     = 10
	refusedLineEvery = time.Minute
	refusedTexts     = 16
)

// refusedCharges is how many charges were refused so far.
func (a *accounts) refusedCharges() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.refusals
}

// note remembers whether the ledger has taken what came by a way, and logs the beginning of trouble and its end.
func (a *accounts) note(way int, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	had := a.wrong() != nil
	a.trouble[way] = err
	switch {
	case err != nil && !had:
		a.log.Error("the ledger does not take charges; they stay in memory and with the executors, and it is tried again", "error", err)
	case had && a.wrong() == nil:
		a.log.Info("the ledger takes charges again")
	}
	if way == ofMessages && err != nil {
		a.failed = a.now()
	}
}

// forgive forgets the trouble of messages when none has failed for a minute: their executors have stopped, or use cells now.
func (a *accounts) forgive(now time.Time) {
	a.mu.Lock()
	over := a.trouble[ofMessages] != nil && now.Sub(a.failed) > forgetMessage
	a.mu.Unlock()
	if over {
		a.note(ofMessages, nil)
	}
}

// read returns the cells that say more than the ledger has.
func (x *attachment) read(now time.Time) []cell {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return nil
	}
	var cells []cell
	b := x.cells.Bytes()
	for i := range x.merged {
		e, used, err := accounting.ReadCell(b[i*accounting.CellSize:][:accounting.CellSize], x.node, now)
		if err != nil || !used {
			continue // a torn one is whole next time
		}
		if m := &x.merged[i]; m.Key == e.Key && m.Use.Covers(e.Use) && m.Final == e.Final {
			continue
		}
		cells = append(cells, cell{x, i, e})
	}
	return cells
}

// receipt tells the executor that an entry is on disk.
func (x *attachment) receipt(i int, e *accounting.Entry) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return
	}
	x.merged[i] = *e
	r := accounting.Receipt{Key: e.Key, Final: e.Final, Use: e.Use}
	var b [accounting.ReceiptSize]byte
	r.Encode(b[:])
	copy(x.cells.Bytes()[i*accounting.CellSize+accounting.ReceiptOffset:], b[:])
}

// state says what is wrong, if anything is.
func (a *accounts) state() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.wrong() != nil:
		return a.wrong().Error()
	case a.path != "":
		return "the accounts are in memory only and end with the resource manager (--state-dir keeps them)"
	}
	return ""
}

// Settle merges sums that come by message, of incarnations that are the caller's: it has registered them, or was the first to charge under
// them (an executor that ends leaves the journal to the next one of its node, which may find a resource manager that has lost its memory).
func (m *Manager) Settle(ctx context.Context, req *control.SettleRequest) (*control.SettleReply, error) {
	entries, err := entriesOf(req)
	if err == nil && len(entries) > 0 {
		if err = m.settleFor(ctx, entries); err == nil {
			err = m.accounts.ledger.Merge(m.accounts.now(), entries...)
			_, trouble := sift(err)
			m.accounts.note(ofMessages, trouble)
			err = settleError(err)
		}
	}
	if err != nil {
		if control.ClassOf(err) == control.ClassInvalid {
			m.accounts.unsettled.Add(1)
		}
		return nil, err
	}
	m.accounts.heard(entries)
	return &control.SettleReply{}, nil
}

// settleFor says why the caller may not charge some of the entries.
func (m *Manager) settleFor(ctx context.Context, entries []accounting.Entry) error {
	o := ownerOf(ctx)
	incarnations := map[[16]byte]bool{}
	for i := range entries {
		incarnations[entries[i].Incarnation] = true
	}
	var claims []accounting.Claim
	for incarnation := range incarnations {
		if err := m.table.check(o, incarnation); errors.Is(err, errOwner) { // the ledger may not have it yet
			return m.answer(ctx, control.Manager_Settle_FullMethodName, err)
		}
		claims = append(claims, o.claim(incarnation))
	}
	refused, err := m.accounts.ledger.Claim(m.accounts.now(), claims...)
	if err != nil {
		m.accounts.note(ofMessages, err)
		return settleError(err)
	}
	if err := errors.Join(refused...); err != nil {
		return m.answer(ctx, control.Manager_Settle_FullMethodName, err)
	}
	return nil
}

// settleError classes what Merge says for an executor: it gives up a charge that is refused, and keeps what the ledger cannot take.
func settleError(err error) error {
	refused, trouble := sift(err)
	switch {
	case len(refused) > 0:
		return control.Errorf(control.ClassInvalid, "%v", err)
	case trouble != nil:
		return control.Errorf(control.ClassBusy, "%v", err)
	}
	return nil
}

func entriesOf(req *control.SettleRequest) ([]accounting.Entry, error) {
	entries := make([]accounting.Entry, 0, len(req.GetEntries()))
	for _, r := range req.GetEntries() {
		if len(r.GetIncarnation()) != 16 || len(r.GetUse()) != accounting.NumCounters {
			return nil, control.Errorf(control.ClassInvalid, "account entry with %d bytes of incarnation and %d counters, want 16 and %d",
				len(r.GetIncarnation()), len(r.GetUse()), accounting.NumCounters)
		}
		e := accounting.Entry{Key: accounting.Key{Lease: r.GetLease(), Part: r.GetPart()}, Tenant: r.GetTenant(), Node: r.GetNode(),
			Began: time.Unix(0, r.GetBeganNs()), AsOf: time.Unix(0, r.GetAsOfNs()), Final: r.GetFinal()}
		copy(e.Incarnation[:], r.GetIncarnation())
		copy(e.Use[:], r.GetUse())
		entries = append(entries, e)
	}
	return entries, nil
}

// Bill says what tenants owe.
func (m *Manager) Bill(_ context.Context, req *control.BillRequest) (*control.BillReply, error) {
	a := m.accounts
	since := time.Unix(max(req.GetSince(), 0), 0).Truncate(time.Hour)
	m.harvest() // what was charged until now
	totals, err := a.ledger.Totals(req.GetTenant(), since)
	if err != nil {
		return nil, control.Errorf(control.ClassFatal, "%v", err)
	}
	reply := &control.BillReply{Currency: a.tariff.Currency, Trouble: a.state()}
	for _, b := range accounting.Bills(&a.tariff, totals, since) {
		t := &control.TenantBill{Tenant: b.Tenant, Amount: b.Amount}
		for _, l := range b.Lines {
			t.Lines = append(t.Lines, &control.BillLine{Item: l.Item, Units: l.Units, Quantity: l.Quantity, Price: l.Price, Amount: l.Amount})
		}
		reply.Bills = append(reply.Bills, t)
	}
	return reply, nil
}
