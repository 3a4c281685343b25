package manager

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
)

// A site is executors and clients without functions and workers. Its executors register, beat, charge and settle by remote
// memory as real ones do; its clients find them on the board, hold leases at them, and look at their mailboxes. It goes on over
// as many managers as it takes.

// siteConfig is the configuration of a site, as JSON.
type siteConfig struct {
	Manager, Provider, SecretFile string
	Executors, Clients            int
	Beat                          time.Duration // of executors
	Charges                       uint64        // that are made, and more until SIGUSR1 comes
	Marks                         []uint64      // of charges, one for each kill
}

// siteReport is what it says in the end. Before it says "charges N" for each mark: that many were made, every executor charges and
// every client has a mailbox at the manager that came after the last mark.
type siteReport struct {
	Used      map[string]accounting.Use // by tenant, whether or not it was charged
	Charges   uint64                    // additions by remote memory that were answered
	Leases    uint64
	Refused   uint64 // by executors without a core or a cell
	Epochs    uint64 // managers that every client's mailbox showed, at least
	Connected uint64 // times that every executor found a manager, at least
}

// patience bounds what must come to pass when the manager is there.
const patience = 40 * time.Second

type simLease struct {
	head         accounting.CellHead
	use, charged accounting.Use
	cell         int // -1: none
	told         bool
}

type simExecutor struct {
	s    *site
	addr string
	info *control.InfoReply

	connected atomic.Uint64 // times

	mu    sync.Mutex // held over remote operations: an executor settles one thing after the other
	id    uint64
	x     *link.Executor // nil: no way to a manager
	beat  uint64
	cells []*simLease
	owed  map[uint64]*simLease
	last  uint64 // lease
}

type site struct {
	siteConfig
	m         control.ManagerClient
	dev       *dataplane.Device
	executors map[string]*simExecutor
	order     []*simExecutor
	clients   []*simClient
	enough    <-chan os.Signal
	stop      atomic.Bool // enough was said
	charges   atomic.Uint64
	marking   sync.Mutex // of what follows
	marks     []uint64   // to come
}

func runSite(_, args string) error {
	s := &site{executors: map[string]*simExecutor{}}
	if err := json.Unmarshal([]byte(args), &s.siteConfig); err != nil {
		return err
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	s.enough = signals
	conn, err := control.Dial(s.Manager, control.DialConfig{SecretFile: s.SecretFile, AllowPlaintext: true})
	if err != nil {
		return err
	}
	defer conn.Close()
	s.m = control.NewManagerClient(conn)
	if s.dev, err = dataplane.Open(s.Provider, dataplane.Options{GIDIndex: -1, ActiveOnly: s.Provider == dataplane.TCP}); err != nil {
		return err
	}
	defer s.dev.Close()
	for i := range s.Executors {
		e := &simExecutor{s: s, addr: fmt.Sprintf("192.0.2.%d:7465", i+1), owed: map[uint64]*simLease{},
			info: &control.InfoReply{Incarnation: make([]byte, 16), Node: fmt.Sprint("n", i), NodeId: fmt.Sprint("site/", i), Cores: 4, FreeCores: 4,
				MemoryBytes: 1 << 30, FreeMemoryBytes: 1 << 30, Providers: []string{"verbs"}}}
		binary.LittleEndian.PutUint64(e.info.Incarnation, uint64(i)+1)
		s.executors[e.addr], s.order = e, append(s.order, e)
	}
	report, err := s.run()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(report)
}

func (s *site) run() (*siteReport, error) {
	over := make(chan struct{})
	var beating sync.WaitGroup
	for i, e := range s.order {
		beating.Go(func() { e.live(over, time.Duration(i)*time.Millisecond) })
	}
	defer beating.Wait()
	var once sync.Once
	end := func() { once.Do(func() { close(over) }) }
	defer end()
	s.marks = s.Marks
	for i := range s.Clients {
		s.clients = append(s.clients, &simClient{s: s, tenant: fmt.Sprintf("tenant-%d", i%5), r: rand.New(rand.NewPCG(uint64(i), 5))})
	}
	clients := s.clients
	failed := make(chan error, s.Clients)
	for _, c := range clients {
		go func() { failed <- c.work() }()
	}
	var errs error
	for range clients {
		errs = errors.Join(errs, <-failed)
	}
	report := &siteReport{Used: map[string]accounting.Use{}, Charges: s.charges.Load()}
	for _, c := range clients {
		defer c.close()
		report.Leases, report.Refused = report.Leases+c.leases, report.Refused+c.refused
		sum := report.Used[c.tenant]
		for k, n := range c.used {
			sum[k] += n
		}
		report.Used[c.tenant] = sum
	}
	if errs != nil {
		return nil, errs
	}
	// All of it is in the ledger; every client has been told of every executor, and is told that they leave.
	for _, e := range s.order {
		if err := e.settled(); err != nil {
			return nil, err
		}
	}
	for i, c := range clients {
		if err := c.told(uint64(s.Executors), board.Open); err != nil {
			return nil, fmt.Errorf("client %d: %w", i, err)
		}
	}
	end()
	beating.Wait()
	for _, e := range s.order {
		if err := e.leave(); err != nil {
			return nil, err
		}
	}
	for i, c := range clients {
		if err := c.told(uint64(2*s.Executors), board.Left); err != nil {
			return nil, fmt.Errorf("client %d: %w", i, err)
		}
	}
	report.Connected, report.Epochs = s.least()
	return report, nil
}

// least is how many managers every executor and every client has found.
func (s *site) least() (executors, clients uint64) {
	executors, clients = s.order[0].connected.Load(), s.clients[0].epochs.Load()
	for _, e := range s.order {
		executors = min(executors, e.connected.Load())
	}
	for _, c := range s.clients {
		clients = min(clients, c.epochs.Load())
	}
	return executors, clients
}

// charged counts a charge, and says when a mark is reached.
func (s *site) charged() {
	n := s.charges.Add(1)
	s.marking.Lock()
	defer s.marking.Unlock()
	if len(s.marks) == 0 || n < s.marks[0] {
		return
	}
	life := uint64(len(s.Marks) - len(s.marks) + 1)
	if executors, clients := s.least(); executors >= life && clients >= life {
		s.marks = s.marks[1:]
		fmt.Println("charges", n)
	}
}

// done says whether there are enough charges, and whoever started the site has said so too.
func (s *site) done() bool {
	select {
	case <-s.enough:
		s.stop.Store(true)
	default:
	}
	return s.stop.Load() && s.charges.Load() >= s.Charges
}

// ---- an executor ----

// with does something that needs a manager, connecting first if there is no connection. After an error there is none.
func (e *simExecutor) with(f func() error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.connect()
	if err == nil {
		err = f()
	}
	if err != nil && e.x != nil {
		e.x.Close()
		e.x = nil
	}
	return err
}

// connect registers and attaches, and brings what is owed into the fresh cells.
func (e *simExecutor) connect() error {
	if e.x != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	r, err := e.s.m.Register(ctx, &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: e.addr, Info: e.info})
	if err != nil {
		return err
	}
	e.id = r.GetExecutorId()
	if e.x, err = link.AttachExecutor(ctx, e.s.m, e.s.dev, e.id, incarnationOf(e.info)); err != nil {
		return err
	}
	e.connected.Add(1)
	e.cells = make([]*simLease, e.x.Cells())
	for _, l := range e.owed {
		l.cell, l.charged, l.told = -1, accounting.Use{}, false
	}
	for _, l := range e.owed {
		if err := e.put(l); err != nil {
			return err
		}
	}
	return e.write()
}

