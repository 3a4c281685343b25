package zygote

import (
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Whatever user code wrote into its worker's page, what is made of it is bounded text for people.
func FuzzPage(f *testing.F) {
	noted := make([]byte, pageSize)
	noted[0], noted[2], noted[8] = 1, 5, 4
	copy(noted[pageDeath:], "\x02\x00\x00\x00\x0b\x00\x00\x00\x01\x00\x00\x00\x0c\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x07\x00\x00\x00\x01\x00\x00\x00\x20\x00\x00\x00")
	copy(noted[pageDeath+deathText:], "price+0x1f\nlibrary+0x1139\ncos+0x2a (libm.so.6)\n")
	f.Add(noted, byte(11))
	noted[pageDeath+35] = 0xff // more text than there is room
	f.Add(append([]byte(nil), noted...), byte(6))
	f.Add([]byte{}, byte(0))
	f.Add([]byte("\xff\xff\xff\xff\xff\xff\xff\xff"), byte(14))
	f.Fuzz(func(t *testing.T, b []byte, signal byte) {
		mem := make([]byte, pageSize)
		copy(mem, b)
		p := &page{mem: mem}
		if _, index, _ := p.running(); index < 0 || index > 0xffff {
			t.Errorf("function %d", index)
		}
		p.counters()
		d := p.death()
		if len(d.text) > textMax {
			t.Errorf("%d bytes of text", len(d.text))
		}
		st := status{signal: unix.Signal(signal)}
		d.outOfMemory(st)
		w := &Worker{}
		for _, text := range []string{d.signalText(), w.reason(st, true, &d), w.reason(st, false, &d), backtrace(d.text)} {
			if !utf8.ValidString(text) || len(text) > 200*textMax || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' && r != '\n' || r == 0x7f }) {
				t.Errorf("%q", text)
			}
		}
	})
}
