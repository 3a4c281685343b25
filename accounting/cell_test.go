package accounting

import (
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
)

func goldenCell() []byte {
	b := make([]byte, CellSize)
	h := CellHead{Key: Key{Incarnation: [16]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, Lease: 0x1122, Part: 1},
		Tenant: "ann", Began: time.UnixMilli(1_700_000_000_000), Ended: time.UnixMilli(1_700_000_060_000), Final: true}
	h.Encode(b[CellHeadOffset:])
	r := Receipt{Key: h.Key, Final: true}
	for i := range r.Use {
		b[8*i] = byte(i + 1)
		r.Use[i] = uint64(i + 1)
	}
	r.Encode(b[ReceiptOffset:])
	return b
}

func TestCellGolden(t *testing.T) {
	doc, err := os.ReadFile("../docs/BOARD.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```hex cell\n(.*?)```").FindSubmatch(doc)
	if m == nil {
		t.Fatal("docs/BOARD.md has no golden cell")
	}
	b := goldenCell()
	shown := append(append([]byte{}, b[:128]...), b[CellHeadOffset+headCRCOffset:]...)
	if got, want := hex.EncodeToString(shown), strings.Join(strings.Fields(string(m[1])), ""); got != want {
		t.Errorf("cell:\n%s\ndocs/BOARD.md has\n%s", got, want)
	}
}

func TestCell(t *testing.T) {
	b := goldenCell()
	at := time.Unix(1_800_000_000, 0)
	e, used, err := ReadCell(b, "n1", at)
	if err != nil || !used || !e.Final || e.Tenant != "ann" || e.Node != "n1" || e.Lease != 0x1122 || e.Part != 1 ||
		e.Use != (Use{1, 2, 3, 4, 5, 6, 7, 8}) || e.AsOf.Unix() != 1_700_000_060 || e.Began.Unix() != 1_700_000_000 {
		t.Errorf("%+v %v %v", e, used, err)
	}
	r, ok := ParseReceipt(b[ReceiptOffset:])
	if !ok || !r.Covers(&e) {
		t.Errorf("%+v %v", r, ok)
	}
	for _, change := range []func(*Receipt){
		func(r *Receipt) { r.Use[3]-- }, func(r *Receipt) { r.Final = false }, func(r *Receipt) { r.Part++ }, func(r *Receipt) { r.Incarnation[0]++ },
	} {
		other := r
		change(&other)
		if other.Covers(&e) {
			t.Errorf("%+v covers %+v", other, e)
		}
	}
	h := CellHead{Key: e.Key, Tenant: strings.Repeat("t", MaxName), Began: e.Began}
	h.Encode(b[CellHeadOffset:])
	if e, used, err := ReadCell(b, "n1", at); err != nil || !used || e.Final || e.AsOf != at || e.Tenant != h.Tenant {
		t.Errorf("%+v %v %v", e, used, err)
	}
	(&CellHead{}).Encode(b[CellHeadOffset:])
	if _, used, err := ReadCell(b, "n1", at); err != nil || used {
		t.Errorf("nobody's cell: %v %v", used, err)
	}
	if _, used, err := ReadCell(make([]byte, CellSize), "", at); err != nil || used {
		t.Errorf("a fresh cell: %v %v", used, err)
	}
	if _, ok := ParseReceipt(make([]byte, ReceiptSize)); ok {
		t.Error("a receipt from nothing")
	}
}

func TestTornCells(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 5000 {
		b := goldenCell()
		b[CellHeadOffset+r.IntN(CellHeadSize)] ^= byte(1 + r.IntN(255))
		b[ReceiptOffset+r.IntN(ReceiptSize)] ^= byte(1 + r.IntN(255))
		if e, _, err := ReadCell(b, "", time.Time{}); !errors.Is(err, ErrInvalid) {
			t.Fatalf("%+v %v", e, err)
		}
		if got, ok := ParseReceipt(b[ReceiptOffset:]); ok {
			t.Fatalf("%+v", got)
		}
	}
	// Sealed nonsense.
	b := goldenCell()
	b[CellHeadOffset+48] = 0 // no tenant
	seal(b[CellHeadOffset:][:CellHeadSize])
	if _, _, err := ReadCell(b, "", time.Time{}); !errors.Is(err, ErrInvalid) {
		t.Errorf("%v", err)
	}
}