func (e *simExecutor) write() error {
	e.beat++
	return e.x.WriteLine(lineOf(e.info, 0, e.beat, time.Now()))
}

// put brings the cell of a lease up to date, and takes one first if it has none.
func (e *simExecutor) put(l *simLease) error {
	if l.cell < 0 {
		i := slices.Index(e.cells, nil)
		if i < 0 {
			return nil // it waits for one
		}
		l.cell, e.cells[i] = i, l
		head := l.head
		head.Final = false
		if err := e.x.WriteHead(i, head); err != nil {
			return err
		}
	}
	if err := e.x.Charge(l.cell, l.charged, l.use); err != nil {
		return err
	}
	l.charged = l.use
	if !l.head.Final || l.told {
		return nil
	}
	l.told = true
	return e.x.WriteHead(l.cell, l.head)
}

// live beats and settles until over.
func (e *simExecutor) live(over <-chan struct{}, first time.Duration) {
	timer := time.NewTimer(first)
	defer timer.Stop()
	for {
		select {
		case <-over:
			return
		case <-timer.C:
		}
		_ = e.with(func() error { // next time
			if err := e.write(); err != nil {
				return err
			}
			return e.settle()
		})
		timer.Reset(e.s.Beat)
	}
}

// settle frees the cells of leases that are over and in the ledger.
func (e *simExecutor) settle() error {
	for id, l := range e.owed {
		if err := e.put(l); err != nil {
			return err
		}
		if !l.told || l.cell < 0 {
			continue
		}
		r, given, err := e.x.Receipt(l.cell)
		if err != nil {
			return err
		}
		if given && r.Covers(&accounting.Entry{Key: l.head.Key, Final: true, Use: l.use}) {
			if err := e.x.Clear(l.cell); err != nil {
				return err
			}
			e.cells[l.cell] = nil
			delete(e.owed, id)
		}
	}
	return nil
}

// grant gives a core to a tenant; nil: it is busy.
func (e *simExecutor) grant(tenant string) *simLease {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.info.FreeCores == 0 || e.x != nil && len(e.owed) >= len(e.cells) {
		return nil
	}
	e.last++
	l := &simLease{cell: -1, head: accounting.CellHead{Key: accounting.Key{Incarnation: incarnationOf(e.info), Lease: e.last}, Tenant: tenant, Began: time.Now()}}
	e.owed[e.last] = l
	e.info.FreeCores--
	e.info.Leases++
	return l
}

// charge adds to what a lease has used, and then to its cell. Only the second may fail.
func (e *simExecutor) charge(l *simLease, c accounting.Counter, n uint64) error {
	e.mu.Lock()
	l.use[c] += n
	e.mu.Unlock()
	return e.with(func() error { return e.put(l) })
}

// release ends a lease. What is left to settle is done by live.
func (e *simExecutor) release(l *simLease) {
	e.mu.Lock()
	defer e.mu.Unlock()
	l.head.Final, l.head.Ended = true, time.Now()
	e.info.FreeCores++
	e.info.Leases--
}

// settled waits until the ledger has everything.
func (e *simExecutor) settled() error {
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		e.mu.Lock()
		n := len(e.owed)
		e.mu.Unlock()
		if n == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("executor %s: %d leases are not settled after %v", e.addr, n, patience)
		}
	}
}

func (e *simExecutor) leave() error {
	return e.with(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := e.s.m.Deregister(ctx, &control.DeregisterRequest{ExecutorId: e.id})
		e.x.Close()
		e.x = nil
		return err
	})
}
