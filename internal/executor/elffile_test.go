package executor

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// crafted is a library made by hand: what only a hostile one has.
type crafted struct {
	symbols []uint32 // places of names in strings; every one an exported function
	strings []byte
	needs   []byte // .gnu.version_r
	dynamic []byte
	link    uint32 // section of the strings, 0: the right one
	kind    uint16 // ELF type, 0: a shared library
}

func (c crafted) bytes() []byte {
	le := binary.LittleEndian
	symbols := make([]byte, 24, 24*(1+len(c.symbols)))
	for _, name := range c.symbols {
		s := make([]byte, 24)
		le.PutUint32(s, name)
		s[4] = elf.ST_INFO(elf.STB_GLOBAL, elf.STT_FUNC)
		le.PutUint16(s[6:], 1)
		symbols = append(symbols, s...)
	}
	link := c.link
	if link == 0 {
		link = 2
	}
	body := make([]byte, 64)
	type section struct {
		kind elf.SectionType
		link uint32
		data []byte
	}
	sections := []section{{}, {elf.SHT_DYNSYM, link, symbols}, {elf.SHT_STRTAB, 0, c.strings}, {elf.SHT_DYNAMIC, 2, c.dynamic}}
	if c.needs != nil {
		sections = append(sections, section{elf.SHT_GNU_VERNEED, 2, c.needs})
	}
	var headers []byte
	for _, s := range sections {
		h := make([]byte, 64)
		le.PutUint32(h[4:], uint32(s.kind))
		le.PutUint64(h[24:], uint64(len(body)))
		le.PutUint64(h[32:], uint64(len(s.data)))
		le.PutUint32(h[40:], s.link)
		headers = append(headers, h...)
		body = append(body, s.data...)
	}
	kind := c.kind
	if kind == 0 {
		kind = uint16(elf.ET_DYN)
	}
	copy(body, "\x7fELF\x02\x01\x01")
	le.PutUint16(body[16:], kind)
	le.PutUint16(body[18:], uint16(machine()))
	le.PutUint32(body[20:], 1)
	le.PutUint64(body[40:], uint64(len(body)))
	le.PutUint16(body[52:], 64)
	le.PutUint16(body[58:], 64)
	le.PutUint16(body[60:], uint16(len(sections)))
	return append(body, headers...)
}

// need is one entry of .gnu.version_r with its versions behind it.
func need(library uint32, next uint32, versions ...uint32) []byte {
	le := binary.LittleEndian
	b := make([]byte, 16)
	le.PutUint16(b, 1)
	le.PutUint16(b[2:], uint16(len(versions)))
	le.PutUint32(b[4:], library)
	le.PutUint32(b[8:], 16)
	le.PutUint32(b[12:], next)
	for i, v := range versions {
		a := make([]byte, 16)
		le.PutUint32(a[8:], v)
		if i+1 < len(versions) {
			le.PutUint32(a[12:], 16)
		}
		b = append(b, a...)
	}
	return b
}

func craftedGood() crafted {
	return crafted{symbols: []uint32{1, 6, 1}, strings: []byte("\x00echo\x00price\x00libc.so.6\x00GLIBC_2.17\x00"),
		needs: need(12, 0, 22)}
}

