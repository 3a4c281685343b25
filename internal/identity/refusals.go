package identity

import (
	"net"
	"strings"
	"sync"
	"time"
)

const (
	// refusalsEvery is the interval for which equal refusals are counted before one line reports their number.
	refusalsEvery = time.Minute
	// maxRefusals is how many different refusals are counted separately. Further ones are counted by their reason
	// alone.
	maxRefusals = 1024
)

// refusal is the key of refusals that are counted together.
type refusal struct {
	reason            Reason
	method, host, who string
}

// tally counts equal refusals since the last line that reported them.
type tally struct {
	since time.Time // first refusal that no line has reported
	from  time.Time // beginning of the interval
	count uint64
	last  AuditEntry
}

// refusals counts repeated refusals. Each refusal is in the count of exactly one line.
type refusals struct {
	mu sync.Mutex
	of map[refusal]*tally
}

// Refused records a refusal: the reason, the method, the remote address, and the caller if it is known. The first
// refusal is written at once. Further ones with the same caller (remote's host and who), method and reason are counted,
// and one line a minute reports their number.
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
		line.Who, line.Remote, line.Method, line.Detail = "", "", "", "too many different callers to list separately"
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

// due returns the lines of counts whose interval is over, or all counts, and forgets empty ones.
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
