package hostile

import (
	"bytes"
	"compress/zlib"
	"context"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"os"

	"github.com/rfaas-go/rfaas/client"
)

// bombSource crashes in a static function. Naming its frame takes the library's own symbol table.
const bombSource = `#include <stdint.h>
__attribute__((noinline)) static uint32_t crashes(volatile int *p) { return (uint32_t)(*p = 1); }
uint32_t crash(void *a, uint32_t n, void *r) { (void)a; (void)n; (void)r; return crashes((int *)8); }
`

// bombed compiles bombSource and compresses its section names, which inflate to size bytes.
func bombed(c *cluster, size int64) []byte {
	source := c.in("bomb.c")
	if err := os.WriteFile(source, []byte(bombSource), 0o600); err != nil {
		c.Fatal(err)
	}
	lib, err := os.ReadFile(c.compile("bomb.so", source))
	if err != nil {
		c.Fatal(err)
	}
	var small bytes.Buffer
	binary.Write(&small, binary.LittleEndian, elf.Chdr64{Type: uint32(elf.COMPRESS_ZLIB), Size: uint64(size), Addralign: 1})
	z, _ := zlib.NewWriterLevel(&small, zlib.BestSpeed)
	if _, err := io.CopyN(z, zeros{}, size); err != nil {
		c.Fatal(err)
	}
	z.Close()
	var head elf.Header64
	if _, err := binary.Decode(lib, binary.LittleEndian, &head); err != nil {
		c.Fatal(err)
	}
	at := int(head.Shoff) + int(head.Shstrndx)*int(head.Shentsize)
	var section elf.Section64
	if _, err := binary.Decode(lib[at:], binary.LittleEndian, &section); err != nil {
		c.Fatal(err)
	}
	section.Flags |= uint64(elf.SHF_COMPRESSED)
	section.Off, section.Size = uint64(len(lib)), uint64(small.Len())
	if _, err := binary.Encode(lib[at:], binary.LittleEndian, section); err != nil {
		c.Fatal(err)
	}
	return append(lib, small.Bytes()...)
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

func bombs(c *cluster) string {
	code := bombed(c, 512<<20)
	d := c.newExecutor() // its memory is that of no earlier attack
	eve := c.session(d, c.token("eve"), -1)
	grown := d.peak()
	l, err := eve.Lease(c.within(patience), client.LeaseOptions{Code: code, Memory: 64 << 20})
	if err == nil {
		var f *client.Function
		if f, err = l.Function("crash"); err == nil {
			_, err = f.Invoke(c.within(patience), nil, nil)
			if err == nil {
				c.Errorf("the function did not crash: the attack shows nothing")
			}
		}
		l.Release(context.Background())
	}
	if n := grown(); n > 128 {
		return fmt.Sprintf("%d MiB of the executor for a file of %d KiB", n, len(code)>>10)
	}
	return ""
}
