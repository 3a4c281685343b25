package faults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// envCaller makes this test binary a client process with the arguments and the output of testdata/caller.c.
const envCaller = "FAULTS_GO_CALLER"

// report is the last line of a caller.
type report struct {
	Calls     uint64         `json:"calls"`
	Right     uint64         `json:"right"`
	Wrong     uint64         `json:"wrong"`
	CallNS    int64          `json:"call_ns"` // the longest wait in a call
	CallOp    string         `json:"call_op"`
	ControlNS int64          `json:"control_ns"`
	ControlOp string         `json:"control_op"`
	Files     [2]int         `json:"files"`    // open after the first lease, and at the end
	Open      []string       `json:"open"`     // what the descriptors at the end refer to
	Mappings  [2]int         `json:"mappings"` // of shared or device memory
	Errors    map[string]int `json:"errors"`   // by status
}

const (
	flights = 8 // requests in flight
	tired   = 3 // connection errors in a row before a new lease is taken

	slow = time.Second // longer waits are printed

	// Number of polls of a call after which the caller sleeps between polls. Under Linux 6.18, a caller that only polled has kept a processor
	// for itself for over 20 s, while its worker and kernel threads on that processor were ready to run.
	patience = 1000
)

type goCaller struct {
	steady       bool
	library      string
	maxBytes     int
	pauseUS      uint32
	mode         client.WaitMode
	timeout      time.Duration
	tag          atomic.Uint64
	seed, stream atomic.Uint64
	stop         context.Context

	mu     sync.Mutex
	report report
	saidAt time.Time
	busy   string // the latest reason why there was no free slot
}

// callerMain is the main function of the client process. Its arguments are those of testdata/caller.c.
func callerMain(args []string) int {
	number := func(i int) int64 {
		n, err := strconv.ParseInt(args[i], 10, 64)
		if err != nil {
			panic(err)
		}
		return n
	}
	c := &goCaller{steady: args[0] == "steady", library: args[1], maxBytes: int(number(3)), pauseUS: uint32(number(4)),
		mode: client.WaitMode(number(5)), timeout: time.Duration(number(6)) * time.Millisecond}
	c.seed.Store(uint64(number(2)))
	c.tag.Store(uint64(number(2)) << 32)
	c.report.Errors = map[string]int{}
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	c.stop = stop
	for stop.Err() == nil && !c.cycle(20) {
		c.pause(20 * time.Millisecond)
	}
	polls := make(chan struct{})
	time.AfterFunc(0, func() { close(polls) }) // the first timer that starts makes the runtime open two descriptors
	<-polls
	files, mappings := openFiles(os.Getpid()), len(sharedMappings(os.Getpid()))
	c.say("ready")
	for stop.Err() == nil {
		if !c.cycle(1 << 62) {
			c.pause(20 * time.Millisecond)
		}
	}
	c.report.Files = [2]int{files, openFiles(os.Getpid())}
	c.report.Mappings = [2]int{mappings, len(sharedMappings(os.Getpid()))}
	for range 500 { // connections close in goroutines of their own
		if c.report.Files[1] <= files && c.report.Mappings[1] <= mappings {
			break
		}
		time.Sleep(10 * time.Millisecond)
		c.report.Files[1], c.report.Mappings[1] = openFiles(os.Getpid()), len(sharedMappings(os.Getpid()))
	}
	c.report.Open = openNames(os.Getpid())
	b, err := json.Marshal(&c.report)
	if err != nil {
		panic(err)
	}
	c.say("end %s", b)
	if c.report.Wrong > 0 {
		return 1
	}
	return 0
}

func (c *goCaller) pause(d time.Duration) {
	select {
	case <-c.stop.Done():
	case <-time.After(d):
	}
}

// say prints one line in one write.
func (c *goCaller) say(format string, args ...any) {
	os.Stdout.WriteString(fmt.Sprintf(format, args...) + "\n")
}

// progress prints the counts now and then. mu must be held.
func (c *goCaller) progress(always bool) {
	if now := time.Now(); always || now.Sub(c.saidAt) > 20*time.Millisecond {
		c.saidAt = now
		c.say("ok %d %d %d", c.report.Right, c.report.CallNS, c.report.ControlNS)
	}
}

