package accounting

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// How long each counter lasts at the rates that the package comment names; the comment has the same numbers.
func TestUnitsOutliveMachines(t *testing.T) {
	const cores, mib, calls, payload = 1024, 4 << 20, 1e7, 4e12
	for _, c := range []struct {
		counter   Counter
		perSecond float64
		years     float64
	}{
		{CoreMicros, cores * 1e6, 570},
		{MemoryMiBMillis, mib * 1e3, 139},
		{ExecMicros, cores * 1e6, 570},
		{HotMicros, cores * 1e6, 570},
		{Calls, cores * calls, 57},
		{Failures, cores * calls, 57},
		{BytesIn, payload, 53 / 365.25},
		{BytesOut, payload, 53 / 365.25},
	} {
		years := math.Pow(2, 64) / c.perSecond / 3600 / 24 / 365.25
		if years < c.years || years > c.years*1.02 {
			t.Errorf("%v lasts %.2f years, the comment says %.2f", c.counter, years, c.years)
		}
	}
	// A part ends long before the end of the range, whatever happens in an interval of an hour.
	if room := float64(math.MaxUint64 - uint64(SplitAt)); room < 3600*payload {
		t.Errorf("%g bytes of room after SplitAt", room)
	}
}

func TestMeter(t *testing.T) {
	t0 := time.Unix(1000, 0)
	m := NewMeter(2, 8, 1<<30, t0)
	ms := time.Millisecond
	want := func(what string, at time.Duration, u Use) {
		t.Helper()
		if got := m.Use(t0.Add(at)); got != u {
			t.Errorf("%s: %v, want %v", what, got, u)
		}
	}
	want("at the beginning", 0, Use{})
	want("a clock that went back", -time.Hour, Use{})
	want("after 1.5 us", 1500*time.Nanosecond, Use{CoreMicros: 12, MemoryMiBMillis: 1})
	want("after 1 s", time.Second, Use{CoreMicros: 8e6, MemoryMiBMillis: 1024 * 1000})
	m.Observe(0, Report{Exec: 3 * ms, Hot: 2 * ms, Calls: 7, BytesIn: 10, BytesOut: 20, Failures: 1}, 10*ms)
	m.Observe(1, Report{Exec: 3 * ms, Hot: 900 * ms, Calls: 1}, 10*ms) // claims more than there was
	want("two workers", 0, Use{ExecMicros: 6000, HotMicros: 9000, Calls: 8, BytesIn: 10, BytesOut: 20, Failures: 1})
	m.Observe(1, Report{Exec: time.Hour, Hot: -1, Calls: 0}, 11*ms) // and takes words back
	want("hostile reports", 0, Use{ExecMicros: 7000, HotMicros: 9000, Calls: 8, BytesIn: 10, BytesOut: 20, Failures: 1})
	m.Observe(0, Report{Exec: math.MinInt64, Hot: math.MinInt64}, -time.Hour)
	m.Observe(5, Report{Exec: ms}, ms) // no such worker
	m.Replaced(5)
	m.Replaced(1)
	m.Observe(1, Report{Exec: ms, Calls: 2}, ms)
	want("after a replacement", 0, Use{ExecMicros: 8000, HotMicros: 9000, Calls: 10, BytesIn: 10, BytesOut: 20, Failures: 1})
	m.End(t0.Add(time.Second))
	m.End(t0.Add(time.Hour))
	u := m.Use(t0.Add(time.Minute))
	if u[CoreMicros] != 8e6 {
		t.Errorf("after the end: %v", u)
	}
	if m.Split(u) {
		t.Error("split for nothing")
	}
	m.Observe(0, Report{BytesIn: SplitAt}, ms)
	if u = m.Use(t0.Add(time.Minute)); !m.Split(u) || m.Use(t0.Add(time.Minute)) != (Use{}) {
		t.Errorf("not split at %v", u)
	}
	m.Observe(0, Report{BytesIn: SplitAt + 5}, ms)
	want("next part", time.Minute, Use{BytesIn: 5})
	// A machine of 1024 cores and 4 TiB for a century.
	m = NewMeter(1, 1024, 4<<40, t0)
	want("a century", 100*365*24*time.Hour, Use{CoreMicros: 1024 * 100 * 365 * 24 * 3600 * 1e6, MemoryMiBMillis: 4 << 20 * 100 * 365 * 24 * 3600 * 1000})
}

