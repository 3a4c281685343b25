package manager

import (
	"bytes"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/observe"
	"github.com/rfaas-go/rfaas/tests/smalldisk"
)

// fillDisk writes a file until the small disk at dir is full, and returns its path.
func fillDisk(t *testing.T, dir string) (path string) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for block := make([]byte, 512); err == nil; {
		_, err = f.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	return f.Name()
}

// The manager's disk is full. The manager reports that in every reply, and continues. Meanwhile, charges stay in memory, including those of
// executors that deregister. The manager acknowledges none of them. When there is space again, all are in the
// ledger.
func TestManagerDiskFull(t *testing.T) { smalldisk.Run(t, "256k", managerDiskFull) }

func managerDiskFull(t *testing.T, dir string) {
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	w := &world{t: t, clock: &clock{time.Unix(1e9, 0)}, provider: dataplane.SHM, dir: filepath.Join(dir, "state")}
	w.start(8)
	t.Cleanup(func() { w.stop() })
	x := w.executor(1)
	used := accounting.Use{}
	// charge has lease n use one unit more than it did, in cell 0, and be over.
	charge := func(n uint64) accounting.Entry {
		t.Helper()
		head := accounting.CellHead{Key: accounting.Key{Incarnation: incarnationOf(x.info), Lease: n}, Tenant: "ann", Began: w.clock.now}
		use := accounting.Use{n, 1}
		ok(x.WriteHead(0, head))
		ok(x.Charge(0, accounting.Use{}, use))
		head.Final, head.Ended = true, w.clock.now
		ok(x.WriteHead(0, head))
		used[0], used[1] = used[0]+n, used[1]+1
		return accounting.Entry{Key: head.Key, Tenant: "ann", Final: true, Use: use}
	}
	safe := func(e accounting.Entry) bool {
		t.Helper()
		r, given, err := x.Receipt(0)
		ok(err)
		return given && r.Covers(&e)
	}
	ballast := fillDisk(t, dir)
	n := uint64(1)
	last := charge(n)
	for w.harvest(); w.accounts.failing() == nil; w.harvest() {
		if !safe(last) {
			t.Fatalf("lease %d is in the ledger without a receipt", n)
		}
		if n++; n > 5000 {
			t.Fatal("the ledger never fills the disk")
		}
		ok(x.Clear(0))
		last = charge(n)
	}
	t.Logf("full after %d leases: %v", n-1, w.accounts.failing())
	if safe(last) {
		t.Error("a receipt for what is not in the ledger")
	}
	// It says so, and is there all the same.
	if !errors.Is(w.accounts.failing(), syscall.ENOSPC) {
		t.Errorf("%v", w.accounts.failing())
	}
	text := syscall.ENOSPC.Error()
	bill, err := w.client.Bill(t.Context(), &control.BillRequest{})
	if err != nil || !strings.Contains(bill.GetTrouble(), text) {
		t.Errorf("bill: %v %v", bill, err)
	}
	state, err := w.state()
	if err != nil || !strings.Contains(state.Trouble, text) || len(state.Executors) != 1 {
		t.Errorf("state: %+v %v", state, err)
	}
	web, err := observe.Open("", nil, slog.New(slog.DiscardHandler))
	ok(err)
	w.Observe(web, func(*http.Request) bool { return true })
	metric := func(line string) {
		t.Helper()
		r := httptest.NewRecorder()
		web.Mux.ServeHTTP(r, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
		if !strings.Contains(r.Body.String(), "\n"+line+"\n") {
			t.Errorf("no %q in the metrics", line)
		}
	}
	metric("rfaas_manager_ledger_ok 0")
	settle := &control.SettleRequest{Entries: []*control.AccountEntry{{Incarnation: info(9, 1).Incarnation, Lease: 1, Tenant: "bob", Node: "n", AsOfNs: w.clock.now.UnixNano(),
		Use: []uint64{5, 0, 0, 0, 0, 0, 0, 0}, Final: true}}}
	if _, err := w.client.Settle(t.Context(), settle); control.ClassOf(err) != control.ClassBusy || !strings.Contains(err.Error(), text) {
		t.Errorf("charges by message: %v", err)
	}
	metric("rfaas_manager_refused_settlements_total 0") // they wait
	y := w.executor(2)
	y.write(3)
	w.table.sweep()
	w.harvest()
	// The executor deregisters with charges that are not yet on any disk.
	_, err = w.client.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: x.id})
	ok(err)
	w.harvest()
	if w.accounts.failing() == nil {
		t.Error("it is not full any more")
	}
	ok(os.Remove(ballast))
	if _, err := w.client.Settle(t.Context(), settle); err != nil {
		t.Error(err)
	}
	w.harvest()
	if err := w.accounts.failing(); err != nil {
		t.Errorf("there is room: %v", err)
	}
	metric("rfaas_manager_ledger_ok 1")
	equal(t, w.accounts.ledger, map[string]accounting.Use{"ann": used, "bob": {5}})
}