func (c *goCaller) wrong(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.report.Wrong++
	c.say("wrong %s", strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " "))
}

// took records how long an operation waited.
func (c *goCaller) took(began time.Time, op string, longest *int64, longestOp *string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ns := int64(time.Since(began)); ns > *longest {
		*longest, *longestOp = ns, op
		c.progress(true)
		if ns > int64(slow) {
			c.say("slow %d %s", ns, op)
		}
	}
}

func (c *goCaller) tookCall(began time.Time, op string) {
	c.took(began, op, &c.report.CallNS, &c.report.CallOp)
}

// checkError says whether a caller may get an error while other processes die, and returns its class.
func (c *goCaller) checkError(op string, began time.Time, err error, alwaysSay bool) error {
	var e *client.Error
	var class error
	for _, k := range []error{client.ErrBusy, client.ErrConnection, client.ErrLease} {
		if errors.Is(err, k) {
			class = k
		}
	}
	named := errors.As(err, &e)
	ended := named && (e.Status == client.StatusDeadline && errors.Is(err, context.DeadlineExceeded) ||
		e.Status == client.StatusCancelled && errors.Is(err, context.Canceled))
	if ended {
		class = client.ErrFunction
	}
	if !named || class == nil || err.Error() == "" {
		c.wrong("%s ended with %v", op, err)
		return client.ErrFatal
	}
	c.mu.Lock()
	c.report.Errors[strconv.Itoa(int(e.Status))]++
	if class == client.ErrBusy {
		c.busy = strings.ReplaceAll(err.Error(), "\n", " ")
	}
	c.mu.Unlock()
	if alwaysSay || class != client.ErrFunction && class != client.ErrBusy {
		started := 0
		if e.Started {
			started = 1
		}
		c.say("err %d %d %d %s", e.Status, started, time.Since(began), strings.ReplaceAll(err.Error(), "\n", " "))
	}
	return class
}

// judge checks the outcome of a call and returns the class of its error.
func (c *goCaller) judge(op string, began time.Time, n int, err error, f *flight) error {
	c.tookCall(began, op)
	c.mu.Lock()
	c.report.Calls++
	c.mu.Unlock()
	if err != nil {
		return c.checkError(op, began, err, false)
	}
	if n != len(f.out) || !workIs(f.out[:n], f.hash) {
		c.wrong("%s of %d bytes: the result of %d bytes is not the %d bytes of hash %x", op, len(f.in), n, len(f.out), f.hash)
		return nil
	}
	c.mu.Lock()
	c.report.Right++
	c.progress(false)
	c.mu.Unlock()
	return nil
}

// flight has the payload and the result buffer of one call.
type flight struct {
	in, out []byte
	hash    uint64
}

// user is one goroutine of a caller.
type user struct {
	*goCaller
	*rand.Rand
	l *client.Lease
	f *client.Function
}

func (u *user) size() int {
	sizes := []int{0, 1, 8, 24, 40, 64, 200, 240, 256, 300, 1000, 4080, 4096, 16368, 16384, 16385}
	n := u.IntN(u.maxBytes)
	if u.IntN(8) > 0 {
		n = sizes[u.IntN(len(sizes))]
	}
	return min(n, u.maxBytes)
}

func (u *user) prepare() *flight {
	want, pause, extra := u.size(), 0, u.size()
	if u.IntN(32) == 0 {
		pause = u.IntN(2000)
	}
	if u.steady {
		want, pause, extra = 64, int(u.pauseUS), 8
	}
	in := workPayload(u.tag.Add(1), extra, uint32(want), uint32(pause))
	return &flight{in: in, out: make([]byte, want), hash: workHash(in)}
}

// callAndWait makes a synchronous call, perhaps with a context that ends during it.
func (u *user) callAndWait() error {
	f, ctx, op := u.prepare(), context.Background(), "invoke"
	var cancel context.CancelFunc
	switch {
	case u.steady:
	case u.IntN(8) == 0:
		op = "invoke with deadline"
		ctx, cancel = context.WithTimeout(ctx, time.Duration(u.IntN(3_000_000)))
		defer cancel()
	case u.IntN(8) == 0:
		op = "invoke and cancel"
		ctx, cancel = context.WithCancel(ctx)
		defer time.AfterFunc(time.Duration(u.IntN(3_000_000)), cancel).Stop()
		defer cancel()
	}
	began := time.Now()
	n, err := u.f.Invoke(ctx, f.in, f.out)
	return u.judge(op, began, n, err, f)
}

