package faults

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/tests/smalldisk"
)

var (
	chaosKills    = flag.Int("chaos-kills", 15, "kills and stops of TestChaos")
	chaosDamages  = flag.Int("chaos-damages", 1, "how often TestChaos damages each kind of file, and fills the ledger's disk")
	chaosRestarts = flag.Int("chaos-restarts", 1, "how often TestChaos kills the resource manager under many leases")
	chaosLeases   = flag.Int("chaos-leases", 20, "leases of TestChaos while the resource manager is killed")
	chaosDuration = flag.Duration("chaos-duration", 15*time.Second, "about how long the kills and damages of TestChaos take")
)

// Kills and stops of each kind, out of 150. The flag -chaos-damages sets the number of the other faults.
var chaosMix = []struct {
	kind string
	of   int
}{
	{"executor SIGKILL", 16}, {"executor SIGSTOP", 10}, {"executor SIGTERM", 8},
	{"worker SIGKILL", 24}, {"worker SIGSTOP", 10}, {"worker SIGTERM", 6},
	{"zygote SIGKILL", 6}, {"zygote SIGSTOP", 4},
	{"agent SIGKILL", 14}, {"agent SIGSTOP", 6}, {"agent SIGTERM", 6},
	{"client SIGKILL", 14}, {"client SIGSTOP", 8}, {"client SIGTERM", 6},
	{"manager SIGKILL", 6}, {"manager SIGSTOP", 6},
}

const (
	ledgerFull      = "ledger disk full"
	damagedLedger   = "ledger copy damaged"
	damagedList     = "revoked list damaged"
	damagedIdentity = "identity damaged"
	damagedJournal  = "executor journal damaged"
	underLeases     = "manager SIGKILL under leases"
)

var signals = map[string]unix.Signal{"SIGKILL": unix.SIGKILL, "SIGSTOP": unix.SIGSTOP, "SIGTERM": unix.SIGTERM}

// chaos is a storm with more kinds of faults. The seed alone determines their kinds and order.
type chaos struct {
	*storm
	t        *testing.T
	state    string // directory of the ledger, on a small disk
	http     string // socket of the manager's health and metrics
	identity string // directory of the daemons' identity
	token    string // file of a token
	agent    string // socket of the clients' agent
	kinds    map[string]*kindOfFault
	waiting  []*wait
	ending   []*ending
	groups   []string // prefixes of the names of control groups that the executors may have made
	events   executorEvents
	history  lines
	began    time.Time
	starved  *starvation
}

// kindOfFault is a line of the final table.
type kindOfFault struct {
	count   int
	longest time.Duration // until every client was served again, or until the fault's own check held
}

// wait ends when all clients have been served after a fault.
type wait struct {
	kind  string
	from  time.Time
	base  map[*caller]int64 // right results of each client a moment after the fault; nil before that
	shown bool              // listed in the history because it takes long
}

// ending is a process that was asked to end.
type ending struct {
	*process
	what  string
	until time.Time
	ended func()
}

// settleTime is how long after a fault right results are counted as answers to earlier calls.
const settleTime = 100 * time.Millisecond

// TestChaos causes random faults of all kinds in a whole system while four clients call: kills and stops of every process, a full disk,
// damaged files, and kills of the resource manager while many leases are in use. No result is wrong, nothing hangs, the bills agree with
// the audit lines, and no resource is left behind. A table at the end lists each kind of fault. The clock is not set: see README.md.
func TestChaos(t *testing.T) {
	if testing.Short() {
		t.Skip("injects faults for a long time")
	}
	if provider() != "shm" || other != "" {
		t.Skip("provider shm on one machine only: the virtual machines have TestRandomKills")
	}
	c := newChaos(t)
	before := shared()
	idleBefore, managerBefore := c.begin()
	c.run(c.plan())
	for _, k := range c.callers {
		c.account(k.finish(waitBound))
	}
	c.crowd()
	c.released(idleBefore, managerBefore)
	for _, d := range c.executors {
		c.noteGroups(d)
		d.stop()
	}
	c.events.compare(c)
	c.manager.stop()
	c.agentEnds()
	c.noGroupsLeft()
	c.nothingLeft(before)
	c.table()
}

