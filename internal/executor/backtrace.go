package executor

import (
	"context"
	"strconv"
	"strings"
	"time"
)

// namingTimeout bounds how much later a death is told because the places in its backtrace are being named.
const namingTimeout = 500 * time.Millisecond

// nameFrames replaces the lines "library+0x1139" of a backtrace, places that the dynamic linker could not name, by names from the library's
// symbol table: those of static functions. Where that fails they stay as they are. The worker is dead and its cores are free: another
// process reads the library.
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
		e.log.Debug("the places of a backtrace stay without names", "places", len(offsets), "error", err)
		return backtrace
	}
	for i, name := range names {
		if name != "" {
			lines[unnamed[i]] = name
		}
	}
	return strings.Join(lines, "\n")
}
