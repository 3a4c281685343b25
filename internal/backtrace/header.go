package backtrace

import (
	"debug/dwarf"
	"debug/elf"
	"encoding/binary"
)

// entriesMost bounds the directories and the files of a unit.
const entriesMost = 1 << 16

// cursor reads the header of a line table. After an error it has no bytes.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) skip(n uint64) {
	if n > uint64(len(c.b)) {
		c.b, c.bad = nil, true
		return
	}
	c.b = c.b[n:]
}

func (c *cursor) uint8() (v uint8) {
	if len(c.b) > 0 {
		v = c.b[0]
	}
	c.skip(1)
	return v
}

func (c *cursor) uleb() uint64 {
	v, n := binary.Uvarint(c.b)
	if n <= 0 {
		c.b, c.bad = nil, true
		return 0
	}
	c.skip(uint64(n))
	return v
}

// table skips a list of directories or files. It returns false if the list is too long, or has a form that this package does not know.
func (c *cursor) table() bool {
	var forms []uint64
	for range c.uint8() {
		c.uleb() // what the column means
		forms = append(forms, c.uleb())
	}
	n := c.uleb()
	if n > entriesMost {
		return false
	}
	for range n {
		for _, form := range forms {
			switch form {
			case 0x0b: // data1
				c.skip(1)
			case 0x05: // data2
				c.skip(2)
			case 0x06, 0x0e, 0x1f: // data4, strp, line_strp
				c.skip(4)
			case 0x07: // data8
				c.skip(8)
			case 0x1e: // data16
				c.skip(16)
			case 0x0f: // udata
				c.uleb()
			case 0x09: // block
				c.skip(c.uleb())
			case 0x08: // string
				for c.uint8() != 0 {
				}
			default:
				return false
			}
		}
		if c.bad {
			return false
		}
	}
	return !c.bad
}

// plausible reports whether the line table of a unit has a number of directories and files that a library can have. debug/dwarf allocates as
// many as version 5 of the header says, which would end this process if the library is damaged.
func plausible(f *elf.File, unit *dwarf.Entry) bool {
	offset, ok := unit.Val(dwarf.AttrStmtList).(int64)
	section := f.Section(".debug_line")
	if !ok || section == nil || f.ByteOrder != binary.LittleEndian {
		return false
	}
	data, err := section.Data()
	if err != nil || offset < 0 || offset > int64(len(data)) {
		return false
	}
	c := cursor{b: data[offset:]}
	if len(c.b) < 8 || binary.LittleEndian.Uint32(c.b) == 0xffffffff { // 64-bit DWARF
		return false
	}
	version := binary.LittleEndian.Uint16(c.b[4:])
	if version < 5 {
		return true // its lists end with an empty entry
	}
	c.skip(4 + 2 + 2 + 4 + 5) // length, version, sizes of addresses and segments, length of the header, five bytes
	if n := c.uint8(); n > 0 {
		c.skip(uint64(n) - 1)
	}
	directories, files := c.table(), c.table()
	return directories && files
}