// The same when all charges come by message: the bill, the metrics, /healthz and the log report that they are not on
// disk. The error is cleared when a message is accepted, or when none was sent for a minute.
func TestManagerDiskFullByMessage(t *testing.T) { smalldisk.Run(t, "256k", managerDiskFullByMessage) }

func managerDiskFullByMessage(t *testing.T, dir string) {
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var log bytes.Buffer
	c := &clock{time.Unix(1e9, 0)}
	m, err := New(Config{Heartbeat: time.Second, Slots: 8, Providers: []string{dataplane.SHM}, Asked: true, StateDir: filepath.Join(dir, "state"),
		Log: slog.New(slog.NewTextHandler(&log, nil)), Now: c.Now})
	ok(err)
	t.Cleanup(m.Close)
	web, err := observe.Open("", nil, slog.New(slog.DiscardHandler))
	ok(err)
	m.Observe(web, func(*http.Request) bool { return true })
	get := func(path string) string {
		r := httptest.NewRecorder()
		web.Mux.ServeHTTP(r, httptest.NewRequestWithContext(t.Context(), "GET", path, nil))
		return strconv.Itoa(r.Code) + "\n" + r.Body.String()
	}
	lease := uint64(0)
	settle := func() error {
		lease++
		_, err := m.Settle(t.Context(), &control.SettleRequest{Entries: []*control.AccountEntry{{Incarnation: info(9, 1).Incarnation, Lease: lease, Tenant: "bob",
			Node: "n", AsOfNs: c.now.UnixNano(), Use: []uint64{5, 0, 0, 0, 0, 0, 0, 0}, Final: true}}})
		return err
	}
	// says checks that bill, metric and health all report the error, or that none does.
	says := func(when string, trouble bool) {
		t.Helper()
		text, metric, health := "", "rfaas_manager_ledger_ok 1", "200\n"
		if trouble {
			text, metric, health = syscall.ENOSPC.Error(), "rfaas_manager_ledger_ok 0", "503\nledger: "
		}
		bill, err := m.Bill(t.Context(), &control.BillRequest{})
		if err != nil || (bill.GetTrouble() != "") != trouble || !strings.Contains(bill.GetTrouble(), text) {
			t.Errorf("%s: bill: %v %v", when, bill, err)
		}
		if s := get("/metrics"); !strings.Contains(s, "\n"+metric+"\n") {
			t.Errorf("%s: no %q in the metrics", when, metric)
		}
		if s := get("/healthz"); !strings.HasPrefix(s, health) || !strings.Contains(s, text) {
			t.Errorf("%s: health %s", when, s)
		}
	}
	fill := func() (ballast string) {
		t.Helper()
		ballast = fillDisk(t, dir)
		var err error
		for err = settle(); err == nil && lease < 5000; err = settle() {
		}
		if control.ClassOf(err) != control.ClassBusy {
			t.Fatalf("a full disk: %v", err)
		}
		return ballast
	}
	ok(settle())
	says("there is room", false)
	ballast := fill()
	says("full", true)
	m.harvest()
	says("full, and no cell has anything", true)
	if n := strings.Count(log.String(), "does not accept charges"); n != 1 {
		t.Errorf("%d lines in the log:\n%s", n, log.String())
	}
	ok(os.Remove(ballast))
	ok(settle())
	says("there is room again", false)
	if n := strings.Count(log.String(), "accepts charges again"); n != 1 {
		t.Errorf("%d lines in the log:\n%s", n, log.String())
	}
	fill()
	c.now = c.now.Add(forgetMessage)
	m.harvest()
	says("a minute later", true)
	c.now = c.now.Add(time.Second)
	m.harvest()
	says("more than a minute later", false)
}
