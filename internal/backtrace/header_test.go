package backtrace

import (
	"encoding/binary"
	"testing"
)

// A list of directories or files ends inside the header, and has a number of entries that a library can have.
func TestTableOfHeader(t *testing.T) {
	strings := []byte{1, 1, 0x08} // one column, a string
	for name, c := range map[string]struct {
		b    []byte
		good bool
		left int
	}{
		"two strings":   {append(strings[:3:3], 2, 'a', 0, 'b', 'c', 0, 9), true, 1},
		"none":          {[]byte{0, 0}, true, 0},
		"very many":     {binary.AppendUvarint(strings[:3:3], 1<<44), false, 0},
		"no columns":    {binary.AppendUvarint([]byte{0}, 1<<44), false, 0},
		"cut off":       {append(strings[:3:3], 2, 'a', 0), false, 0},
		"unknown form":  {[]byte{1, 1, 0x77, 1, 0}, false, 0},
		"empty":         {nil, false, 0},
		"block too big": {[]byte{1, 1, 0x09, 1, 200, 1, 0}, false, 0},
	} {
		cur := cursor{b: c.b}
		if good := cur.table(); good != c.good || good && len(cur.b) != c.left {
			t.Errorf("%s: %v with %d bytes left", name, good, len(cur.b))
		}
	}
}
