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
	AuditGrant    = "grant"    // a lease is granted, or a worker is added to it
	AuditRelease  = "release"  // a lease is released by its client
	AuditKill     = "kill"     // a lease expired, was revoked or lost its client, or one worker is killed
	AuditDrain    = "drain"    // a node drains, or the drain ends a lease
	AuditHandover = "handover" // the daemon hands its process and its leases over to another program
	AuditRefused  = "refused"  // a call or connection is refused
	AuditOperator = "operator" // an operator makes a call
	AuditJoin     = "join"     // an executor registers at the resource manager
	AuditLeave    = "leave"    // an executor deregisters there
	AuditEnrol    = "enrol"    // a node gets its certificate by an enrolment code
	AuditRenew    = "renew"    // a node renews its certificate
	AuditToken    = "token"    // a user gets a token
	AuditRevoke   = "revoke"   // a user revokes tokens
	AuditDropped  = "dropped"  // lines were dropped because the queue was full
)

// AuditEntry is one line of the audit log. docs/operations.md documents the fields; empty ones are left out.
type AuditEntry struct {
	Time        time.Time  `json:"time"`
	Event       string     `json:"event"`
	Daemon      string     `json:"daemon,omitempty"`
	Node        string     `json:"node,omitempty"`
	Lease       uint64     `json:"lease,string,omitempty"` // a string, because many JSON parsers round large numbers
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
	Path   string       // empty: write to Log only
	Log    *slog.Logger // nil: nothing is logged
	Daemon string       // name in each line, if set
	// Open opens the file at Path for appending, at the start and whenever the file was renamed or removed. nil:
	// OpenAuditFile.
	Open func(path string) (*os.File, error)
	Now  func() time.Time // nil: time.Now
}

const (
	// auditQueue is how many lines may wait to be written. More are dropped and counted.
	auditQueue = 8192
	// auditTick is how often counted refusals are checked for being due.
	auditTick = time.Second
)

// Audit records grants of leases, their ends, refusals and calls of operators: as lines of JSON in a file, and in the
// log. Callers do not wait for the disk: one goroutine writes the lines that others queue. Audit is safe for concurrent
// use. A nil Audit writes nothing.
type Audit struct {
	cfg     AuditConfig
	node    string
	queue   chan AuditEntry
	flush   chan chan struct{}
	stop    chan struct{}
	done    chan struct{}
	dropped atomic.Uint64
	begun   sync.Once // starts the writing goroutine, with the first line

	mu     sync.RWMutex // read-locked to queue a line, locked to close
	closed bool

	refusals refusals

	// Used only by the writing goroutine.
	file    *os.File
	failing bool   // the last write failed
	torn    bool   // the file ends within a line
	told    uint64 // part of dropped that lines have reported
}

// OpenAudit returns an Audit and opens its file, if cfg names one. The caller closes it.
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

// OpenAuditFile opens a file for appending, with mode 0600, and creates its directory with mode 0700.
func OpenAuditFile(path string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	return os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
}

// Write queues a line and adds the time, the daemon and, unless the line names one, this node. It does not block. It
// returns false if the line was dropped, because auditQueue lines wait or the Audit is closed.
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

// Did records a call of an operator.
func (a *Audit) Did(method, remote, who string) {
	a.Write(AuditEntry{Event: AuditOperator, Method: method, Remote: remote, Who: who})
}

// Dropped returns how many lines were dropped.
func (a *Audit) Dropped() uint64 {
	if a == nil {
		return 0
	}
	return a.dropped.Load()
}

// Flush waits until all lines that were queued before are written.
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

// Close writes the queued lines and the counted refusals, and closes the file. Later lines are dropped.
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

// queued returns e and the lines that wait behind it, so that one write takes all of them.
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

// write writes lines to the file and to the log. Lines that the file has are logged at a lower level if they are
// frequent.
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
				level = slog.LevelDebug // frequent, and already in the file
			}
		}
		a.cfg.Log.LogAttrs(context.Background(), level, "audit", e.attrs()...)
	}
}

// append adds lines to the file. It returns false if they could not be written.
func (a *Audit) append(entries []AuditEntry) bool {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if a.torn {
		b.WriteByte('\n')
	}
	for i := range entries {
		if err := enc.Encode(&entries[i]); err != nil { // impossible
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
		a.cfg.Log.Error("cannot write the audit file; its lines go to this log", "file", a.cfg.Path, "error", err)
	case err == nil && a.failing:
		a.cfg.Log.Info("writing to the audit file again", "file", a.cfg.Path)
	}
	a.failing = err != nil
	return err == nil
}

// reopen opens the file again if it was renamed or removed, as log rotation does.
func (a *Audit) reopen() error {
	if a.file != nil {
		open, err := a.file.Stat()
		if err != nil {
			return err
		}
		there, err := os.Stat(a.cfg.Path)
		if errors.Is(err, fs.ErrPermission) { // the directory belongs to root, which this process has given up
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

// reopenHidden is reopen for a file that only cfg.Open can reach.
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

// attrs returns the line for the log, which adds its own time.
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
