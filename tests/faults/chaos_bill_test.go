package faults

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
)

// TestChaos compares the bills with the audit lines and the faults that it caused.

// chargeInterval is the executors' default. A killed executor may leave as much of each lease uncharged.
const chargeInterval = time.Second

// auditSlack is how far apart in time an audit line and its charge may be.
const auditSlack = 250 * time.Millisecond

// reapedWithin bounds the time between a lease's last audit line and the end of its charges. It is charged until its workers have been
// reaped, which takes longer on a busy machine.
const reapedWithin = 2 * time.Second

// span is an interval of time.
type span struct{ from, to time.Time }

// death is the end of an executor by SIGKILL, at some time within the span.
type death struct {
	span
	journal bool // the journal was damaged
}

// executorEvents records what happened to each executor, in order.
type executorEvents struct {
	names  []string
	deaths map[string][]death
	stops  map[string][]span
	damage map[string]time.Time // executors whose journal has been damaged since their last death
	calls  uint64               // of the tenant of crowd
	result string
}

func (b *executorEvents) open(executor string) {
	if b.deaths == nil {
		b.deaths, b.stops, b.damage = map[string][]death{}, map[string][]span{}, map[string]time.Time{}
	}
	b.names = append(b.names, executor)
}

func (b *executorEvents) stopped(executor string, from, to time.Time) {
	b.stops[executor] = append(b.stops[executor], span{from, to})
}

func (b *executorEvents) damaged(executor string, from time.Time) { b.damage[executor] = from }

func (b *executorEvents) killed(executor string, from, to time.Time) {
	damaged, ok := b.damage[executor]
	if ok {
		from = damaged
		delete(b.damage, executor)
	}
	b.deaths[executor] = append(b.deaths[executor], death{span{from, to}, ok})
}

// auditLine is a line of an audit file, as far as bills need it.
type auditLine struct {
	Time    time.Time `json:"time"`
	Event   string    `json:"event"`
	Node    string    `json:"node"`
	Lease   string    `json:"lease"`
	Tenant  string    `json:"tenant"`
	Workers int       `json:"workers"`
	Worker  *int      `json:"worker"`
	State   string    `json:"state"`
	Reason  string    `json:"reason"`
}

// expected is the core time that a tenant's leases must be charged, computed from the audit lines.
type expected struct {
	leases    int
	killed    int // leases that ended with a killed executor
	damaged   int // those of them whose executor's journal was damaged
	low, high time.Duration
}

// expectedCharges reads the audit files. Each line of a lease must name the lease, tenant and node, and each end must give a reason.
func (b *executorEvents) expectedCharges(c *chaos) map[string]*expected {
	c.Helper()
	all := map[string]*expected{}
	for _, name := range b.names {
		f, err := os.Open(filepath.Join(c.dir, name+".audit"))
		if err != nil {
			c.Fatal(err)
		}
		defer f.Close()
		running := map[string]auditLine{}
		for s := bufio.NewScanner(f); s.Scan(); {
			var l auditLine
			if err := json.Unmarshal(s.Bytes(), &l); err != nil {
				c.Errorf("%s: audit line %q: %v", name, s.Text(), err)
				continue
			}
			if l.Lease == "" || l.Worker != nil {
				continue
			}
			if l.Tenant == "" || l.Node == "" || l.Event != "grant" && (l.Reason == "" || l.State == "") {
				c.Errorf("%s: the audit line lacks tenant, node, state or reason: %s", name, s.Text())
			}
			old, open := running[l.Lease]
			delete(running, l.Lease)
			switch {
			case l.Event != "grant" && !open:
				c.Errorf("%s: a lease ends that was not granted: %s", name, s.Text())
			case l.Event != "grant":
				b.add(all, name, old, l.Time)
			case open: // its executor was killed before it ended
				b.addKilled(c, all, name, old)
				fallthrough
			default:
				running[l.Lease] = l
			}
		}
		for _, l := range running {
			b.addKilled(c, all, name, l)
		}
	}
	return all
}

func expectedOf(all map[string]*expected, tenant string) *expected {
	if all[tenant] == nil {
		all[tenant] = &expected{}
	}
	all[tenant].leases++
	return all[tenant]
}

// add adds a lease whose executor was alive at its end.
func (b *executorEvents) add(all map[string]*expected, executor string, l auditLine, end time.Time) {
	d := expectedOf(all, l.Tenant)
	took := end.Sub(l.Time) * time.Duration(l.Workers)
	d.low += took
	d.high += took + time.Duration(l.Workers)*(reapedWithin+b.stoppedNear(executor, l.Time)+b.stoppedNear(executor, end))
}

// addKilled adds a lease that ended when its executor was killed.
func (b *executorEvents) addKilled(c *chaos, all map[string]*expected, executor string, l auditLine) {
	c.Helper()
	d := expectedOf(all, l.Tenant)
	i := slices.IndexFunc(b.deaths[executor], func(d death) bool { return d.to.After(l.Time) })
	if i < 0 {
		c.Errorf("%s: the lease %s of %q, granted at %v, has no end", executor, l.Lease, l.Tenant, l.Time)
		return
	}
	end := b.deaths[executor][i]
	d.killed++
	workers := time.Duration(l.Workers)
	d.high += workers * (end.to.Sub(l.Time) + auditSlack + b.stoppedNear(executor, l.Time))
	if end.journal {
		d.damaged++ // the charges of this lease may be in the damaged record
		return
	}
	d.low += workers * max(0, end.from.Sub(l.Time)-chargeInterval-auditSlack-b.stoppedNear(executor, end.from))
}