// A meter charges cores and memory from when the lease has them, also after its state was saved.
func TestMeterGrew(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(1000, 0).Add(time.Duration(s) * time.Second) }
	m := NewMeter(2, 1, 1<<20, at(0))
	m.Grew(2, 3<<20, at(10))
	u := RestoreMeter(m.Save()).Use(at(15))
	if want := uint64(10*1+5*3) * 1e6; u[CoreMicros] != want {
		t.Errorf("%d core microseconds, want %d", u[CoreMicros], want)
	}
	if want := uint64(10*1+5*4) * 1e3; u[MemoryMiBMillis] != want {
		t.Errorf("%d MiB ms, want %d", u[MemoryMiBMillis], want)
	}
}

// Whatever a worker reports: no counter shrinks, and time stays below the kernel's.
func TestMeterProperties(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		m := NewMeter(1, 1, 0, time.Unix(0, 0))
		var last Use
		var cpu time.Duration
		for range 20 {
			cpu += time.Duration(r.Int64N(1000)) * time.Microsecond
			m.Observe(0, Report{Exec: time.Duration(r.Int64N(20e6)), Hot: time.Duration(r.Int64N(20e6)), Calls: r.Uint64N(9)}, cpu)
			u := m.Use(time.Unix(0, 0))
			if !u.Covers(last) {
				t.Fatalf("%v after %v", u, last)
			}
			if time.Duration(u[ExecMicros]+u[HotMicros])*time.Microsecond > cpu {
				t.Fatalf("%v with %v of processor time", u, cpu)
			}
			last = u
		}
	}
}

func entry(lease uint64, n uint64) Entry {
	e := Entry{Key: Key{Incarnation: [16]byte{1}, Lease: lease}, Tenant: "ann", Node: "n1",
		Began: time.Unix(7200, 0), AsOf: time.Unix(7200+int64(n), 0)}
	for i := range e.Use {
		e.Use[i] = n * uint64(i+1)
	}
	return e
}

func TestEntryGolden(t *testing.T) {
	e := entry(0x1122, 3)
	e.Part, e.Final = 2, true
	b := appendEntry(nil, &e)
	const golden = "52464131 37d34b93 01000000000000000000000000000000 2211000000000000 02000000 01000000" +
		"004071618c060000 009e41148d060000" + // 7200 s, 7203 s
		"0300000000000000 0600000000000000 0900000000000000 0c00000000000000" +
		"0f00000000000000 1200000000000000 1500000000000000 1800000000000000 03 02 616e6e 6e31"
	if got := hex.EncodeToString(b); got != strings.ReplaceAll(golden, " ", "") {
		t.Errorf("%s", got)
	}
	got, err := parseEntry(append(b, 0, 0, 0))
	if err != nil || got != e {
		t.Errorf("%v %v, want %v", got, err, e)
	}
	for i := range b {
		for _, flip := range []byte{1, 0x80} {
			bad := bytes.Clone(b)
			bad[i] ^= flip
			if _, err := parseEntry(bad); !errors.Is(err, ErrInvalid) {
				t.Errorf("byte %d: %v", i, err)
			}
		}
		if _, err := parseEntry(b[:i]); !errors.Is(err, ErrInvalid) {
			t.Errorf("%d bytes: %v", i, err)
		}
	}
	for _, c := range []struct {
		change func(*Entry)
		text   string
	}{
		{func(e *Entry) { e.Lease = 0 }, "lease 0"},
		{func(e *Entry) { e.Incarnation = [16]byte{} }, "incarnation"},
		{func(e *Entry) { e.Tenant = "" }, "0 bytes"},
		{func(e *Entry) { e.Tenant = strings.Repeat("x", 256) }, "256"},
		{func(e *Entry) { e.Node = strings.Repeat("x", 256) }, "256"},
	} {
		bad := entry(1, 1)
		c.change(&bad)
		if err := bad.Check(); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%q: %v", c.text, err)
		}
	}
	long := entry(1, 1)
	long.Tenant, long.Node = strings.Repeat("t", 255), strings.Repeat("n", 255)
	if b := appendEntry(nil, &long); len(b) != entryMaxLen || len(b) > recordSize {
		t.Errorf("the longest entry has %d bytes", len(b))
	}
}

