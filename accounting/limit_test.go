package accounting

import (
	"encoding/binary"
	"strings"
	"testing"
)

func TestParseLimits(t *testing.T) {
	l, err := ParseLimits(" ann=64, b=b=8 ,*=16")
	if err != nil || !l.Any() {
		t.Fatal(err)
	}
	for name, want := range map[string]uint64{"ann": 64, "b=b": 8, "zoe": 16} {
		if n, limited := l.Of(name); n != want || !limited {
			t.Errorf("%s: %d %v", name, n, limited)
		}
	}
	l, err = ParseLimits("ann=0")
	if n, limited := l.Of("ann"); err != nil || n != 0 || !limited || !l.Any() {
		t.Errorf("%d %v %v", n, limited, err)
	}
	if _, limited := l.Of("zoe"); limited {
		t.Error("a limit for somebody who has none")
	}
	none, err := ParseLimits("")
	if _, limited := none.Of("ann"); err != nil || none.Any() || limited || (&Limits{}).Any() {
		t.Error("limits out of nothing")
	}
	for text, want := range map[string]string{"ann": `"ann"`, "=5": `"=5"`, "ann=-1": `"-1"`, "ann=1,ann=2": "two limits", "*=1,*=2": "two limits",
		"ann=99999999999": "99999999999", strings.Repeat("x", 300) + "=1": "xxx"} {
		if _, err := ParseLimits(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v", text, err)
		}
	}
}

func TestLimitRecord(t *testing.T) {
	table := make([]byte, 3*LimitSize)
	binary.LittleEndian.PutUint64(table[2*LimitSize:], 9)
	LimitWord(table, 2, LimitSHM).Add(4)
	LimitWord(table, 2, LimitVerbs).Add(3)
	LimitWord(table, 2, LimitMessage).Add(^uint64(0)) // a correction can make a count negative for a moment
	l := ParseLimit(table[2*LimitSize:])
	if l.Cores != 9 || l.Reserved() != 7 || LimitWordOffset(2, LimitVerbs) != 2*LimitSize+16 {
		t.Errorf("%+v", l)
	}
	if r, n, ok := ParseHeld(Held(4095, 1<<31)); !ok || r != 4095 || n != 1<<31 {
		t.Error(r, n, ok)
	}
	if _, _, ok := ParseHeld(0); ok {
		t.Error("nothing is something")
	}
}
