// Package backtrace adds lines of the source to the backtrace of a worker that crashed. The worker itself reports functions and
// offsets only, since it must not read debug information in a signal handler. The client's side has the library, and reads it here.
package backtrace

import (
	"bytes"
	"debug/dwarf"
	"debug/elf"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
)

const (
	// patience bounds how long the report of a crash waits for the lines.
	patience = 200 * time.Millisecond
	// debugMost bounds the debug information and the symbol tables that are read. A larger library gets no lines.
	debugMost = 64 << 20
	// framesMost is more than a worker reports.
	framesMost = 128
	// pathMost bounds the bytes of a file's path in the text. Of a longer path the end remains.
	pathMost = 160
)

// busy is held while a library is read.
var busy = make(chan struct{}, 1)

// WithLines returns the backtrace with file and line added to each function of the library, like "price+0x1f at
// /home/ann/prices.c:42". It leaves lines unchanged if their place is unknown. It leaves the whole backtrace unchanged if the
// library has no debug information, or takes too long to read. It returns within 0.2 seconds.
func WithLines(trace string, library []byte) string {
	frames := parse(trace)
	if len(frames) == 0 {
		return trace
	}
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	select {
	case busy <- struct{}{}:
	case <-timeout.C: // the library of another crash takes long to read
		return trace
	}
	found := make(chan map[int]string, 1)
	go func() {
		defer func() { <-busy }()
		defer func() {
			if recover() != nil { // damaged debug information that the parser does not expect
				found <- nil
			}
		}()
		found <- places(frames, library, time.Now().Add(patience))
	}()
	select {
	case at := <-found:
		lines := strings.Split(trace, "\n")
		for i, place := range at {
			lines[i] += " at " + place
		}
		return strings.Join(lines, "\n")
	case <-timeout.C:
		return trace
	}
}

// frame is a line of a backtrace that names a function of the library.
type frame struct {
	line     int // index in the backtrace
	function string
	offset   uint64
	exact    bool // offset is of the instruction, and not of the one to which a call returns
}

// unnamed stands for a function whose name the worker does not know. The offset counts from the beginning of the library.
const unnamed = "library"

// parse returns the frames of the library. Those of other libraries have the library's name behind them.
func parse(trace string) (frames []frame) {
	for i, line := range strings.Split(trace, "\n") {
		if len(frames) == framesMost {
			break
		}
		name, digits, ok := strings.Cut(line, "+0x")
		if !ok || name == "" {
			continue
		}
		if offset, err := strconv.ParseUint(digits, 16, 64); err == nil {
			frames = append(frames, frame{i, name, offset, i == 0})
		}
	}
	return frames
}

// places returns the places of the frames that it finds until then, by their lines in the backtrace.
func places(frames []frame, library []byte, until time.Time) map[int]string {
	f, err := elf.NewFile(bytes.NewReader(library))
	if err != nil || tooLarge(f) {
		return nil
	}
	d, err := f.DWARF()
	if err != nil {
		return nil
	}
	starts := functions(f, frames)
	found := map[int]string{}
	for _, at := range frames {
		start, ok := starts.of(&at)
		if !ok {
			continue
		}
		if time.Now().After(until) {
			break
		}
		pc := start + at.offset
		if !at.exact {
			pc--
		}
		if place := placeOf(f, d, pc); place != "" {
			found[at.line] = place
		}
	}
	return found
}

// tooLarge also refuses sections that are compressed in the way of old compilers, whose size is not known before they are read.
func tooLarge(f *elf.File) bool {
	var sum uint64
	for _, s := range f.Sections {
		switch {
		case strings.HasPrefix(s.Name, ".zdebug_"):
			return true
		case s.Type == elf.SHT_SYMTAB, s.Type == elf.SHT_DYNSYM, s.Type == elf.SHT_STRTAB, strings.HasPrefix(s.Name, ".debug_"):
			if s.Size > debugMost-sum {
				return true
			}
			sum += s.Size
		}
	}
	return false
}

// symbols are the functions of some names. Several static functions may have the same name.
type symbols map[string][]elf.Symbol

func functions(f *elf.File, frames []frame) symbols {
	all := symbols{}
	for _, at := range frames {
		all[at.function] = nil
	}
	add := func(list []elf.Symbol, _ error) {
		for _, s := range list {
			have, wanted := all[s.Name]
			known := false
			for _, h := range have { // exported functions are in both tables
				known = known || h.Value == s.Value
			}
			if wanted && !known && s.Section != elf.SHN_UNDEF && elf.ST_TYPE(s.Info) == elf.STT_FUNC {
				all[s.Name] = append(have, s)
			}
		}
	}
	add(f.Symbols())
	add(f.DynamicSymbols())
	return all
}

// of returns the address at which the frame's function begins. ok is false if several functions match.
func (all symbols) of(at *frame) (start uint64, ok bool) {
	for _, s := range all[at.function] {
		if s.Size != 0 && at.offset > s.Size {
			continue
		}
		if ok {
			return 0, false
		}
		start, ok = s.Value, true
	}
	if !ok && at.function == unnamed {
		return 0, true
	}
	return start, ok && start <= math.MaxUint64-at.offset
}

// placeOf returns the file and the line of an instruction, "" if they are unknown.
func placeOf(f *elf.File, d *dwarf.Data, pc uint64) string {
	unit, err := d.Reader().SeekPC(pc)
	if err != nil || !plausible(f, unit) {
		return ""
	}
	lines, err := d.LineReader(unit)
	if err != nil || lines == nil {
		return ""
	}
	at, ok := rowOf(lines, pc)
	if !ok || at.File == nil || at.Line == 0 {
		return ""
	}
	path := strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, at.File.Name)
	if len(path) > pathMost {
		path = "..." + strings.ToValidUTF8(path[len(path)-pathMost:], "")
	}
	return fmt.Sprintf("%s:%d", path, at.Line)
}

// rowOf returns the row of an instruction. LineReader.SeekPC gives up if the first sequence lies above the instruction, which is so for cold
// functions (.text.unlikely).
func rowOf(lines *dwarf.LineReader, pc uint64) (row dwarf.LineEntry, ok bool) {
	var next dwarf.LineEntry
	for lines.Next(&next) == nil {
		if ok && !row.EndSequence && row.Address <= pc && pc < next.Address {
			return row, true
		}
		row, ok = next, true
	}
	return row, false
}