func newChaos(t *testing.T) *chaos {
	dir, pid := smalldisk.Hold(t, "16m")
	started.Lock()
	started.pids[pid] = true
	started.Unlock()
	w := newWorld(t)
	c := &chaos{t: t, storm: newStorm(t, w, "chaos"), state: filepath.Join(dir, "state"), http: filepath.Join(w.dir, "http"),
		identity: filepath.Join(w.dir, "node"), token: filepath.Join(w.dir, "token"), agent: filepath.Join(w.dir, "agent.sock"), kinds: map[string]*kindOfFault{},
		starved: watchStarvation(t)}
	cluster := filepath.Join(w.dir, "cluster")
	for _, args := range [][]string{{"cluster", "init", "--dir", cluster}, {"cluster", "node", "127.0.0.1", "--dir", cluster, "--out", c.identity},
		{"token", "issue", "--dir", cluster, "--tenant", "ann", "--out", c.token}} {
		if out, err := c.rfaas(args...); err != nil {
			t.Fatalf("rfaas %q: %v\n%s", args, err, out)
		}
	}
	w.env = append(w.env, "RFAAS_AGENT_SOCKET="+c.agent, "RFAAS_AGENT_LINGER=3s")
	w.newManagerOn(here, "--state-dir", c.state, "--identity-dir", c.identity, "--http-listen", "unix:"+c.http)
	for i := range 2 {
		c.executors = append(c.executors, c.newAuditedExecutor(fmt.Sprintf("executor-%d", i)))
	}
	c.tick = c.look
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("faults:\n%s", c.history.tail(20_000))
		}
	})
	return c
}

// newAuditedExecutor starts an executor with a journal and an audit file.
func (c *chaos) newAuditedExecutor(name string, args ...string) *daemon {
	d := c.newExecutor(name, append([]string{"--sandbox", "on", "--identity-dir", c.identity, "--state-dir", c.journals(name),
		"--audit-file", filepath.Join(c.dir, name+".audit")}, args...)...)
	c.events.open(d.name)
	c.noteGroups(d)
	return d
}

func (c *chaos) journals(executor string) string { return filepath.Join(c.dir, executor+".journals") }

// rfaas runs the command rfaas.
func (c *chaos) rfaas(args ...string) ([]byte, error) {
	cmd := exec.Command(built(c, "bin/rfaas"), args...)
	cmd.Env = c.env
	return cmd.CombinedOutput()
}

// plan returns all faults, in an order that depends only on the seed.
func (c *chaos) plan() (kinds []string) {
	all := 0
	for _, m := range chaosMix {
		all += m.of
	}
	done := 0
	for i, m := range chaosMix {
		next := done + m.of
		for range next**chaosKills/all - done**chaosKills/all {
			kinds = append(kinds, m.kind)
		}
		c.kind(chaosMix[i].kind)
		done = next
	}
	for _, kind := range []string{ledgerFull, damagedLedger, damagedList, damagedIdentity, damagedJournal} {
		c.kind(kind)
		for range *chaosDamages {
			kinds = append(kinds, kind)
		}
	}
	c.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
	return kinds
}

// run causes the faults one after the other. Their effects overlap, but after every tenth fault run waits until all clients are served.
func (c *chaos) run(plan []string) {
	c.Helper()
	c.began = time.Now()
	pause := *chaosDuration / time.Duration(max(1, len(plan)))
	for i, kind := range plan {
		c.do(kind, rand.New(rand.NewPCG(c.Uint64(), uint64(i))))
		if left := time.Until(c.began.Add(pause * time.Duration(i+1))); left > 0 {
			c.pass(left)
		}
		if i%killsPerCalm == killsPerCalm-1 {
			c.quiet()
		}
		if c.Failed() {
			c.FailNow()
		}
	}
	c.quiet()
}

// quiet waits until all faults are over and every client has been served since.
func (c *chaos) quiet() {
	c.Helper()
	for end := time.Now().Add(2 * recoverBound); len(c.waiting)+len(c.ending)+len(c.stopped) > 0; c.pass(5 * time.Millisecond) {
		if time.Now().After(end) {
			c.Fatalf("not within %v of the last fault: %d waits, %d ends, %d stops", 2*recoverBound, len(c.waiting), len(c.ending), len(c.stopped))
		}
	}
	c.calm()
}

