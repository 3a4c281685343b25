// Package scale predicts the load of a large cluster on the resource manager, from unit costs measured on this machine. README.md
// in this directory has the model. The same run checks the model at sizes that fit on this machine.
package scale

import (
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/internal/board"
)

// Units are measured costs in seconds.
type Units struct {
	Placement float64 // a decision, for the client
	LineWrite float64 // an executor's heartbeat, for the executor
	Message   float64 // a heartbeat by message, round trip
	Charge    float64 // all counters of a lease
	TellFixed float64 // announcing a change, without subscribers
	TellEach  float64 // more for each subscriber
}

// Cluster is the cluster to predict. The zero value is not useful.
type Cluster struct {
	Executors   int
	Clients     int     // subscribed processes
	CallersEach float64 // leases that a client takes in an hour
	Heartbeat   float64 // s
	ChargeEvery float64 // s, of each lease
	LeaseTime   float64 // s, how long one is held
	ChangesHour float64 // executors that come, go or drain in an hour, each
}

// Target is the cluster of the promise.
var Target = Cluster{Executors: 10_000, Clients: 1_000_000, CallersEach: 6, Heartbeat: 1, ChargeEvery: 1, LeaseTime: 60, ChangesHour: 0.5}

// Load is the cluster's load on the manager's node.
type Load struct {
	BoardBytes     float64 // lines, identities and index
	CellBytes      float64 // accounts of held leases
	Placements     float64 // a second
	PlacementBytes float64 // a second, read from the board
	LineWrites     float64 // a second
	Charges        float64 // fetch-and-adds a second
	Changes        float64 // a second
	TellSeconds    float64 // to announce one change to all, one manager
	TellShare      float64 // of one core of the manager, to announce changes as often as they happen
	Messages       float64 // share of one core if all heartbeats were messages
}

// identityBytes is an executor's memory on the board besides its line: identity record and share of the index.
const identityBytes = 1024

// Predict is the model: README.md explains each line.
func Predict(u Units, c Cluster) Load {
	leases := float64(c.Clients) * c.CallersEach / 3600
	held := leases * c.LeaseTime
	l := Load{
		BoardBytes:     float64(c.Executors) * (board.LineSize + identityBytes),
		CellBytes:      held * accounting.CellSize,
		Placements:     leases,
		PlacementBytes: leases * (board.GroupLines + 1) * board.LineSize,
		LineWrites:     float64(c.Executors) / c.Heartbeat,
		Charges:        held / c.ChargeEvery * accounting.NumCounters,
		Changes:        float64(c.Executors) * c.ChangesHour / 3600,
		TellSeconds:    u.TellFixed + u.TellEach*float64(c.Clients),
		Messages:       float64(c.Executors) / c.Heartbeat * u.Message,
	}
	// Changes that happen during an announcement are announced together afterwards, so rounds never overlap.
	rounds := l.Changes
	if l.TellSeconds > 0 {
		rounds = math.Min(rounds, 1/l.TellSeconds)
	}
	l.TellShare = rounds * l.TellSeconds
	return l
}

var toldTo = regexp.MustCompile(`^change told to (\d+) subscribers$`)

// told returns the measurements of notifications on shm: subscribers and seconds.
func told(results []*latency.Result) (n, s []float64) {
	for _, r := range results {
		if m := toldTo.FindStringSubmatch(r.Function); m != nil && r.Name == "control" && r.Provider == "shm" && r.Samples > 0 {
			k, _ := strconv.Atoi(m[1])
			n, s = append(n, float64(k)), append(s, float64(r.P50NS)/1e9)
		}
	}
	return n, s
}

// fit is the straight line of least squares through all but the largest.
func fit(x, y []float64) (fixed, each float64) {
	n := float64(len(x))
	var sx, sy, sxx, sxy float64
	for i := range x {
		sx, sy, sxx, sxy = sx+x[i], sy+y[i], sxx+x[i]*x[i], sxy+x[i]*y[i]
	}
	if d := n*sxx - sx*sx; d != 0 {
		each = (n*sxy - sx*sy) / d
	}
	return (sy - each*sx) / n, each
}

