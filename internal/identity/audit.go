package identity

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"
)

// The events of audit lines.
const (
	AuditGrant    = "grant"    // of a lease
	AuditRelease  = "release"  // of a lease, by its holder or since the holder has gone
	AuditKill     = "kill"     // of a lease that expired or was revoked, or of one worker
	AuditDrain    = "drain"    // of a node, and of each lease that it ends
	AuditRefused  = "refused"  // call or connection
	AuditOperator = "operator" // call of an operator
	AuditJoin     = "join"     // of an executor, at the resource manager
	AuditLeave    = "leave"    // likewise
	AuditDropped  = "dropped"  // lines that found no place in the queue
)

// AuditEntry is one line of the audit log. docs/operations.md documents the fields; empty ones are left out.
type AuditEntry struct {
	Time        time.Time  `json:"time"`
	Event       string     `json:"event"`
	Daemon      string     `json:"daemon,omitempty"`
	Node        string     `json:"node,omitempty"`
	Lease       uint64     `json:"lease,string,omitempty"` // a string: many readers of JSON round such numbers
	Tenant      string     `json:"tenant,omitempty"`
	UID         *uint32    `json:"uid,omitempty"`
	Who         string     `json:"who,omitempty"`
	Remote      string     `json:"remote,omitempty"`
	Code        string     `json:"code,omitempty"`
	Workers     int        `json:"workers,omitempty"`
	Cores       []int      `json:"cores,omitempty"`
	MemoryBytes uint64     `json:"memory_bytes,omitempty"`
	Start       string     `json:"start,omitempty"`
	Worker      *int       `json:"worker,omitempty"`
	State       string     `json:"state,omitempty"`
	Reason      string     `json:"reason,omitempty"`
	Detail      string     `json:"detail,omitempty"`
	Method      string     `json:"method,omitempty"`
	Count       uint64     `json:"count,omitempty"`
	Since       *time.Time `json:"since,omitempty"`
}

// AuditConfig says where an Audit writes.
type AuditConfig struct {
	Path   string       // empty: the log alone
	Log    *slog.Logger // nil: nothing is logged
	Daemon string       // written in each line, if it is set
	// Open opens the file at Path for appending, first and whenever it was renamed or removed. nil: OpenAuditFile.
	Open func(path string) (*os.File, error)
	Now  func() time.Time // nil: time.Now
}

const (
	// auditQueue is how many lines wait to be written. More are dropped and counted.
	auditQueue = 8192
	// auditTick is how often it is looked for refusals that are due.
	auditTick = time.Second
)

// Audit writes down who was granted what, how that ended, what was refused and what operators did: as lines of JSON into a file, and
// into the log. Nobody waits for the disk: one goroutine writes what others queue. Safe for concurrent use. A nil Audit writes
// nothing.
type Audit struct {
	cfg     AuditConfig
	node    string
	queue   chan AuditEntry
	flush   chan chan struct{}
	stop    chan struct{}
	done    chan struct{}
	dropped atomic.Uint64
	begun   sync.Once // the goroutine that writes: with the first line

	mu     sync.RWMutex // held to queue and to close
	closed bool

	refusals refusals

	// Of the goroutine that writes.
	file    *os.File
	failing bool   // the file cannot be written
	torn    bool   // it ends within a line
	told    uint64 // of dropped
}

