package executor

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/rfaas-go/rfaas/lease"
)

// An executor with the setting yield-after lends cores that other programs of the node may use. Its workers have idle priority, so the
// kernel gives a CPU to any other program at once. The executor notices that from the time that the CPU spends on programs of normal
// priority, withholds the core, and ends its leases.

const (
	yieldSteps  = 5   // measurements in yield-after
	takenShare  = 0.5 // of a CPU's time that other programs use: the core is theirs
	unusedShare = 0.2 // below this share the core is lent again
)

// use is the time that a CPU has spent since the node started, in ticks.
type use struct{ others, all uint64 }

// readUse returns the use of each CPU from /proc/stat.
func readUse() (map[int]use, error) {
	f, err := os.Open("/proc/stat")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseUse(f)
}

// parseUse reads lines like "cpu3 user nice system idle iowait irq softirq steal guest guest_nice". Workers count as "nice", because their
// nice value is 19. "user" is the time of other programs. System time may belong to either, so it is not counted.
func parseUse(r io.Reader) (map[int]use, error) {
	all := map[int]use{}
	for lines := bufio.NewScanner(r); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) == 0 {
			break
		}
		name, isCPU := strings.CutPrefix(fields[0], "cpu")
		if !isCPU {
			break // the CPUs come first
		}
		if name == "" {
			continue // the sum
		}
		cpu, err := strconv.Atoi(name)
		if err != nil || len(fields) < 9 {
			return nil, fmt.Errorf("/proc/stat: unexpected line %.80q", lines.Text())
		}
		var u use
		for i, text := range fields[1:9] { // guest time is part of user time
			n, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				return nil, fmt.Errorf("/proc/stat: unexpected line %.80q", lines.Text())
			}
			u.all += n
			if i == 0 {
				u.others = n
			}
		}
		all[cpu] = u
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("/proc/stat: no CPU found")
	}
	return all, nil
}

// yielding decides which cores belong to other programs.
type yielding struct {
	cores  [][]int       // logical CPUs of each core
	past   []map[int]use // the latest measurements, oldest first
	taken  []bool        // by core
	unused []int         // by core: measurements in a row with little use by others
}

// add takes a measurement and returns the cores whose state has changed.
func (y *yielding) add(now map[int]use) (changed []int) {
	y.past = append(y.past, now)
	if len(y.past) <= yieldSteps {
		return nil
	}
	y.past = y.past[len(y.past)-yieldSteps-1:]
	for i, cpus := range y.cores {
		share := 0.0
		for _, cpu := range cpus {
			before, after := y.past[0][cpu], now[cpu]
			if after.all > before.all && after.others >= before.others {
				share = max(share, float64(after.others-before.others)/float64(after.all-before.all))
			}
		}
		if y.unused[i]++; share >= unusedShare {
			y.unused[i] = 0
		}
		if taken := share >= takenShare || y.taken[i] && y.unused[i] < 2*yieldSteps; taken != y.taken[i] {
			y.taken[i] = taken
			changed = append(changed, i)
		}
	}
	return changed
}

func newYielding(list []lease.Core) *yielding {
	y := &yielding{taken: make([]bool, len(list)), unused: make([]int, len(list))}
	for _, c := range list {
		y.cores = append(y.cores, c.CPUs)
	}
	return y
}

// yield measures until ctx ends, withholds cores that other programs use, and ends their leases.
func (e *Executor) yield(ctx context.Context, after time.Duration, measure func() (map[int]use, error)) {
	y := newYielding(e.cfg.Cores)
	tick := time.NewTicker(after / yieldSteps)
	defer tick.Stop()
	said := ""
	for {
		now, err := measure()
		if err != nil {
			if err.Error() != said {
				said = err.Error()
				e.log.Error("cannot measure the use of CPUs by other programs; no lease ends because of them", "error", err)
			}
		} else {
			changed := y.add(now)
			for _, i := range changed {
				e.log.Info("use of a core by other programs", "cpus", y.cores[i], "lent", !y.taken[i])
			}
			for i, taken := range y.taken {
				if taken || slices.Contains(changed, i) {
					e.withhold(y.cores[i], taken)
				}
			}
			if len(changed) > 0 {
				e.changed()
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// withhold withholds a core and ends its leases, or lends it again.
func (e *Executor) withhold(cpus []int, on bool) {
	ids, err := e.table.Withhold(cpus[0], on)
	if err != nil {
		e.log.Error("cannot withhold a core", "cpus", cpus, "error", err)
		return
	}
	if !on {
		return
	}
	reason := fmt.Sprintf("other programs of the node use CPU %d (yield-after %v)", cpus[0], e.cfg.Settings.YieldAfter)
	for _, id := range ids {
		leave := e.turns.enter()
		e.work.Go(func() {
			defer leave()
			e.giveUp(id, reason, e.metrics.yielded)
		})
	}
}

// giveUp ends a lease in whatever state it is, and counts it.
func (e *Executor) giveUp(id lease.ID, reason string, count prometheus.Counter) {
	if e.dropCached(id) || e.stopStart(context.Background(), id, reason) {
		return
	}
	if h, err := e.beginEnd(context.Background(), id, lease.Revoked, reason); err == nil {
		count.Inc()
		e.finishEnd(context.Background(), h, killed)
	}
}
