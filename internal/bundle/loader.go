package bundle

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
)

// loaderLibrary returns an empty shared library that needs the libraries `names`, in this order, and finds them in the directory "lib" beside
// it. A worker opens it before the library of functions. So the dynamic linker loads the closure, in its own order and with
// cycles. It then finds the dependencies of the library of functions by name, whatever that library's run path is.
func loaderLibrary(machine elf.Machine, names []string) []byte {
	const page = 4096
	strings := []byte{0}
	text := func(s string) uint64 {
		at := len(strings)
		strings = append(append(strings, s...), 0)
		return uint64(at)
	}
	var dynamic []elf.Dyn64
	add := func(tag elf.DynTag, value uint64) { dynamic = append(dynamic, elf.Dyn64{Tag: int64(tag), Val: value}) }
	for _, n := range names {
		add(elf.DT_NEEDED, text(n))
	}
	add(elf.DT_SONAME, text(loaderName))
	add(elf.DT_RUNPATH, text("$ORIGIN/lib"))
	const headers = 64 + 3*56
	const (
		symbols = headers      // one, undefined
		hash    = symbols + 24 // no buckets but one, which is empty
		dyn     = hash + 24    // 5 words, and 4 bytes to align what follows
	)
	table := uint64(dyn + 16*(len(dynamic)+6))
	add(elf.DT_HASH, hash)
	add(elf.DT_SYMTAB, symbols)
	add(elf.DT_SYMENT, 24)
	add(elf.DT_STRTAB, table)
	add(elf.DT_STRSZ, uint64(len(strings)))
	add(elf.DT_NULL, 0)
	whole := table + uint64(len(strings))

	var b bytes.Buffer
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) } // to memory, which does not fail
	head := elf.Header64{Type: uint16(elf.ET_DYN), Machine: uint16(machine), Version: 1, Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 3, Shentsize: 64}
	copy(head.Ident[:], elf.ELFMAG)
	head.Ident[elf.EI_CLASS], head.Ident[elf.EI_DATA], head.Ident[elf.EI_VERSION] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1
	head.Flags = map[elf.Machine]uint32{elf.EM_PPC64: 2, elf.EM_RISCV: 5}[machine] // the ABI of 64-bit Linux
	put(head)
	const rw = uint32(elf.PF_R | elf.PF_W) // older linkers write to the dynamic section
	put(elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: rw, Filesz: whole, Memsz: whole, Align: 16 * page})
	put(elf.Prog64{Type: uint32(elf.PT_DYNAMIC), Flags: rw, Off: dyn, Vaddr: dyn, Paddr: dyn, Filesz: table - dyn, Memsz: table - dyn, Align: 8})
	put(elf.Prog64{Type: uint32(elf.PT_GNU_STACK), Flags: rw, Align: 16})
	put(elf.Sym64{})
	put([6]uint32{1, 1})
	put(dynamic)
	b.Write(strings)
	return b.Bytes()
}