// OpenAudit opens the file, if there is one. Close it.
func OpenAudit(cfg AuditConfig) (*Audit, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Open == nil {
		cfg.Open = OpenAuditFile
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	node, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	a := &Audit{cfg: cfg, node: node, queue: make(chan AuditEntry, auditQueue), flush: make(chan chan struct{}),
		stop: make(chan struct{}), done: make(chan struct{}), refusals: refusals{of: map[refusal]*tally{}}}
	if cfg.Path != "" {
		if a.file, err = cfg.Open(cfg.Path); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// OpenAuditFile opens a file for appending, mode 0600, and makes its directory, mode 0700.
func OpenAuditFile(path string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	return os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
}

// Write queues a line, to which it adds the time, the daemon and, unless it names one, this node. It does not block: false says that the line was dropped, since
// auditQueue others wait, or since the Audit is closed.
func (a *Audit) Write(e AuditEntry) bool {
	if a == nil {
		return true
	}
	if e.Time.IsZero() {
		e.Time = a.cfg.Now()
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	if !a.closed {
		select {
		case a.queue <- e:
			a.begin()
			return true
		default:
		}
	}
	a.dropped.Add(1)
	return false
}

// Did writes down what an operator did.
func (a *Audit) Did(method, remote, who string) {
	a.Write(AuditEntry{Event: AuditOperator, Method: method, Remote: remote, Who: who})
}

// Dropped is how many lines were dropped.
func (a *Audit) Dropped() uint64 {
	if a == nil {
		return 0
	}
	return a.dropped.Load()
}

// Flush returns when all lines that were queued before are written.
func (a *Audit) Flush() {
	if a == nil {
		return
	}
	a.begin()
	written := make(chan struct{})
	select {
	case a.flush <- written:
		<-written
	case <-a.done:
	}
}

// Close writes what is queued, and what was refused and counted, and closes the file. Later lines are dropped.
func (a *Audit) Close() {
	if a == nil {
		return
	}
	a.mu.Lock()
	if !a.closed {
		a.closed = true
		close(a.stop)
	}
	a.mu.Unlock()
	a.begin()
	<-a.done
}

func (a *Audit) begin() { a.begun.Do(func() { go a.run() }) }

func (a *Audit) run() {
	defer close(a.done)
	tick := time.NewTicker(auditTick)
	defer tick.Stop()
	for {
		select {
		case e := <-a.queue:
			a.write(a.queued(e))
		case written := <-a.flush:
			a.write(a.queued())
			close(written)
		case <-tick.C:
			a.write(a.refusals.due(a.cfg.Now(), false))
		case <-a.stop:
			a.write(append(a.queued(), a.refusals.due(a.cfg.Now(), true)...))
			if a.file != nil {
				a.file.Close()
			}
			return
		}
	}
}

// queued is what waits behind e, so that one write takes all of it.
func (a *Audit) queued(e ...AuditEntry) []AuditEntry {
	for len(e) < auditQueue {
		select {
		case next := <-a.queue:
			e = append(e, next)
		default:
			return e
		}
	}
	return e
}

// write writes lines into the file, and into the log what the file does not have or an operator wants to see at once.
func (a *Audit) write(entries []AuditEntry) {
	if n := a.dropped.Load(); n > a.told {
		entries = append(entries, AuditEntry{Time: a.cfg.Now(), Event: AuditDropped, Count: n - a.told})
		a.told = n
	}
	if len(entries) == 0 {
		return
	}
	for i := range entries {
		e := &entries[i]
		e.Time, e.Daemon, e.Node = e.Time.UTC(), a.cfg.Daemon, cmp.Or(e.Node, a.node)
	}
	filed := a.cfg.Path != "" && a.append(entries)
	for i := range entries {
		e := &entries[i]
		level := slog.LevelInfo
		switch e.Event {
		case AuditRefused, AuditDropped:
			level = slog.LevelWarn
		case AuditGrant, AuditRelease:
			if filed {
				level = slog.LevelDebug // once is enough of what happens all the time
			}
		}
		a.cfg.Log.LogAttrs(context.Background(), level, "audit", e.attrs()...)
	}
}

// append adds lines to the file.
func (a *Audit) append(entries []AuditEntry) bool {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if a.torn {
		b.WriteByte('\n')
	}
	for i := range entries {
		if err := enc.Encode(&entries[i]); err != nil { // cannot be
			a.cfg.Log.Error("audit line", "error", err)
		}
	}
	err := a.reopen()
	if err == nil {
		var n int
		n, err = a.file.Write(b.Bytes())
		a.torn = err != nil && (a.torn || n > 0)
	}
	switch {
	case err != nil && !a.failing:
		a.cfg.Log.Error("the audit file cannot be written: its lines are in the log", "file", a.cfg.Path, "error", err)
	case err == nil && a.failing:
		a.cfg.Log.Info("the audit file is written again", "file", a.cfg.Path)
	}
	a.failing = err != nil
	return err == nil
}

// reopen opens the file anew if it was renamed or removed, as programs do that rotate logs.
func (a *Audit) reopen() error {
	if a.file != nil {
		open, err := a.file.Stat()
		if err != nil {
			return err
		}
		there, err := os.Stat(a.cfg.Path)
		if errors.Is(err, fs.ErrPermission) { // the directory is root's, and this process is not any more
			return a.reopenHidden(open)
		}
		if err == nil && os.SameFile(open, there) || err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil
		}
	}
	file, err := a.cfg.Open(a.cfg.Path)
	if err != nil {
		return err
	}
	if a.file != nil {
		a.file.Close()
	}
	a.file = file
	return nil
}

// reopenHidden is reopen for a file that only Open can look at.
func (a *Audit) reopenHidden(open os.FileInfo) error {
	file, err := a.cfg.Open(a.cfg.Path)
	if err != nil {
		return err
	}
	old := a.file
	if there, err := file.Stat(); err == nil && os.SameFile(open, there) {
		old = file
	} else {
		a.file = file
	}
	return old.Close()
}

// attrs is the line for the log, which adds a time of its own.
func (e *AuditEntry) attrs() []slog.Attr {
	attrs := []slog.Attr{slog.String("event", e.Event)}
	text := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	number := func(key string, value uint64) {
		if value != 0 {
			attrs = append(attrs, slog.Uint64(key, value))
		}
	}
	number("lease", e.Lease)
	text("tenant", e.Tenant)
	if e.UID != nil {
		attrs = append(attrs, slog.Uint64("uid", uint64(*e.UID)))
	}
	text("who", e.Who)
	text("remote", e.Remote)
	text("node", e.Node)
	text("code", e.Code)
	number("workers", uint64(e.Workers))
	if len(e.Cores) > 0 {
		attrs = append(attrs, slog.Any("cores", e.Cores))
	}
	number("memory_bytes", e.MemoryBytes)
	text("start", e.Start)
	if e.Worker != nil {
		attrs = append(attrs, slog.Int("worker", *e.Worker))
	}
	text("state", e.State)
	text("reason", e.Reason)
	text("detail", e.Detail)
	text("method", e.Method)
	number("count", e.Count)
	if e.Since != nil {
		attrs = append(attrs, slog.Time("since", *e.Since))
	}
	return attrs
}
