package faults

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// caller is a client process. Its output lines are counted as they arrive.
type caller struct {
	*process
	world *world
	name  string
	log   lines
	ready chan struct{} // closed after its first lease

	right, callNS, controlNS atomic.Int64

	mu     sync.Mutex
	wrongs []string
	errors []callError
	report *report
	slow   []slowWait // each longer than those before
}

// slowWait is an operation of a caller that took long.
type slowWait struct {
	ended time.Time
	took  time.Duration
	op    string
}

// callError is a call or control operation of a caller that ended with an error of the connection or lease class.
type callError struct {
	at      time.Time
	status  int
	started bool
	wait    time.Duration
	text    string
}

// callerOptions are the arguments of a caller; see testdata/caller.c.
type callerOptions struct {
	language string // "c" or "go"
	steady   bool
	seed     uint64
	maxBytes int
	pause    time.Duration
	mode     int // wait mode
	timeout  time.Duration
	on       machine
	env      []string
}

// newCaller starts a client process.
func (w *world) newCaller(o callerOptions) *caller {
	w.Helper()
	c := &caller{world: w, name: fmt.Sprintf("%s-%d", o.language, o.seed), ready: make(chan struct{})}
	program, env := built(w, "build/faults/caller"), o.env
	if o.language == "go" {
		program, env = os.Args[0], append(env, envCaller+"=1")
	}
	kind := "storm"
	if o.steady {
		kind = "steady"
	}
	var err error
	c.process, err = w.run(o.on, env, c.line, program, kind, built(w, "build/faults/work.so"), fmt.Sprint(o.seed), fmt.Sprint(o.maxBytes),
		fmt.Sprint(o.pause.Microseconds()), fmt.Sprint(o.mode), fmt.Sprint(o.timeout.Milliseconds()))
	if err != nil {
		w.Fatal(err)
	}
	w.mu.Lock()
	w.callers = append(w.callers, c)
	w.mu.Unlock()
	return c
}

func (c *caller) line(s string) {
	word, rest, _ := strings.Cut(s, " ")
	if word != "ok" {
		c.log.add(s)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch word {
	case "ready":
		close(c.ready)
	case "ok":
		var right, call, control int64
		if n, _ := fmt.Sscan(rest, &right, &call, &control); n == 3 {
			c.right.Store(right)
			c.callNS.Store(call)
			c.controlNS.Store(control)
		}
	case "err":
		var e callError
		var started int
		r := strings.NewReader(rest)
		if n, _ := fmt.Fscan(r, &e.status, &started, &e.wait); n == 3 {
			text, _ := io.ReadAll(r)
			e.at, e.started, e.text = time.Now(), started != 0, strings.TrimSpace(string(text))
			c.errors = append(c.errors, e)
		}
	case "slow":
		w := slowWait{ended: time.Now()}
		if ns, op, ok := strings.Cut(rest, " "); ok {
			n, _ := strconv.ParseInt(ns, 10, 64)
			w.took, w.op = time.Duration(n), op
		}
		c.slow = append(c.slow, w)
	case "end":
		c.report = &report{}
		if err := json.Unmarshal([]byte(rest), c.report); err != nil {
			c.wrongs = append(c.wrongs, "report: "+err.Error())
		}
	case "wrong":
		c.wrongs = append(c.wrongs, rest)
	default: // a panic, a sanitizer, an assertion
		c.wrongs = append(c.wrongs, s)
	}
}

// check fails the test if the caller has printed a line "wrong".
func (c *caller) check() {
	c.world.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, s := range c.wrongs {
		if i == 20 {
			c.world.Errorf("caller %s: and %d more", c.name, len(c.wrongs)-i)
			break
		}
		c.world.Errorf("caller %s: %s", c.name, s)
	}
	c.wrongs = nil
}

// failures returns the errors that the caller has printed so far.
func (c *caller) failures() []callError {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.errors)
}

// finish ends the caller with SIGTERM within d and checks its report.
func (c *caller) finish(d time.Duration) *report {
	c.world.Helper()
	c.process.end(d, "caller "+c.name)
	return c.reported()
}

// reported checks the report of a caller that has ended.
func (c *caller) reported() *report {
	c.world.Helper()
	c.check()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.report == nil {
		c.world.Fatalf("caller %s ended (%v) without a report:\n%s", c.name, c.state, c.log.tail(2000))
	}
	if r := c.report; r.Files[1] > r.Files[0] || r.Mappings[1] > r.Mappings[0] {
		c.world.Errorf("caller %s leaks: %d open files at the start and %d at the end, %d and %d mappings; open: %q", c.name, r.Files[0],
			r.Files[1], r.Mappings[0], r.Mappings[1], r.Open)
	}
	return c.report
}
