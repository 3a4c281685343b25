package scale

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
)

func measured(us map[string]float64) []*latency.Result {
	var out []*latency.Result
	for name, v := range us {
		out = append(out, &latency.Result{Name: "control", Provider: "shm", Function: name, Samples: 1, P50NS: int64(v * 1e3)})
	}
	return out
}

func all() map[string]float64 {
	us := map[string]float64{"placement, 10 executors": 4, "placement, 10000 executors": 5, "heartbeat by write": 2, "heartbeat by message": 100, "charge, 8 counters": 3}
	for _, n := range []int{100, 300, 1000} {
		us[fmt.Sprintf("change told to %d subscribers", n)] = 50 + 0.5*float64(n)
	}
	return us
}

func close(a, b float64) bool { return math.Abs(a-b) <= 1e-6*math.Abs(b) }

func TestUnitsAndChecks(t *testing.T) {
	u, missing := UnitsFrom(measured(all()))
	if missing != "" || !close(u.Placement, 5e-6) || !close(u.TellFixed, 50e-6) || !close(u.TellEach, 0.5e-6) {
		t.Errorf("%+v, missing %q", u, missing)
	}
	checks := Checks(measured(all()))
	if len(checks) != 2 || !close(checks[0].Predicted, 550e-6) || !close(checks[0].Measured, 550e-6) || !close(checks[1].Predicted, 4e-6) {
		t.Errorf("%+v", checks)
	}
	// The check shows a cost that grows faster than the model predicts.
	worse := all()
	worse["change told to 1000 subscribers"] = 2000
	if c := Checks(measured(worse)); c[0].Measured < 3*c[0].Predicted {
		t.Errorf("%+v", c)
	}
	for name := range all() {
		few := all()
		delete(few, name)
		_, missing := UnitsFrom(measured(few))
		if needed := name != "placement, 10 executors" && !strings.HasPrefix(name, "change"); needed != strings.Contains(missing, name) {
			t.Errorf("without %s: %q is missing", name, missing)
		}
	}
}

func TestPredict(t *testing.T) {
	u := Units{TellFixed: 1e-4, TellEach: 1e-6, Message: 1e-4}
	l := Predict(u, Cluster{Executors: 100, Clients: 3600, CallersEach: 10, Heartbeat: 2, ChargeEvery: 1, LeaseTime: 6, ChangesHour: 36})
	for what, pair := range map[string][2]float64{
		"placements a second": {l.Placements, 10}, "line writes a second": {l.LineWrites, 50}, "charges a second": {l.Charges, 10 * 6 * 8},
		"changes a second": {l.Changes, 1}, "to tell one": {l.TellSeconds, 3.7e-3}, "share of telling": {l.TellShare, 3.7e-3},
		"messages": {l.Messages, 5e-3}, "cells": {l.CellBytes, 60 * 512}, "bytes of placement": {l.PlacementBytes, 10 * 9 * 64},
	} {
		if !close(pair[0], pair[1]) {
			t.Errorf("%s: %v, want %v", what, pair[0], pair[1])
		}
	}
	// More changes than rounds are announced together, so the share is at most one core.
	u.TellEach = 1
	if l := Predict(u, Target); !close(l.TellShare, 1) {
		t.Errorf("share of a core %v", l.TellShare)
	}
}

func TestMarkdown(t *testing.T) {
	u, _ := UnitsFrom(measured(all()))
	var b strings.Builder
	WriteMarkdown(&b, u, measured(all()))
	for _, want := range []string{"10000 executors", "1000000 client processes", "| a change told to 1000 subscribers, from the smaller numbers | 550 us | 550 us | 1 |"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}
