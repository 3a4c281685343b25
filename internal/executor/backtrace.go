package executor

import (
	"context"
	"strconv"
	"strings"
	"time"
)

// namingTimeout bounds how long the report of a death waits for the names of static functions.
const namingTimeout = 500 * time.Millisecond

// nameFrames replaces the lines "library+0x1139" of a backtrace, which the dynamic linker could not name, by names of
// static functions from the library's symbol table. It leaves a line unchanged if that fails. Another process reads the
// library. The worker is dead by then and its cores are free. It blocks for at most namingTimeout.
func (e *Executor) nameFrames(c *code, backtrace string) string {
	lines := strings.Split(backtrace, "\n")
	var unnamed []int // indices of lines
	var offsets []uint64
	for i, line := range lines {
		digits, ok := strings.CutPrefix(line, "library+0x")
		if !ok {
			continue
		}
		if offset, err := strconv.ParseUint(digits, 16, 64); err == nil {
			unnamed, offsets = append(unnamed, i), append(offsets, offset)
		}
	}
	if len(offsets) == 0 {
		return backtrace
	}
	ctx, cancel := context.WithTimeout(context.Background(), namingTimeout)
	defer cancel()
	names, err := e.cfg.Spawner.Symbols(ctx, c.file, offsets)
	if err != nil {
		e.log.Debug("cannot name the static functions of a backtrace", "frames", len(offsets), "error", err)
		return backtrace
	}
	for i, name := range names {
		if name != "" {
			lines[unnamed[i]] = name
		}
	}
	return strings.Join(lines, "\n")
}
