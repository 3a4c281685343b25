package zygote

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

func hostMachine() elf.Machine {
	if runtime.GOARCH == "arm64" {
		return elf.EM_AARCH64
	}
	return elf.EM_X86_64
}

// crafted is a library made by hand, with contents that only hostile libraries have.
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
	le.PutUint16(body[18:], uint16(hostMachine()))
	le.PutUint32(body[20:], 1)
	le.PutUint64(body[40:], uint64(len(body)))
	le.PutUint16(body[52:], 64)
	le.PutUint16(body[58:], 64)
	le.PutUint16(body[60:], uint16(len(sections)))
	return append(body, headers...)
}

// need is one entry of .gnu.version_r, followed by its versions.
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

// inspectBytes makes a worker read a library.
func inspectBytes(t testing.TB, z *Zygote, lib []byte) ([]string, error) {
	t.Helper()
	names, err := z.Inspect(t.Context(), sealed(t, lib))
	if err != nil && names != nil {
		t.Errorf("functions %q with error %v", names, err)
	}
	return names, err
}

// wantRefused checks that a library is refused as unusable, with this text.
func wantRefused(t *testing.T, names []string, err error, text string) {
	t.Helper()
	var we *WorkerError
	if !errors.As(err, &we) || we.Status != wire.StatusBadLibrary || !strings.Contains(err.Error(), text) {
		t.Errorf("functions %.80v, error %v; want a bad library and %q", names, err, text)
	}
}

func build(t testing.TB, name, source string, flags ...string) []byte {
	t.Helper()
	b, err := os.ReadFile(compile(t, name, append(flags, writeSource(t, name, source))...))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

const inspectedSource = `
#include <stdint.h>
#include <stdlib.h>
int variable = 1;
static uint32_t hidden_by_static(void) { return 1; }
__attribute__((visibility("hidden"))) uint32_t hidden(void) { return hidden_by_static(); }
__attribute__((weak)) uint32_t weak(void) { return 1; }
uint32_t zeta(void *a, uint32_t n, void *r) { (void)a, (void)n, (void)r; return hidden(); }
uint32_t Alpha(void *a, uint32_t n, void *r) { (void)a, (void)n, (void)r; return malloc(1) != 0; }
uint32_t alpha_2(void *a, uint32_t n, void *r) { (void)a, (void)n, (void)r; return 0; }
uint32_t alpha(void *a, uint32_t n, void *r) { (void)a, (void)n, (void)r; return 0; }
uint32_t _Z3fooPvjS_(void *a, uint32_t n, void *r) { (void)a, (void)n, (void)r; return 0; }
`

// The functions of a library are those that C exports, in the order of their names. The position of a function is its
// index.
func TestInspect(t *testing.T) {
	z := startZygote(t)
	names, err := inspectBytes(t, z, build(t, "inspected.so", inspectedSource, "-shared", "-fPIC"))
	if err != nil || fmt.Sprint(names) != "[Alpha alpha alpha_2 zeta]" {
		t.Errorf("functions %v, error %v", names, err)
	}
	// A library without needed versions has no such section.
	names, err = inspectBytes(t, z, build(t, "needs-nothing.so", "int f(void) { return 1; }", "-shared", "-fPIC", "-nostdlib"))
	if err != nil || fmt.Sprint(names) != "[f]" {
		t.Errorf("functions %v, error %v", names, err)
	}
}

func TestInspectRefuses(t *testing.T) {
	z := startZygote(t)
	good := build(t, "inspected.so", inspectedSource, "-shared", "-fPIC")
	patched := func(at int, b ...byte) []byte {
		c := bytes.Clone(good)
		copy(c[at:], b)
		return c
	}
	head32 := make([]byte, 52)
	copy(head32, "\x7fELF\x01\x01\x01")
	newer := bytes.ReplaceAll(good, []byte("GLIBC_2.2.5\x00"), []byte("GLIBC_9.9.9\x00"))
	for name, c := range map[string]struct {
		file []byte
		text string
	}{
		"text":           {[]byte("#!/bin/sh\n"), "not an ELF file: it begins with the bytes 23 21 2f 62"},
		"one byte":       {[]byte("#"), "not an ELF file: it begins with the bytes 23"},
		"cut":            {good[:40], "malformed ELF file: it ends in its header"},
		"cut later":      {good[:len(good)/2], "malformed ELF file: it ends before"},
		"32 bits":        {head32, "ELF class ELFCLASS32, ELFDATA2LSB; this node needs 64 bits, little endian"},
		"big endian":     {patched(5, 2), "ELFDATA2MSB"},
		"other machine":  {patched(18, 0xf3, 0), "built for EM_RISCV"},
		"object":         {build(t, "inspected.o", inspectedSource, "-c"), "ELF type ET_REL"},
		"program":        {build(t, "no-pie", "int main(void) { return 0; }", "-no-pie"), "ELF type ET_EXEC"},
		"pie":            {build(t, "pie", "int main(void) { return 0; }", "-pie", "-fPIE"), "a position-independent program"},
		"no functions":   {build(t, "data.so", "int data = 1;", "-shared", "-fPIC"), "exports no functions"},
		"all hidden":     {build(t, "hidden.so", "int f(void) { return 0; }", "-shared", "-fPIC", "-fvisibility=hidden"), "exports no functions"},
		"only C++":       {build(t, "cpp.so", "int _Z1fv(void) { return 0; }", "-shared", "-fPIC"), "exports no functions"},
		"no sections":    {patched(60, 0, 0), "malformed ELF file: 0 sections of 64 bytes"},
		"glibc too new":  {newer, `needs GLIBC_9.9 of "libc.so.6", but this node has glibc 2.`},
		"a library only": {crafted{strings: []byte{0}}.bytes(), "exports no functions"},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "glibc too new" && bytes.Equal(newer, good) {
				t.Skip("this system's glibc is not versioned like that of x86_64")
			}
			names, err := inspectBytes(t, z, c.file)
			wantRefused(t, names, err, c.text)
		})
	}
}

