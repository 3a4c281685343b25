package executor

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"unicode/utf8"
)

// The part of an ELF file that the executor looks at. Not by debug/elf, which says of itself that it is not hardened: it
// copies every name that a file points at and follows its chains as long as they go, so a file of two megabytes could
// have it take all memory and hours. Here every table is bounded before it is read and no name is copied
// that is not wanted.
const (
	maxTable    = 64 << 20 // bytes of one table of symbols or strings
	maxSections = 0xff00   // SHN_LORESERVE: what a file without extended numbering can have
	maxSteps    = 1 << 16  // entries of the table of needed versions
)

type elfSection struct {
	kind elf.SectionType
	link uint32
	off  uint64
	size uint64
}

type elfFile struct {
	r        io.ReaderAt
	kind     elf.Type
	machine  elf.Machine
	sections []elfSection
}

func malformed(format string, args ...any) error {
	return fmt.Errorf("malformed ELF file: "+format, args...)
}

// readAll reads n bytes at off. It takes no more memory than the file has bytes.
func readAll(r io.ReaderAt, off, n uint64) ([]byte, error) {
	if off > 1<<62 || n > 1<<62 {
		return nil, malformed("%d bytes at %d", n, off)
	}
	b, err := io.ReadAll(io.NewSectionReader(r, int64(off), int64(n)))
	if err != nil {
		return nil, err
	}
	if uint64(len(b)) != n {
		return nil, malformed("it ends before %d bytes at %d", n, off)
	}
	return b, nil
}

// openELF reads the headers of a 64-bit little-endian file.
func openELF(r io.ReaderAt) (*elfFile, error) {
	head := make([]byte, 64)
	n, err := r.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return nil, err
	}
	head = head[:n]
	if !bytes.HasPrefix(head, []byte(elf.ELFMAG)) {
		return nil, fmt.Errorf("not an ELF file: it begins with the bytes % x", head[:min(n, 4)])
	}
	if n > elf.EI_DATA && (elf.Class(head[elf.EI_CLASS]) != elf.ELFCLASS64 || elf.Data(head[elf.EI_DATA]) != elf.ELFDATA2LSB) {
		return nil, fmt.Errorf("ELF class %v, %v; this node wants 64 bits, little endian", elf.Class(head[elf.EI_CLASS]), elf.Data(head[elf.EI_DATA]))
	}
	if n < 64 {
		return nil, malformed("it ends in its header")
	}
	le := binary.LittleEndian
	f := &elfFile{r: r, kind: elf.Type(le.Uint16(head[16:])), machine: elf.Machine(le.Uint16(head[18:]))}
	off, size, count := le.Uint64(head[40:]), le.Uint16(head[58:]), le.Uint16(head[60:])
	if count == 0 || count >= maxSections || size != 64 {
		return nil, malformed("%d sections of %d bytes", count, size)
	}
	table, err := readAll(r, off, uint64(count)*64)
	if err != nil {
		return nil, err
	}
	for ; len(table) > 0; table = table[64:] {
		f.sections = append(f.sections, elfSection{kind: elf.SectionType(le.Uint32(table[4:])),
			link: le.Uint32(table[40:]), off: le.Uint64(table[24:]), size: le.Uint64(table[32:])})
	}
	return f, nil
}

// table returns the first section of a kind and its bytes, nil if there is none.
func (f *elfFile) table(kind elf.SectionType) (*elfSection, []byte, error) {
	for i := range f.sections {
		if f.sections[i].kind != kind {
			continue
		}
		b, err := f.bytes(&f.sections[i])
		return &f.sections[i], b, err
	}
	return nil, nil, nil
}

func (f *elfFile) bytes(s *elfSection) ([]byte, error) {
	if s.size > maxTable {
		return nil, malformed("a table of %d bytes, at most %d are read", s.size, maxTable)
	}
	return readAll(f.r, s.off, s.size)
}

