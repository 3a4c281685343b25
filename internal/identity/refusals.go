package identity

import (
	"net"
	"strings"
	"sync"
	"time"
)

const (
	// refusalsEvery is how long refusals of the same caller for the same reason are counted, before a line says how many they were.
	refusalsEvery = time.Minute
	// maxRefusals is how many different ones are told apart meanwhile. The others count by their reason alone.
	maxRefusals = 1024
)

// refusal is what refusals have in common that count together.
type refusal struct {
	reason            Reason
	method, host, who string
}

// tally is how often that was refused since the last line that said so.
type tally struct {
	since time.Time // of the first one that no line has
	from  time.Time // when the interval began
	count uint64
	last  AuditEntry
}

// refusals counts repeated refusals. Each refusal is in the count of exactly one line.
type refusals struct {
	mu sync.Mutex
	of map[refusal]*tally
}

// Refused writes down a refusal: why, what was called, from where, and who it was if that is known. The first one is written at
// once. Others of the same caller (remote's host and who), method and reason are counted, and one line a minute says how many.
func (a *Audit) Refused(e *Error, method, remote, who string, now time.Time) {
	if a == nil {
		return
	}
	host, _, err := net.SplitHostPort(remote)
	if err != nil {
		host, _, _ = strings.Cut(remote, " pid ") // of a unix socket
	}
	r := &a.refusals
	r.mu.Lock()
	defer r.mu.Unlock()
	key := refusal{e.Reason, method, host, who}
	line := AuditEntry{Time: now, Event: AuditRefused, Who: who, Remote: remote, Reason: string(e.Reason), Detail: e.Text, Method: method, Count: 1}
	t := r.of[key]
	if t == nil && len(r.of) >= maxRefusals {
		key = refusal{reason: e.Reason}
		line.Who, line.Remote, line.Method, line.Detail = "", "", "", "different callers, and too many of them to be told apart"
		t = r.of[key]
	}
	if t == nil {
		t = &tally{from: now}
		r.of[key] = t
		if a.Write(line) {
			return
		}
	}
	if t.count == 0 {
		t.since = now
	}
	t.count++
	t.last = line
}

// due returns the lines of counts whose interval is over, or of all, and forgets those that count nothing any more.
func (r *refusals) due(now time.Time, all bool) (lines []AuditEntry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, t := range r.of {
		if !all && now.Sub(t.from).Abs() < refusalsEvery {
			continue
		}
		if t.count == 0 {
			delete(r.of, key)
			continue
		}
		line, since := t.last, t.since.UTC()
		line.Time, line.Count, line.Since = now, t.count, &since
		lines = append(lines, line)
		t.from, t.count = now, 0
	}
	return lines
}