func FuzzEntry(f *testing.F) {
	e := entry(1, 1)
	f.Add(appendEntry(nil, &e))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := parseEntry(b)
		if err != nil {
			return
		}
		again, err := parseEntry(appendEntry(nil, &e))
		if err != nil || again != e {
			t.Fatalf("%v becomes %v, %v", e, again, err)
		}
	})
}

func TestTotal(t *testing.T) {
	var sum, two Total
	u := Use{CoreMicros: math.MaxUint64, Failures: 1}
	for range 3 {
		sum.Add(u)
	}
	two.AddTotal(sum)
	two.AddTotal(sum)
	want := new(big.Int).Mul(new(big.Int).SetUint64(math.MaxUint64), big.NewInt(6))
	if two.Of(CoreMicros).Cmp(want) != 0 || two.Of(Failures).Int64() != 6 || two.Of(Calls).Sign() != 0 {
		t.Errorf("%v", two)
	}
}

func TestTariffAndBill(t *testing.T) {
	tariff, err := ParseTariff("EUR", " core-hour=0.02, gib-hour = 0.001,million-calls=.5")
	if err != nil {
		t.Fatal(err)
	}
	if got := tariff.String(); got != "core-hour=0.02,gib-hour=0.001,million-calls=0.5" {
		t.Errorf("%q", got)
	}
	var a, b Total
	a.Add(Use{CoreMicros: 3600e6 * 90, MemoryMiBMillis: 1024 * 3600e3 * 2, Calls: 333, BytesIn: 12})
	b.Add(Use{CoreMicros: 1})
	bills := Bills(&tariff, map[string]Total{"zoe": b, "ann, inc": a}, time.Unix(0, 0))
	if len(bills) != 2 || bills[0].Tenant != "ann, inc" || bills[0].Amount != "1.802167" || bills[1].Amount != "0.000000" {
		t.Errorf("%+v", bills)
	}
	var lines []string
	for _, l := range bills[0].Lines {
		lines = append(lines, strings.Join([]string{l.Item, l.Units, l.Quantity, l.Price, l.Amount}, " "))
	}
	const want = `core-hour 324000000000 90.000000 0.02 1.800000
gib-hour 7372800000 2.000000 0.001 0.002000
exec-hour 0 0.000000 0 0.000000
hot-hour 0 0.000000 0 0.000000
million-calls 333 0.000333 0.5 0.000167
gb-in 12 0.000000 0 0.000000
gb-out 0 0.000000 0 0.000000
million-failures 0 0.000000 0 0.000000`
	if got := strings.Join(lines, "\n"); got != want {
		t.Errorf("%s", got)
	}
	for _, bad := range []string{"core-hour", "nothing=1", "core-hour=-1", "core-hour=1/3", "core-hour=1e9", "core-hour=", "core-hour=1,core-hour=1", "core-hour=1.2.3"} {
		if _, err := ParseTariff("", bad); err == nil || !strings.Contains(err.Error(), "core-hour") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	var free Tariff
	if free.Price("core-hour").Sign() != 0 || free.String() != "" {
		t.Error("the zero tariff is not free")
	}
	for i := range Counter(NumCounters) {
		if name := fmt.Sprint(i); name == "" || strings.HasPrefix(name, "counter ") {
			t.Errorf("counter %d has no name", int(i))
		}
	}
}