// strings returns the table of strings that belongs to a section.
func (f *elfFile) strings(s *elfSection) ([]byte, error) {
	if uint64(s.link) >= uint64(len(f.sections)) || f.sections[s.link].kind != elf.SHT_STRTAB {
		return nil, malformed("section %d is no table of strings", s.link)
	}
	return f.bytes(&f.sections[s.link])
}

// nameAt returns the string at off as part of the table, nil if it has no end or is longer than limit.
func nameAt(table []byte, off uint32, limit int) []byte {
	if uint64(off) >= uint64(len(table)) {
		return nil
	}
	t := table[off:]
	n := bytes.IndexByte(t[:min(len(t), limit+1)], 0)
	if n < 0 {
		return nil
	}
	return t[:n]
}

// symbols calls each for every function that the file exports with default visibility, by a name of 1 to maxName bytes of
// UTF-8. The name is valid during the call.
func (f *elfFile) symbols(each func(name []byte) error) error {
	s, table, err := f.table(elf.SHT_DYNSYM)
	if err != nil {
		return err
	}
	if s == nil {
		return fmt.Errorf("no dynamic symbols")
	}
	names, err := f.strings(s)
	if err != nil {
		return err
	}
	for ; len(table) >= elf.Sym64Size; table = table[elf.Sym64Size:] {
		info, other, section := table[4], table[5], elf.SectionIndex(binary.LittleEndian.Uint16(table[6:]))
		if elf.ST_BIND(info) != elf.STB_GLOBAL || elf.ST_TYPE(info) != elf.STT_FUNC || elf.ST_VISIBILITY(other) != elf.STV_DEFAULT ||
			section == elf.SHN_UNDEF {
			continue
		}
		name := nameAt(names, binary.LittleEndian.Uint32(table), maxName)
		if len(name) == 0 || !utf8.Valid(name) {
			continue
		}
		if err := each(name); err != nil {
			return err
		}
	}
	if len(table) != 0 {
		return malformed("its table of symbols has %d bytes too many", len(table))
	}
	return nil
}

// dynamic returns the value of a tag of the dynamic section, 0 if it has none.
func (f *elfFile) dynamic(tag elf.DynTag) (uint64, error) {
	s, table, err := f.table(elf.SHT_DYNAMIC)
	if err != nil || s == nil {
		return 0, err
	}
	for ; len(table) >= 16; table = table[16:] {
		if elf.DynTag(binary.LittleEndian.Uint64(table)) == tag {
			return binary.LittleEndian.Uint64(table[8:]), nil
		}
	}
	return 0, nil
}

// versionsNeeded calls each for every version of a library that the file needs.
func (f *elfFile) versionsNeeded(each func(library, version string) error) error {
	s, table, err := f.table(elf.SHT_GNU_VERNEED)
	if err != nil || s == nil {
		return err
	}
	names, err := f.strings(s)
	if err != nil {
		return err
	}
	le := binary.LittleEndian
	at := func(off uint64) ([]byte, error) {
		if off > uint64(len(table)) || uint64(len(table))-off < 16 {
			return nil, malformed("its needed versions go on at byte %d of %d", off, len(table))
		}
		return table[off : off+16], nil
	}
	steps := 0
	for off := uint64(0); ; {
		need, err := at(off)
		if err != nil {
			return err
		}
		library := string(nameAt(names, le.Uint32(need[4:]), maxName))
		aux := off + uint64(le.Uint32(need[8:]))
		for range le.Uint16(need[2:]) {
			if steps++; steps > maxSteps {
				return malformed("more than %d needed versions", maxSteps)
			}
			version, err := at(aux)
			if err != nil {
				return err
			}
			if err := each(library, string(nameAt(names, le.Uint32(version[8:]), maxName))); err != nil {
				return err
			}
			next := uint64(le.Uint32(version[12:]))
			if next == 0 {
				break
			}
			aux += next
		}
		next := uint64(le.Uint32(need[12:]))
		if next == 0 {
			return nil
		}
		if steps++; steps > maxSteps {
			return malformed("more than %d needed versions", maxSteps)
		}
		off += next
	}
}