// UnitsFrom takes unit costs from results of `rfaas bench control` on shm; missing names the first one that has no result.
func UnitsFrom(results []*latency.Result) (u Units, missing string) {
	p50 := func(function string) float64 {
		for _, r := range slices.Backward(results) {
			if r.Name == "control" && r.Provider == "shm" && r.Function == function && r.Samples > 0 {
				return float64(r.P50NS) / 1e9
			}
		}
		if missing == "" {
			missing = "`" + function + "` of rfaas bench control"
		}
		return 0
	}
	u.Placement = p50("placement, 10000 executors")
	u.LineWrite = p50("heartbeat by write")
	u.Message = p50("heartbeat by message")
	u.Charge = p50(fmt.Sprintf("charge, %d counters", accounting.NumCounters))
	x, y := told(results)
	if len(x) < 2 && missing == "" {
		missing = "changes told to two numbers of subscribers"
	}
	if missing == "" {
		u.TellFixed, u.TellEach = fit(x, y)
		u.TellFixed, u.TellEach = math.Max(u.TellFixed, 0), math.Max(u.TellEach, 0)
	}
	return u, missing
}

// Check is a prediction and the measured value.
type Check struct {
	What                string
	Predicted, Measured float64 // s
}

// Checks predicts the largest of the measured sizes from the smaller ones, and the placement's cost from a board of ten.
func Checks(results []*latency.Result) []Check {
	var out []Check
	if x, y := told(results); len(x) >= 3 {
		largest := 0
		for i := range x {
			if x[i] > x[largest] {
				largest = i
			}
		}
		fixed, each := fit(slices.Delete(slices.Clone(x), largest, largest+1), slices.Delete(slices.Clone(y), largest, largest+1))
		out = append(out, Check{fmt.Sprintf("a change told to %.0f subscribers, from the smaller numbers", x[largest]), fixed + each*x[largest], y[largest]})
	}
	var small, large *latency.Result
	for _, r := range results {
		if r.Name == "control" && r.Provider == "shm" && r.Samples > 0 {
			switch r.Function {
			case "placement, 10 executors":
				small = r
			case "placement, 10000 executors":
				large = r
			}
		}
	}
	if small != nil && large != nil {
		out = append(out, Check{"a placement with 10,000 executors, as with 10", float64(small.P50NS) / 1e9, float64(large.P50NS) / 1e9})
	}
	return out
}

// WriteMarkdown writes units, predictions for Target and checks.
func WriteMarkdown(w io.Writer, u Units, results []*latency.Result) {
	l := Predict(u, Target)
	us := func(s float64) string { return strconv.FormatFloat(s*1e6, 'g', 3, 64) + " us" }
	g := func(v float64) string { return strconv.FormatFloat(v, 'g', 3, 64) }
	fmt.Fprintf(w, "%d executors with a heartbeat of %g s, %d client processes that each take %g leases an hour and hold them %g s, charged every %g s; every executor comes, goes or drains %g times an hour. benchmarks/scale/README.md has the model.\n\n",
		Target.Executors, Target.Heartbeat, Target.Clients, Target.CallersEach, Target.LeaseTime, Target.ChargeEvery, Target.ChangesHour)
	fmt.Fprintf(w, "Unit costs measured here, medians: placement %s, heartbeat by write %s, by message %s, charge of all counters %s, a change %s and %s more for each subscriber.\n\n",
		us(u.Placement), us(u.LineWrite), us(u.Message), us(u.Charge), us(u.TellFixed), us(u.TellEach))
	fmt.Fprint(w, "| load of the manager's node | |\n|---|---|\n")
	for _, row := range [][2]string{
		{"memory of the board", g(l.BoardBytes/(1<<20)) + " MiB"},
		{"memory of the accounts of held leases", g(l.CellBytes/(1<<20)) + " MiB"},
		{"placement decisions, one-sided, no processor", g(l.Placements) + "/s, " + g(l.PlacementBytes/1e6) + " MB/s"},
		{"heartbeats, one-sided, no processor", g(l.LineWrites) + "/s"},
		{"charges, one-sided, no processor", g(l.Charges) + " fetch-and-adds/s"},
		{"changes of executors", g(l.Changes) + "/s"},
		{"until every subscriber has one change, one manager", g(l.TellSeconds) + " s"},
		{"of one core, to tell all changes", g(100*l.TellShare) + " %"},
		{"of one core, if heartbeats were messages", g(100*l.Messages) + " %"},
	} {
		fmt.Fprintf(w, "| %s | %s |\n", row[0], row[1])
	}
	fmt.Fprint(w, "\n| check at sizes that run here | predicted | measured | measured over predicted |\n|---|---|---|---|\n")
	for _, c := range Checks(results) {
		fmt.Fprintf(w, "| %s | %s | %s | %s |\n", c.What, us(c.Predicted), us(c.Measured), g(c.Measured/c.Predicted))
	}
}
