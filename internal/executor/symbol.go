package executor

import (
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
)

const (
	symbolSize  = 24      // of a symbol table's entry
	symbolsMost = 1 << 20 // entries that are looked at
	nameMost    = 256     // bytes of a symbol's name
)

// symbol names the place at an offset from the library's beginning, as "name+0x1f" from the table that also has
// functions which are not exported; "" where nothing is known, in a stripped library for instance. Nothing is kept, and
// little read at a time: this is anybody's file.
func (c *code) symbol(offset uint64) (name string) {
	defer func() {
		if recover() != nil { // debug/elf is not hardened
			name = ""
		}
	}()
	f, err := elf.NewFile(c.file)
	if err != nil {
		return ""
	}
	table := f.SectionByType(elf.SHT_SYMTAB)
	if table == nil || int(table.Link) >= len(f.Sections) || table.FileSize > c.size {
		return ""
	}
	r := io.NewSectionReader(table, 0, int64(min(table.FileSize, symbolsMost*symbolSize)))
	var chunk [4096 * symbolSize]byte
	for {
		n, err := io.ReadFull(r, chunk[:])
		for b := chunk[:n]; len(b) >= symbolSize; b = b[symbolSize:] {
			le := binary.LittleEndian
			at, size := le.Uint64(b[8:]), le.Uint64(b[16:])
			if elf.ST_TYPE(b[4]) != elf.STT_FUNC || offset < at || offset-at >= size {
				continue
			}
			if s := stringAt(f.Sections[table.Link], le.Uint32(b)); s != "" {
				return fmt.Sprintf("%s+%#x", s, offset-at)
			}
		}
		if err != nil {
			return ""
		}
	}
}

// stringAt reads a string of a string table.
func stringAt(table *elf.Section, at uint32) string {
	var b [nameMost]byte
	n, _ := table.ReadAt(b[:], int64(at))
	for i, c := range b[:n] {
		if c == 0 {
			return string(b[:i])
		}
	}
	return ""
}