func craftedShared() []byte {
	c := crafted{strings: append(bytes.Repeat([]byte("x"), 1<<20), 0)}
	for i := range 40000 {
		c.symbols = append(c.symbols, uint32(i))
	}
	return c.bytes()
}

// Libraries made by hand, with contents that only hostile libraries have.
func TestInspectCrafted(t *testing.T) {
	z := startZygote(t)
	long := strings.Repeat("x", inspectedNameMax+1)
	many, exactly := crafted{strings: []byte{0}}, crafted{strings: []byte{0}}
	for i := range functionsMax + 1 {
		many.symbols = append(many.symbols, uint32(len(many.strings)))
		many.strings = append(many.strings, fmt.Sprintf("f%d\x00", i)...)
	}
	exactly.symbols, exactly.strings = many.symbols[:functionsMax], many.strings
	wide := crafted{strings: []byte{0}}
	for i := range 4000 {
		wide.symbols = append(wide.symbols, uint32(len(wide.strings)))
		wide.strings = append(wide.strings, fmt.Sprintf("%s%04d\x00", strings.Repeat("w", 1000), i)...)
	}
	chain := crafted{symbols: []uint32{1}, strings: []byte("\x00f\x00"), needs: bytes.Repeat([]byte{1, 0, 0xff, 0xff, 0, 0, 0, 0, 16, 0, 0, 0, 16, 0, 0, 0}, 1<<16)}
	huge := craftedGood().bytes()
	at := int(binary.LittleEndian.Uint64(huge[40:])) + 64 // the section header of the symbols
	binary.LittleEndian.PutUint64(huge[at+32:], 1<<40)
	compressed := craftedGood().bytes()
	compressed[at+9] |= 8 // SHF_COMPRESSED
	for name, c := range map[string]struct {
		lib  []byte
		text string // of the error; "": the functions are want
		want string
	}{
		"good":                                  {craftedGood().bytes(), "", "[echo price]"},
		"as many as there can be":               {exactly.bytes(), "", ""},
		"names that are not UTF-8 are left out": {crafted{symbols: []uint32{1, 6}, strings: []byte("\x00ec\xffo\x00price\x00")}.bytes(), "", "[price]"},
		"names too long are left out":           {crafted{symbols: []uint32{1, uint32(2 + len(long))}, strings: []byte("\x00" + long + "\x00ok\x00")}.bytes(), "", "[ok]"},
		"a name without an end":                 {crafted{symbols: []uint32{1}, strings: []byte("\x00echo")}.bytes(), "exports no functions", ""},
		"a name elsewhere":                      {crafted{symbols: []uint32{1 << 30}, strings: []byte("\x00echo\x00")}.bytes(), "exports no functions", ""},
		"strings that are none":                 {crafted{symbols: []uint32{1}, strings: []byte("\x00echo\x00"), link: 1}.bytes(), "section 1 is not a string table", ""},
		"strings in a section beyond":           {crafted{symbols: []uint32{1}, strings: []byte("\x00echo\x00"), link: 99}.bytes(), "section 99 is not a string table", ""},
		"too many functions":                    {many.bytes(), "more than 65536 functions", ""},
		"names too long together":               {wide.bytes(), "more than 2097152 bytes", ""},
		"needs that end early":                  {crafted{symbols: []uint32{1}, strings: []byte("\x00f\x00"), needs: need(1, 100, 1)}.bytes(), "needed versions continue at byte 100 of 32", ""},
		"versions that end early":               {crafted{symbols: []uint32{1}, strings: []byte("\x00f\x00"), needs: need(1, 0, 1, 1)[:40]}.bytes(), "needed versions continue at byte 32 of 40", ""},
		"names that share one long string":      {craftedShared(), "exports no functions", ""},
		"needed versions that overlap":          {chain.bytes(), "more than 65536 needed versions", ""},
		"a table larger than any memory":        {huge, "a table of 1099511627776 bytes", ""},
		"a compressed table":                    {compressed, "a table is compressed", ""},
	} {
		t.Run(name, func(t *testing.T) {
			names, err := inspectBytes(t, z, c.lib)
			if c.text != "" {
				wantRefused(t, names, err, c.text)
			} else if err != nil || c.want != "" && fmt.Sprint(names) != c.want || c.want == "" && len(names) != functionsMax {
				t.Errorf("functions %.80v, error %v; want %s", names, err, c.want)
			}
		})
	}
}