// do causes one fault.
func (c *chaos) do(kind string, r *rand.Rand) {
	c.Helper()
	switch kind {
	case ledgerFull:
		c.fillLedger(r)
	case damagedLedger:
		c.damageLedgerCopy(r)
	case damagedList:
		c.damageList()
	case damagedIdentity:
		c.damageIdentity()
	case damagedJournal:
		c.damageJournal(r)
	default:
		who, how, _ := strings.Cut(kind, " ")
		c.hitProcess(kind, who, signals[how], r)
	}
}

// victim is the target of a fault.
type victim struct {
	handle
	executor *daemon // nil: not an executor
	client   int     // index of the client; -1: not a client
	process  *process
}

// find chooses a running process at random. ok is false if there is none, or if the chosen one is stopped or was asked to end.
func (c *chaos) find(who string, r *rand.Rand) (v victim, ok bool) {
	d := c.executors[r.IntN(len(c.executors))]
	v.client = -1
	pid, parent := 0, unix.Getpid()
	switch who {
	case "executor":
		pid, v.executor, v.process = d.pid(), d, d.current()
	case "worker", "zygote":
		zygotes, workers := living(d.pid())
		if who == "zygote" {
			workers = zygotes
		}
		if len(workers) > 0 {
			pid, parent = workers[r.IntN(len(workers))], d.pid()
		}
	case "agent":
		return c.findAgent()
	case "client":
		v.client = r.IntN(len(c.callers))
		pid, v.process = c.callers[v.client].pid(), c.callers[v.client].process
	case "manager":
		pid = c.manager.pid()
	}
	if pid == 0 || c.isHit(pid) {
		return v, false
	}
	v.handle, ok = hold(pid, parent)
	return v, ok
}

// isHit reports whether a process is stopped or was asked to end.
func (c *chaos) isHit(pid int) bool {
	return slices.ContainsFunc(c.stopped, func(s stopped) bool { return s.pid == pid }) ||
		slices.ContainsFunc(c.ending, func(e *ending) bool { return e.process.pid() == pid })
}

// findAgent returns the process that answers at the agent's socket.
func (c *chaos) findAgent() (victim, bool) {
	v := victim{client: -1}
	if slices.ContainsFunc(c.stopped, func(s stopped) bool { return strings.HasPrefix(s.what, "agent") }) {
		return v, false // a stopped agent does not answer
	}
	var status struct {
		PID int `json:"pid"`
	}
	out, err := c.rfaas("agent", "status", "--json", "--timeout", "5s")
	if err != nil || json.Unmarshal(out, &status) != nil || c.isHit(status.PID) {
		return v, false
	}
	fd, err := unix.PidfdOpen(status.PID, 0)
	if err != nil {
		return v, false
	}
	v.handle = handle{status.PID, fd}
	name, _, _, ok := stat(v.pid)
	if !ok || name != "rfaas-agent" {
		v.close()
		return v, false
	}
	return v, true
}

// hitProcess kills, stops or asks a process to end.
func (c *chaos) hitProcess(kind, who string, how unix.Signal, r *rand.Rand) {
	c.Helper()
	v, ok := c.find(who, r)
	for end := time.Now().Add(recoverBound); !ok; v, ok = c.find(who, r) {
		if time.Now().After(end) {
			c.Fatalf("no %s found within %v", who, recoverBound)
		}
		c.pass(20 * time.Millisecond)
	}
	if how == unix.SIGTERM { // a program that has just been started does not handle the signal yet
		c.waitStarted(v)
	}
	c.history.add(fmt.Sprintf("%.1f s: %s (process %d)", time.Since(c.began).Seconds(), kind, v.pid))
	c.kind(kind).count++
	switch how {
	case unix.SIGSTOP:
		c.stop(kind, v, 50*time.Millisecond+time.Duration(r.Int64N(int64(stopMost))))
		return
	case unix.SIGKILL:
		c.kill(v)
	case unix.SIGTERM:
		c.terminate(who, v)
	}
	v.close()
	c.await(kind)
}

// waitStarted waits until an executor or a client has started.
func (c *chaos) waitStarted(v victim) {
	var ready chan struct{}
	switch {
	case v.executor != nil:
		v.executor.waitReady()
	case v.client >= 0:
		ready = c.callers[v.client].ready
	}
	for end := time.Now().Add(2 * recoverBound); ready != nil; c.pass(5 * time.Millisecond) {
		select {
		case <-ready:
			return
		default:
		}
		if time.Now().After(end) {
			c.Fatalf("caller %s is not ready within %v:\n%s", c.callers[v.client].name, 2*recoverBound, c.callers[v.client].log.tail(2000))
		}
	}
}

