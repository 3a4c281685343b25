//go:build !race

package manager

import (
	"fmt"
	"image"
	"image/color"
	"log/slog"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/history"
)

// busy makes a manager with a week of a made-up cluster of 40 nodes with 32 cores.
func busy(t *testing.T) (*Manager, *clock) {
	t.Helper()
	c := &clock{time.Unix(1e9, 0)}
	m, err := New(Config{Heartbeat: time.Second, Slots: 64, StateDir: t.TempDir(), Log: slog.New(slog.DiscardHandler), Now: c.Now,
		Tariff: accounting.Tariff{Currency: "EUR"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	end := time.Unix(1_700_000_000, 0).Truncate(time.Hour).Add(10 * time.Minute)
	const nodes, cores = 40, 32
	for i := range nodes {
		n := &control.InfoReply{Incarnation: append(make([]byte, 15), byte(i+1)), Node: fmt.Sprintf("node%02d", i+1), NodeId: fmt.Sprint(i), Cores: cores - 4, NodeCores: cores,
			FreeCores: uint32(i * 7 % (cores - 3)), Providers: []string{"verbs", "tcp"}, MemoryBytes: 64 << 30, FreeMemoryBytes: 40 << 30, Leases: uint32(3 - i%3), Draining: i == 5 || i == 6, Cordoned: i == 6}
		if i >= 34 { // a batch job has it
			n.FreeCores = n.Cores
		}
		c.now = end
		id := register(t, m, fmt.Sprintf("192.0.2.%d:7465", i+1), n)
		if i >= 34 {
			if _, err := m.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: id}); err != nil {
				t.Fatal(err)
			}
		}
		m.history.Watch(end.Add(-6*24*time.Hour), 0, []history.Executor{{Node: n.GetNode(), NodeCores: cores, Cores: cores - 4}})
	}
	fill := func(from, to time.Time, step time.Duration) {
		for now := from; now.Before(to); now = now.Add(step) {
			hour := float64(now.Unix()%86400) / 3600
			s := step.Seconds()
			day := 0.5 - 0.5*math.Cos(hour/24*2*math.Pi)
			wave := math.Sin(float64(now.Unix())/613) + 0.5*math.Sin(float64(now.Unix())/97)
			var all []history.Executor
			gone := int(float64(nodes) * (0.15 + 0.45*day))
			for i := range nodes - gone {
				used := (cores - 4) * (0.55 + 0.2*math.Sin(float64(i)+float64(now.Unix())/900))
				all = append(all, history.Executor{Node: fmt.Sprintf("node%02d", i+1), NodeCores: cores, Cores: cores - 4, Free: cores - 4 - uint32(used), Open: true, Heard: true})
			}
			m.history.Watch(now, step, all)
			calls := s * (42000 + 9000*wave)
			for k, tenant := range []string{"climate", "genomics", "qcd-lattice", "cfd", "materials"} {
				share := []float64{0.42, 0.27, 0.16, 0.1, 0.05}[k]
				m.history.Use(now, "node01", tenant, accounting.Use{accounting.CoreMicros: uint64(share * s * 500e6), accounting.Calls: uint64(share * calls),
					accounting.Failures: uint64(share * s * max(0, wave-1.2) * 3), accounting.ExecMicros: uint64(share * calls * 85)})
			}
			var st board.Stats
			for p, n := range []float64{0.02, 0.08, 0.3, 0.9} {
				for k := range int(n*s*(1+0.5*wave)/2 + float64(now.Unix()/10%100)/100) {
					st.Starts[p].Add(time.Duration([]float64{9e6, 1.6e6, 5e5, 8e4}[p] * (0.7 + 0.1*float64(k%13))))
				}
			}
			if int(now.Unix())/60%7 == 0 {
				st.Ended[board.EndRevoked] = 1
			}
			if int(now.Unix())/60%11 == 0 {
				st.Ended[board.EndDrained] = 2
			}
			m.history.Count(now, "node01", &st)
		}
	}
	fill(end.Add(-6*24*time.Hour), end.Add(-time.Hour), 5*time.Minute)
	fill(end.Add(-time.Hour), end, 10*time.Second)
	c.now = end
	for i, tenant := range []string{"climate", "climate", "genomics", "qcd-lattice", "cfd"} {
		u := make([]uint64, accounting.NumCounters)
		u[accounting.CoreMicros], u[accounting.Calls], u[accounting.MemoryMiBMillis], u[accounting.BytesIn] = uint64(i+1)*9e9, uint64(i+1)*3e6, uint64(i+1)*4e9, 1e10
		if _, err := m.Settle(t.Context(), &control.SettleRequest{Entries: []*control.AccountEntry{{Incarnation: append(make([]byte, 15), byte(i+1)), Lease: uint64(1<<60 + i*7919), Tenant: tenant,
			Node: fmt.Sprintf("node%02d", i+1), BeganNs: end.Add(-time.Duration(i+1) * 17 * time.Minute).UnixNano(), AsOfNs: end.UnixNano(), Use: u}}}); err != nil {
			t.Fatal(err)
		}
	}
	return m, c
}

type rect struct{ X, Y, W, H float64 }

func (r rect) at(x, y float64) image.Point {
	return image.Pt(int(r.X+x*r.W), int(r.Y+y*r.H))
}

// near reports whether two colours differ by at most 6 of 255 in each part.
func near(a, b color.Color) bool {
	r, g, u, _ := a.RGBA()
	x, y, z, _ := b.RGBA()
	far := func(p, q uint32) bool { return max(p, q)-min(p, q) > 6*257 }
	return !far(r, x) && !far(g, y) && !far(u, z)
}

// The page in a real browser: layouts, colours of charts and of the map at places, dark and light, wide and narrow, every page, and what is shown when the resource
// manager is gone. No expectation depends on fonts.
func TestPageInBrowser(t *testing.T) {
	b := startBrowser(t)
	m, c := busy(t)
	tokenFile := filepath.Join(t.TempDir(), "token")
	s, err := m.openHTTP("127.0.0.1:0", tokenFile, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	defer func() {
		if !closed {
			closeHTTP(s)
		}
	}()
	text, err := os.ReadFile(tokenFile)
	if err != nil {
		t.Fatal(err)
	}
	base := "http://" + s.Address + "/"
	box := func(selector string) (r rect) {
		t.Helper()
		b.waitFor(fmt.Sprintf("document.querySelector(%q) !== null", selector))
		b.eval(fmt.Sprintf(`(() => { const r = document.querySelector(%q).getBoundingClientRect(); return { x: r.x + scrollX, y: r.y + scrollY, w: r.width, h: r.height } })()`, selector), &r)
		if r.W <= 0 || r.H <= 0 {
			t.Fatalf("%s is not shown: %+v", selector, r)
		}
		return r
	}
	css := func(name string) color.Color {
		t.Helper()
		var text string
		b.eval(fmt.Sprintf("getComputedStyle(document.documentElement).getPropertyValue('--%s').trim()", name), &text)
		var c color.RGBA
		if _, err := fmt.Sscanf(text, "#%02x%02x%02x", &c.R, &c.G, &c.B); err != nil {
			t.Fatalf("colour %s is %q", name, text)
		}
		c.A = 255
		return c
	}
	want := func(img image.Image, what string, at image.Point, name string) {
		t.Helper()
		if got, c := img.At(at.X, at.Y), css(name); !near(got, c) {
			t.Errorf("%s at %v is %v, want %v", what, at, got, c)
		}
	}
	fits := func(what string) {
		t.Helper()
		var wide []string
		b.eval(`(() => { const w = document.documentElement.clientWidth; return document.documentElement.scrollWidth <= w ? [] :
			[...document.querySelectorAll("main *, header *")].filter(e => !e.closest(".scroll") && e.getBoundingClientRect().right > w + 1).map(e => e.tagName + "." + e.className).concat("page") })()`, &wide)
		if len(wide) > 0 {
			t.Errorf("%s is wider than the window: %v", what, wide)
		}
		if wrong := b.errors(); len(wrong) > 0 {
			t.Errorf("%s: %v", what, wrong)
		}
	}

	// Without the token: cores and starts, and no tenant.
	b.show(base, 1440, 900, "light")
	var said string
	b.eval("document.body.innerText", &said)
	if strings.Contains(said, "climate") || !strings.Contains(said, "http-token-file") || !strings.Contains(said, "Worker starts") {
		t.Errorf("without the token the page says\n%s", said)
	}
	fits("the page without the token")
	b.eval("location.hash = '#/node/node01'", nil)
	b.waitFor("document.getElementById('main').innerText.includes('192.0.2.1:7465')")
	b.eval("document.getElementById('main').innerText", &said)
	if strings.Contains(said, "Harvested") || strings.Contains(said, "Calls") {
		t.Errorf("without the token the page of a node says\n%s", said)
	}
	fits("a node without the token")
	b.eval(fmt.Sprintf("sessionStorage.setItem('token', %q)", strings.TrimSpace(string(text))), nil)

	for _, v := range []struct {
		name          string
		width, height int
		scheme        string
	}{{"wide-light", 1600, 1000, "light"}, {"wide-dark", 1600, 1000, "dark"}, {"narrow-light", 390, 844, "light"}, {"narrow-dark", 390, 844, "dark"}} {
		b.show(base+"?"+v.name, v.width, v.height, v.scheme)
		b.waitFor("document.body.innerText.includes('climate') && document.querySelectorAll('#map a').length === 40 && document.querySelectorAll('canvas').length === 4")
		img := b.picture(v.name)
		fits(v.name)
		want(img, v.name+": the page", image.Pt(2, 300), "page")
		chart := box(".chart canvas") // the first: cores. From the bottom: harvested, idle, batch
		plot := box(".chart .u-over")
		x := 0.31
		want(img, v.name+": harvested cores", plot.at(x, 0.97), "harvested")
		want(img, v.name+": batch cores", plot.at(x, 0.2), "batch")
		seen := map[string]bool{}
		for y := range 100 {
			at := plot.at(x, float64(y)/100)
			for _, name := range []string{"batch", "idle", "harvested"} {
				if near(img.At(at.X, at.Y), css(name)) {
					seen[name] = true
				}
			}
		}
		if len(seen) != 3 || chart.W < float64(v.width)*0.4 {
			t.Errorf("%s: the chart of cores has %v and is %v wide", v.name, seen, chart.W)
		}
		tile := box("#map a:nth-child(2)") // 21 of 32 cores are harvested, 7 are idle, 4 are not lent
		want(img, v.name+": a tile", tile.at(0.95, 0.55), "harvested")
		want(img, v.name+": a tile's idle part", tile.at(0.95, 0.22), "idle")
		want(img, v.name+": a tile's part that is not lent", tile.at(0.95, 0.05), "batch")
		want(img, v.name+": a node without an executor", box("#map a:nth-child(38)").at(0.5, 0.3), "batch")
		want(img, v.name+": a draining node", box("#map a:nth-child(6)").at(0.5, 0.02), "draining")
		want(img, v.name+": a cordoned node", box("#map a:nth-child(7)").at(0.5, 0.02), "cordoned")
		var columns int
		b.eval("new Set([...document.querySelectorAll('.figure')].map(e => Math.round(e.getBoundingClientRect().x))).size", &columns)
		if expected := map[bool]int{true: 2, false: 6}[v.width < 600]; columns != expected {
			t.Errorf("%s: %d columns of figures, want %d", v.name, columns, expected)
		}
	}

	// The button changes the theme, the spans change the history.
	b.show(base+"?again", 1440, 900, "light")
	b.eval("document.getElementById('theme').click()", nil)
	b.waitFor("document.documentElement.classList.contains('dark')")
	b.eval("localStorage.clear()", nil)
	b.show(base+"?week", 1440, 900, "light")
	b.eval("document.querySelector('[data-span=week]').click()", nil)
	b.waitFor("document.body.innerText.includes('last 7 days')")
	b.picture("week")

	for _, p := range []struct{ hash, text string }{{"#/nodes", "192.0.2.7:7465"}, {"#/node/node01", "Harvested, last hour"}, {"#/node/node40", "A batch job has"}, {"#/node/nowhere", "does not know"},
		{"#/leases", "qcd-lattice"}, {"#/lease/node01/" + fmt.Sprint(1<<60), "core-hours"}, {"#/lease/node01/7", "has ended"}, {"#/tenants", "total"}} {
		b.eval(fmt.Sprintf("location.hash = %q", p.hash), nil)
		b.waitFor(fmt.Sprintf("document.getElementById('main').innerText.includes(%q)", p.text))
		b.picture("page" + strings.ReplaceAll(p.hash[1:], "/", "-"))
		fits(p.hash)
		b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": true})
		fits(p.hash + " on a phone")
		b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": 1440, "height": 900, "deviceScaleFactor": 1, "mobile": false})
	}

	b.show(base+"?malformed#/node/%", 1440, 900, "light")
	b.waitFor("document.querySelectorAll('canvas').length === 4")
	fits("a malformed address")

	// A name that would be markup is text.
	c.now = c.now.Add(time.Second)
	register(t, m, "192.0.2.99:7465", &control.InfoReply{Incarnation: append(make([]byte, 15), 99), Node: "<img src=x onerror=alert(1)>", NodeId: "x", Cores: 2, FreeCores: 2})
	b.eval("location.hash = '#/nodes'", nil)
	b.waitFor("document.body.innerText.includes('<img src=x')")
	fits("a hostile name")

	// The resource manager is gone: the page says so and keeps what it knows.
	b.eval("location.hash = '#/'", nil)
	b.waitFor("document.querySelectorAll('canvas').length === 4")
	closeHTTP(s)
	closed = true
	b.waitFor("document.documentElement.dataset.ready === 'error'")
	img := b.picture("error")
	banner := box("#trouble")
	want(img, "the banner", banner.at(0.98, 0.5), "bad")
	b.eval("document.getElementById('trouble').innerText", &said)
	if !strings.Contains(said, "does not answer") || !strings.Contains(said, "is from") {
		t.Errorf("the banner says %q", said)
	}
	box("#map a")
	if _, err := http.Get(base); err == nil {
		t.Error("the server still answers")
	}
}
