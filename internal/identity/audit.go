package identity

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Audit is the log of what was refused and of what operators did. Lines are bounded in number, so that a flood of refusals does not
// fill a disk: what is left out is counted in the next line. Safe for concurrent use.
type Audit struct {
	log   *slog.Logger
	file  *os.File
	level slog.Level

	mu      sync.Mutex
	window  time.Time
	written int
	omitted uint64
}

// maxAudit is the most lines of refusals in a second.
const maxAudit = 20

// OpenAudit appends to a file of JSON lines, mode 0600, whose directory it makes, mode 0700. An empty path writes to the log instead.
func OpenAudit(path string, log *slog.Logger) (*Audit, error) {
	if path == "" {
		return &Audit{log: log, level: slog.LevelWarn}, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	return &Audit{log: slog.New(slog.NewJSONHandler(f, nil)), file: f, level: slog.LevelInfo}, nil
}

// Refused writes down a refusal: why, what was called, from where, and who it was if that is known.
func (a *Audit) Refused(e *Error, method, remote, who string, now time.Time) {
	a.mu.Lock()
	if now.Sub(a.window).Abs() >= time.Second {
		a.window, a.written = now, 0
	}
	if a.written++; a.written > maxAudit {
		a.omitted++
		a.mu.Unlock()
		return
	}
	omitted := a.omitted
	a.omitted = 0
	a.mu.Unlock()
	attrs := []slog.Attr{slog.String("reason", string(e.Reason)), slog.String("detail", e.Text), slog.String("method", method),
		slog.String("remote", remote)}
	if who != "" {
		attrs = append(attrs, slog.String("who", who))
	}
	if omitted > 0 {
		attrs = append(attrs, slog.Uint64("omitted", omitted))
	}
	a.log.LogAttrs(context.Background(), a.level, "refused", attrs...)
}

// Did writes down what an operator did.
func (a *Audit) Did(method, remote, who string) {
	a.log.LogAttrs(context.Background(), slog.LevelInfo, "operator", slog.String("method", method), slog.String("remote", remote),
		slog.String("who", who))
}

// Close closes the file. Nothing may be written any more.
func (a *Audit) Close() {
	if a.file != nil {
		a.file.Close()
	}
}