// callMany makes several calls that are in flight together, and waits for, tests or cancels them in random order.
func (u *user) callMany() (worst error) {
	type call struct {
		client.Call
		*flight
	}
	var calls []call
	for range 1 + u.IntN(flights) {
		f, began := u.prepare(), time.Now()
		c, err := u.l.Worker(0).Submit(context.Background(), u.f, f.in, len(f.out))
		u.tookCall(began, "submit")
		if err != nil {
			worst = u.checkError("submit", began, err, false)
			break
		}
		clear(f.in) // it may be reused
		calls = append(calls, call{c, f})
	}
	u.Shuffle(len(calls), func(i, j int) { calls[i], calls[j] = calls[j], calls[i] })
	for _, c := range calls {
		began := time.Now()
		switch u.IntN(6) {
		case 0:
			c.Cancel()
			u.tookCall(began, "cancel")
			continue
		case 1:
			for looks := 1; ; looks++ {
				ended, err := c.Test()
				if err != nil || ended {
					break
				}
				if looks > patience {
					time.Sleep(100 * time.Microsecond)
				}
			}
			u.tookCall(began, "test")
		default:
			if err := c.Wait(context.Background()); err != nil {
				worst = u.checkError("wait", began, err, false)
				continue
			}
		}
		n, err := c.Result(c.out)
		if class := u.judge("wait and result", began, n, err, c.flight); class != nil {
			worst = class
		}
	}
	return worst
}

// run calls until the lease is lost, the context ends or most calls are made.
func (u *user) run(ctx context.Context, most int) {
	bad := 0
	var busySince time.Time
	for i := 0; i < most && bad < tired && ctx.Err() == nil; i++ {
		var class error
		if u.steady || u.IntN(3) > 0 {
			class = u.callAndWait()
		} else {
			class = u.callMany()
		}
		switch class {
		case client.ErrBusy: // the worker has not answered the calls that were given up
			if busySince.IsZero() {
				busySince = time.Now()
			}
			u.mu.Lock()
			why := u.busy
			u.mu.Unlock()
			u.tookCall(busySince, "no free slot ("+why+")")
			time.Sleep(500 * time.Microsecond)
		case client.ErrConnection:
			bad++
		case client.ErrLease:
			bad = tired
		default:
			bad, busySince = 0, time.Time{}
		}
	}
}

// control records a control operation.
func (c *goCaller) control(op string, began time.Time, err error) bool {
	c.took(began, op, &c.report.ControlNS, &c.report.ControlOp)
	if err != nil {
		c.checkError(op, began, err, c.steady)
	}
	return err == nil
}

// cycle is one session with one lease; it says whether a call went well.
func (c *goCaller) cycle(most int) bool {
	began := time.Now()
	s, err := client.Connect(context.Background(), client.Options{Timeout: c.timeout})
	if !c.control("connect", began, err) {
		return false
	}
	defer func() {
		began := time.Now()
		c.control("close", began, s.Close())
	}()
	began = time.Now()
	l, err := s.Lease(context.Background(), client.LeaseOptions{Library: c.library, Depth: flights, WaitMode: c.mode,
		Bulk: int64(4 * (c.maxBytes + workHead))})
	if !c.control("lease", began, err) {
		return false
	}
	before := c.report.Right
	f, err := l.Function("work")
	if err != nil {
		c.wrong("find function: %v", err)
		return false
	}
	ctx, lost := context.WithCancel(c.stop)
	var users sync.WaitGroup
	n := 3
	if c.steady {
		n = 1
	}
	for range n {
		u := &user{goCaller: c, Rand: rand.New(rand.NewPCG(c.seed.Load(), c.stream.Add(1))), l: l, f: f}
		users.Go(func() {
			u.run(ctx, most)
			lost()
		})
	}
	users.Wait()
	lost()
	began = time.Now()
	c.control("release", began, l.Release(context.Background()))
	return c.report.Right > before
}