func TestCraftedLibraries(t *testing.T) {
	names, err := inspect(bytes.NewReader(craftedGood().bytes()), &glibc{2, 36})
	if err != nil || fmt.Sprint(names) != "[echo price]" {
		t.Fatalf("functions %v, error %v", names, err)
	}
	long := strings.Repeat("x", maxName+1)
	many := crafted{strings: []byte{0}}
	for i := range maxFunctions + 1 {
		many.symbols = append(many.symbols, uint32(len(many.strings)))
		many.strings = append(many.strings, fmt.Sprintf("f%d\x00", i)...)
	}
	wide := crafted{strings: []byte{0}}
	for i := range 4000 {
		wide.symbols = append(wide.symbols, uint32(len(wide.strings)))
		wide.strings = append(wide.strings, fmt.Sprintf("%s%04d\x00", strings.Repeat("w", 1000), i)...)
	}
	for name, c := range map[string]struct {
		lib  crafted
		text string // of the error; empty: the functions are want
		want string
	}{
		"names that are no UTF-8 are left out": {crafted{symbols: []uint32{1, 6}, strings: []byte("\x00ec\xffo\x00price\x00")}, "", "[price]"},
		"names too long are left out":          {crafted{symbols: []uint32{1, uint32(2 + len(long))}, strings: []byte("\x00" + long + "\x00ok\x00")}, "", "[ok]"},
		"a name without an end":                {crafted{symbols: []uint32{1}, strings: []byte("\x00echo")}, "exports no functions", ""},
		"a name elsewhere":                     {crafted{symbols: []uint32{1 << 30}, strings: []byte("\x00echo\x00")}, "exports no functions", ""},
		"strings that are none":                {crafted{symbols: []uint32{1}, strings: []byte("\x00echo\x00"), link: 1}, "no table of strings", ""},
		"strings in a section beyond":          {crafted{symbols: []uint32{1}, strings: []byte("\x00echo\x00"), link: 99}, "no table of strings", ""},
		"too many functions":                   {many, "more than 65536 functions", ""},
		"names too long together":              {wide, "more than 2097152 bytes", ""},
		"needs that end early":                 {crafted{symbols: []uint32{1}, strings: []byte("\x00f\x00"), needs: need(1, 100, 1)}, "needed versions go on", ""},
		"versions that end early":              {crafted{symbols: []uint32{1}, strings: []byte("\x00f\x00"), needs: need(1, 0, 1, 1)[:40]}, "needed versions go on", ""},
	} {
		t.Run(name, func(t *testing.T) {
			names, err := inspect(bytes.NewReader(c.lib.bytes()), &glibc{2, 36})
			if c.text == "" && (err != nil || fmt.Sprint(names) != c.want) || c.text != "" && (err == nil || !strings.Contains(err.Error(), c.text)) {
				t.Errorf("functions %.80v, error %v; want %s%q", names, err, c.want, c.text)
			}
		})
	}
}

// Small files that would have debug/elf take gigabytes or hours: names that share one long string, needed versions that
// overlap, tables that are said to be larger than any memory.
func TestBombs(t *testing.T) {
	shared := crafted{strings: append(bytes.Repeat([]byte("x"), 1<<20), 0)}
	for i := range 40000 {
		shared.symbols = append(shared.symbols, uint32(i))
	}
	chain := crafted{symbols: []uint32{1}, strings: []byte("\x00f\x00"), needs: bytes.Repeat([]byte{1, 0, 0xff, 0xff, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0}, 1<<16)}
	huge := craftedGood().bytes()
	at := int(binary.LittleEndian.Uint64(huge[40:])) + 64 // the symbols' section header
	binary.LittleEndian.PutUint64(huge[at+32:], 1<<40)
	sections := craftedGood().bytes()
	binary.LittleEndian.PutUint16(sections[60:], 0)
	for name, file := range map[string][]byte{"shared": shared.bytes(), "chain": chain.bytes(), "huge": huge, "sections": sections} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if names, err := inspect(bytes.NewReader(file), &glibc{2, 36}); err == nil {
			t.Errorf("%s: accepted with %d functions", name, len(names))
		}
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > 64<<20 {
			t.Errorf("%s: %d bytes of memory for a file of %d", name, took, len(file))
		}
	}
}

func FuzzInspect(f *testing.F) {
	f.Add(craftedGood().bytes())
	f.Add(crafted{symbols: []uint32{1}, strings: []byte("\x00echo\x00"), dynamic: []byte("\xfb\xff\xff\x6f\x00\x00\x00\x00\x00\x00\x00\x08\x00\x00\x00\x00")}.bytes())
	f.Add(crafted{symbols: []uint32{1, 6}, strings: []byte("\x00ec\xffo\x00_Z1fv\x00"), needs: need(1, 16, 6, 6)}.bytes())
	f.Add([]byte("\x7fELF"))
	f.Fuzz(func(t *testing.T, b []byte) {
		names, err := inspect(bytes.NewReader(b), &glibc{2, 36})
		if err != nil {
			if names != nil || !utf8.ValidString(err.Error()) {
				t.Errorf("functions %q with error %q", names, err)
			}
			return
		}
		if len(names) == 0 || len(names) > maxFunctions || !slices.IsSorted(names) || len(slices.Compact(slices.Clone(names))) != len(names) {
			t.Errorf("functions %q", names)
		}
		for _, n := range names {
			if n == "" || len(n) > maxName || !utf8.ValidString(n) || strings.HasPrefix(n, "_Z") || strings.IndexByte(n, 0) >= 0 {
				t.Errorf("function %q", n)
			}
		}
	})
}