// stoppedNear returns how long an executor was stopped around a time. An audit line and its charge may be that far apart.
func (b *executorEvents) stoppedNear(executor string, t time.Time) (d time.Duration) {
	for _, s := range b.stops[executor] {
		if t.After(s.from.Add(-auditSlack)) && t.Before(s.to.Add(chargeInterval)) {
			d += s.to.Sub(s.from)
		}
	}
	return d
}

// billed is a tenant's bill.
type billed struct {
	cores time.Duration
	calls uint64
}

// bills asks the manager.
func (c *chaos) bills() (map[string]billed, error) {
	out, err := c.rfaas("bill", "--json", "--timeout", "5s")
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	var list []struct {
		Tenant string `json:"tenant"`
		Lines  []struct{ Item, Units string }
	}
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	all := map[string]billed{}
	for _, t := range list {
		var b billed
		for _, l := range t.Lines {
			n, err := strconv.ParseUint(l.Units, 10, 64)
			if err != nil {
				return nil, err
			}
			switch l.Item {
			case "core-hour":
				b.cores = time.Duration(n) * time.Microsecond
			case "million-calls":
				b.calls = n
			}
		}
		all[t.Tenant] = b
	}
	return all, nil
}

// compare checks the bills when all executors have ended: each tenant's core time agrees with the audit lines, and the tenant whose
// executor was never killed is billed exactly the calls that it made.
func (b *executorEvents) compare(c *chaos) {
	c.Helper()
	want := b.expectedCharges(c)
	var text []string
	c.noticed("bills", "the bills agree with the audit lines", func() bool {
		text = nil
		others := 0
		bills, err := c.bills()
		c.lastly = fmt.Sprint(bills, err)
		good := err == nil && len(bills) == len(want)
		for tenant, d := range want {
			got := bills[tenant]
			ok := got.cores >= d.low && got.cores <= d.high && (tenant != crowdTenant || got.calls == b.calls)
			good = good && ok
			if strings.HasPrefix(tenant, "executor-disk") {
				if others++; !ok {
					text = append(text, fmt.Sprintf("tenant %s: billed %v, by the audit lines %v to %v", tenant, got.cores, d.low, d.high))
				}
				continue
			}
			text = append(text, fmt.Sprintf("tenant %s: %d leases, billed %.1f s of core time and %d calls; by the audit lines %.1f to %.1f s. "+
				"%d leases ended with a killed executor, each may lack %v; of %d the journal was damaged too.", tenant, d.leases, got.cores.Seconds(),
				got.calls, d.low.Seconds(), d.high.Seconds(), d.killed, chargeInterval, d.damaged))
		}
		text = append(text, fmt.Sprintf("%d further tenants with a lease each: as the audit lines say", others))
		slices.Sort(text)
		c.lastly += "\n" + strings.Join(text, "\n") + fmt.Sprintf("\n%s made %d calls", crowdTenant, b.calls)
		return good
	})
	b.result = strings.Join(text, "\n       ")
}

const crowdTenant = "crowd"

// crowd kills the resource manager several times while a client has many leases. Every lease survives, and every call is billed.
func (c *chaos) crowd() {
	c.Helper()
	k := c.kind(underLeases)
	d := c.newAuditedExecutor("executor-crowd", "--share-cores", fmt.Sprint((*chaosLeases+1)/2), "--max-bulk", "1MiB")
	s, err := client.Connect(c.t.Context(), client.Options{Executor: d.address, SecretFile: c.secret, Provider: provider(), Tenant: crowdTenant})
	if err != nil {
		c.Fatal(err)
	}
	leases := make([]*client.Lease, *chaosLeases)
	functions := make([]*client.Function, len(leases))
	for i := range leases {
		leases[i] = lease(c.t, s, client.LeaseOptions{Memory: 16 << 20, Bulk: -1, WaitMode: client.Warm})
		functions[i] = function(c.t, leases[i], "echo")
	}
	callAll := func() {
		c.Helper()
		out := make([]byte, 8)
		for i, f := range functions {
			began := time.Now()
			in := fmt.Sprintf("%08d", c.events.calls)
			n, err := f.Invoke(c.t.Context(), []byte(in), out)
			c.longCall = max(c.longCall, time.Since(began))
			if err != nil || string(out[:n]) != in {
				c.Fatalf("lease %d of %d: %q, %v", i, len(leases), out[:n], err)
			}
			c.events.calls++
			c.right++
		}
	}
	callAll()
	for range *chaosRestarts {
		began := time.Now()
		k.count++
		p := c.manager.current()
		p.signal(unix.SIGKILL)
		callAll()
		<-p.done
		c.eventually(recoverBound, "the manager knows all executors again", func() bool {
			callAll()
			list, err := c.world.executors()
			alive, leased := 0, false
			for _, e := range list {
				if e.State != "silent" {
					alive++
				}
				leased = leased || e.Address == d.address && e.FreeCores < e.Cores
			}
			c.lastly = fmt.Sprintf("%+v, %v", list, err)
			return err == nil && alive == len(c.executors)+1 && leased
		})
		k.took(time.Since(began))
	}
	for _, l := range leases {
		if err := l.Release(c.t.Context()); err != nil {
			c.Error(err)
		}
	}
	if err := s.Close(); err != nil {
		c.Error(err)
	}
	c.noteGroups(d)
	d.stop()
}