func (c *chaos) stop(kind string, v victim, d time.Duration) {
	from := time.Now()
	v.signal(unix.SIGSTOP)
	c.stopped = append(c.stopped, stopped{handle: v.handle, what: kind, until: from.Add(d), then: unix.SIGCONT, after: func() {
		if v.executor != nil {
			c.events.stopped(v.executor.name, from, time.Now())
		}
		c.await(kind)
	}})
}

func (c *chaos) kill(v victim) {
	if v.executor != nil {
		c.noteGroups(v.executor)
	}
	from := time.Now()
	v.signal(unix.SIGKILL)
	c.kills++
	if v.process != nil {
		<-v.process.done
	}
	if v.executor != nil {
		c.events.killed(v.executor.name, from, time.Now())
	}
	if v.client >= 0 {
		k := c.callers[v.client]
		k.check()
		c.right += k.right.Load()
		c.noteWaits(k.callNS.Load(), k.controlNS.Load())
		c.callers[v.client] = c.caller(v.client)
	}
}

// terminate asks a process to end. An executor must end with status 0, a client with a report.
func (c *chaos) terminate(who string, v victim) {
	if v.executor != nil {
		c.noteGroups(v.executor)
	}
	v.signal(unix.SIGTERM)
	if v.process == nil {
		return
	}
	e := &ending{process: v.process, what: who, until: time.Now().Add(recoverBound)}
	e.ended = func() {
		if code := v.process.state.ExitCode(); code != 0 {
			c.Errorf("%s %d ended with %v after SIGTERM", who, v.pid, v.process.state)
		}
		if v.client >= 0 {
			c.account(c.callers[v.client].reported())
			c.callers[v.client] = c.caller(v.client)
		}
	}
	c.ending = append(c.ending, e)
}

// look checks which clients have been served and which processes have ended. It runs whenever time passes.
func (c *chaos) look() {
	for _, k := range c.callers {
		k.check()
	}
	c.ending = slices.DeleteFunc(c.ending, func(e *ending) bool {
		select {
		case <-e.done:
			e.ended()
			return true
		default:
		}
		if time.Now().After(e.until) {
			c.Fatalf("%s did not end within %v of SIGTERM; its threads:\n%s", e.what, recoverBound, stacks(e.process.pid()))
		}
		return false
	})
	c.waiting = slices.DeleteFunc(c.waiting, c.isServed)
}

// isServed reports whether every client has had a right result since a fault, or since its start if that was later.
func (c *chaos) isServed(w *wait) bool {
	took := time.Since(w.from)
	if took < settleTime {
		return false
	}
	if w.base == nil {
		w.base = map[*caller]int64{}
		for _, k := range c.callers {
			w.base[k] = k.right.Load()
		}
	}
	for _, k := range c.callers {
		if k.right.Load() > w.base[k] {
			continue
		}
		if took > recoverBound/2 && !w.shown {
			w.shown = true
			c.history.add(fmt.Sprintf("%.1f s: caller %s has no right result for %v after %s; it said:\n%s", time.Since(c.began).Seconds(), k.name,
				took.Round(time.Millisecond), w.kind, k.log.tail(1000)))
		}
		if took > 2*recoverBound {
			c.Fatalf("caller %s has no right result %v after %s", k.name, took.Round(time.Millisecond), w.kind)
		}
		return false
	}
	c.kind(w.kind).took(took)
	return true
}

func (c *chaos) await(kind string) {
	c.waiting = append(c.waiting, &wait{kind: kind, from: time.Now()})
}

func (c *chaos) kind(name string) *kindOfFault {
	if c.kinds[name] == nil {
		c.kinds[name] = &kindOfFault{}
	}
	return c.kinds[name]
}

func (k *kindOfFault) took(d time.Duration) { k.longest = max(k.longest, d) }

// noteGroups remembers which control groups an executor and its spawner may have made.
func (c *chaos) noteGroups(d *daemon) {
	for _, pid := range []int{d.pid(), spawner(d.pid())} {
		space, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
		status, _ := readProc(pid, "status")
		_, ids, _ := strings.Cut(string(status), "NSpid:")
		ids, _, _ = strings.Cut(ids, "\n")
		if list := strings.Fields(ids); err == nil && len(list) > 0 {
			c.groups = append(c.groups, fmt.Sprintf("rfaas-%s.%s-", strings.Trim(space, "pid:[]"), list[len(list)-1]))
		}
	}
}