// A table of millions of symbols with long and different names, none of them exported, takes its reader too long. The
// limit on processor time ends the reader, the upload is refused for that reason, and the next library is read
// normally.
func TestInspectIsBounded(t *testing.T) {
	z := startZygote(t)
	const symbols = 2_700_000 // as many as a table may have
	c := crafted{strings: append(bytes.Repeat([]byte("\xff"), 1<<20), 0), symbols: make([]uint32, symbols)}
	for i := range c.symbols {
		c.symbols[i] = uint32(1<<20 - 1000 + i%50)
	}
	lib := c.bytes()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	names, err := inspectBytes(t, z, lib)
	runtime.ReadMemStats(&after)
	wantRefused(t, names, err, "")
	if took := after.TotalAlloc - before.TotalAlloc; took > 8<<20 {
		t.Errorf("%d bytes of memory here", took)
	}
	t.Logf("%v", err)
	if names, err := inspectBytes(t, z, craftedGood().bytes()); err != nil || len(names) != 2 {
		t.Errorf("the next one: functions %v, error %v", names, err)
	}
}

// Simultaneous inspections wait for each other. A caller that gives up does not wait.
func TestInspectTakesTurns(t *testing.T) {
	z := startZygote(t)
	var wg sync.WaitGroup
	for range 4 * inspectorsMost {
		wg.Go(func() {
			if names, err := inspectBytes(t, z, craftedGood().bytes()); err != nil || len(names) != 2 {
				t.Errorf("functions %v, error %v", names, err)
			}
		})
	}
	wg.Wait()
	for range inspectorsMost {
		z.inspectors.uploads <- struct{}{}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := z.Inspect(ctx, sealed(t, craftedGood().bytes())); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that has given up: %v", err)
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if len(z.workers) > 0 {
		t.Errorf("%d processes are left", len(z.workers))
	}
}

// The dynamic linker does not know the names of static functions; the symbol table does.
func TestSymbols(t *testing.T) {
	z := startZygote(t)
	const source = `
static __attribute__((noinline)) int inner(int x) { __asm__ volatile("" : "+r"(x)); return x; }
int outer(int x) { return inner(x) + 1; }`
	b := build(t, "symbols.so", source, "-shared", "-fPIC")
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	symbols, err := f.Symbols()
	if err != nil {
		t.Fatal(err)
	}
	var offsets []uint64
	var want []string
	for _, s := range symbols {
		if s.Name == "inner" || s.Name == "outer" {
			offsets, want = append(offsets, s.Value+1), append(want, s.Name+"+0x1")
			offsets, want = append(offsets, s.Value+s.Size-1), append(want, fmt.Sprintf("%s+%#x", s.Name, s.Size-1))
		}
	}
	if len(offsets) != 4 {
		t.Fatalf("offsets %v", offsets)
	}
	offsets, want = append(offsets, 0, 1<<40, ^uint64(0)), append(want, "", "", "")
	names, err := z.Symbols(t.Context(), sealed(t, b), offsets)
	if err != nil || fmt.Sprintf("%q", names) != fmt.Sprintf("%q", want) {
		t.Errorf("names %q, error %v; want %q", names, err, want)
	}
	stripped := bytes.Clone(build(t, "stripped.so", source, "-shared", "-fPIC", "-s"))
	garbage := bytes.Clone(b)
	for i := 64; i < len(garbage); i++ {
		garbage[i] = 0xff
	}
	for name, lib := range map[string][]byte{"stripped": stripped, "garbage": garbage, "no ELF file": []byte("text")} {
		many := make([]uint64, 3*offsetsMax) // more than one message takes
		names, err := z.Symbols(t.Context(), sealed(t, lib), many)
		if err != nil || len(names) != len(many) || strings.Join(names, "") != "" {
			t.Errorf("%s: %q, error %v", name, names, err)
		}
	}
}

// Everything from an inspector is checked, since it has read a hostile library.
func FuzzInspectedNames(f *testing.F) {
	f.Add(2, []byte("echo\x00price\x00"))
	f.Add(1, []byte("\x00"))
	f.Add(2, []byte("price\x00echo\x00"))
	f.Add(1, []byte("ec\xffo\x00"))
	f.Add(-1, []byte{})
	f.Fuzz(func(t *testing.T, count int, b []byte) {
		names, err := inspectedNames(count, b)
		if err != nil {
			return
		}
		if len(names) != count || strings.Join(names, "\x00")+"\x00" != string(b) {
			t.Errorf("%q of %q", names, b)
		}
		for i, n := range names {
			if n == "" || len(n) > inspectedNameMax || !utf8.ValidString(n) || strings.Contains(n, "\x00") || i > 0 && n <= names[i-1] {
				t.Errorf("function %d: %q", i, n)
			}
		}
	})
}