// noGroupsLeft checks that no control group of the executors is left.
func (c *chaos) noGroupsLeft() {
	c.Helper()
	c.eventually(10*time.Second, "no control group is left", func() bool {
		var left []string
		err := filepath.WalkDir("/sys/fs/cgroup", func(path string, e os.DirEntry, err error) error {
			if err == nil && e.IsDir() && slices.ContainsFunc(c.groups, func(prefix string) bool { return strings.HasPrefix(e.Name(), prefix) }) {
				left = append(left, path)
			}
			return nil // other control groups may vanish during the walk
		})
		c.lastly = fmt.Sprint(left, err)
		return len(left) == 0
	})
}

// agentEnds waits until the agent has ended by itself because no client is left.
func (c *chaos) agentEnds() {
	c.Helper()
	took := c.eventually(recoverBound, "the agent ends", func() bool {
		strays() // reaps them
		for _, pid := range children(os.Getpid()) {
			started.Lock()
			known := started.pids[pid]
			started.Unlock()
			if name, state, _, ok := stat(pid); ok && !known && state != 'Z' && name == "rfaas-agent" {
				c.lastly = fmt.Sprintf("agent %d is in state %c", pid, state)
				return false
			}
		}
		return true
	})
	c.history.add(fmt.Sprintf("the agent ended after %v", took.Round(time.Millisecond)))
}

// slowest returns the longest wait of all callers, and the faults before it.
func (c *chaos) slowest() string {
	var most slowWait
	var who string
	for _, k := range c.world.callers {
		k.mu.Lock()
		for _, w := range k.slow {
			if w.took > most.took {
				most, who = w, k.name
			}
		}
		k.mu.Unlock()
	}
	if who == "" {
		return "none longer than " + slow.String()
	}
	var before []string
	ended := most.ended.Sub(c.began).Seconds()
	for line := range strings.Lines(c.history.tail(1 << 20)) {
		var at float64
		if n, _ := fmt.Sscanf(line, "%f s: ", &at); n == 1 && at > ended-most.took.Seconds()-5 && at < ended {
			before = append(before, strings.TrimSpace(line))
		}
	}
	return fmt.Sprintf("%s of caller %s took %.1f s, until %.1f s; a processor ran nothing of this test for %.1f s of it; faults since 5 s before: %s", most.op, who,
		most.took.Seconds(), ended, c.starved.longest(most.ended.Add(-most.took), most.ended).Seconds(), strings.Join(before, "; "))
}

// table prints the count and the result of each kind of fault.
func (c *chaos) table() {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%-32s %6s %8s\n", "fault", "count", "longest wait")
	line := func(name string) {
		if k := c.kinds[name]; k != nil {
			fmt.Fprintf(&b, "%-32s %6d %8.1f s\n", name, k.count, k.longest.Seconds())
		}
	}
	for _, m := range chaosMix {
		line(m.kind)
	}
	for _, name := range []string{ledgerFull, damagedLedger, damagedList, damagedIdentity, damagedJournal, underLeases} {
		line(name)
	}
	fmt.Fprintf(&b, "%-32s %6d %8s\n", "clock step", 0, "-")
	fmt.Fprintf(&b, `
The longest wait is the time until every client was served again, at least %.1f s. For files it is the time until the fault was reported
or its repair had an effect. The clock is set in TestClockJumps only, in a virtual machine.
Results: %d right, 0 wrong. Hung: 0. Longest call %.1f s, longest control operation %.1f s (bound %v).
The longest of both: %s.
Bills: %s
Left: no process, no file in /dev/shm, no temporary file, no control group; descriptors and mappings as at the start.`, settleTime.Seconds(),
		c.right, c.longCall.Seconds(), c.longControl.Seconds(), waitBound, c.slowest(), c.events.result)
	if c.longCall > waitBound || c.longControl > waitBound {
		c.Errorf("a caller waited longer than %v", waitBound)
	}
	if c.Failed() {
		c.Logf("the run failed; what it counted:%s", b.String())
		return
	}
	c.Log(b.String())
}
