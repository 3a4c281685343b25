package slurm

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestWantedBack(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	at := func(minutes int) time.Time { return now.Add(time.Duration(minutes) * time.Minute) }
	jobs := []Job{
		{Node: "n1", State: Running, End: at(60)},
		{Node: "n2", State: Running, End: at(60)},
		{Node: "n3", State: Running, End: at(60)},
		{Node: "n4", State: Running, End: at(60)},
		{Node: "n5", State: Pending, End: at(60)},
		{Node: "n6", State: Running}, // no limit is known
		{Node: "n7", State: Ending, End: at(60)},
	}
	plan := Plan{"n2": at(10), "n3": at(90), "n4": at(-1), "n5": at(10), "n6": at(10), "n9": at(10)}
	want := map[string]time.Time{"n1": at(60), "n2": at(10), "n3": at(60), "n4": at(60)}
	if got := wantedBack(now, jobs, plan); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// The controller sends a message only to executors whose end time differs from the plan, each about its own node. An executor that does not answer
// does not delay the others.
func TestPublish(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	var mu sync.Mutex
	told := map[string]time.Time{}
	p := Publish{
		Executors: func(context.Context) ([]Lent, error) {
			return []Lent{
				{"n1", "a1", now.Add(time.Hour)},
				{"n2.cluster", "a2", now.Add(time.Hour)},
				{"n3", "a3", now.Add(time.Hour + 20*time.Second)},
				{"n4", "a4", time.Time{}},
				{"n5", "a5", time.Time{}},
				{"n6", "a6", time.Time{}},
			}, nil
		},
		Tell: func(_ context.Context, address string, until time.Time) error {
			mu.Lock()
			defer mu.Unlock()
			told[address] = until
			if address == "a6" {
				return errors.New("no answer")
			}
			return nil
		},
	}
	until := map[string]time.Time{"n1": now.Add(10 * time.Minute), "n2": now.Add(2 * time.Hour), "n3": now.Add(time.Hour), "n4": now.Add(time.Hour), "n6": now}
	err := p.publish(t.Context(), until)
	if err == nil || !strings.Contains(err.Error(), "n6") || !strings.Contains(err.Error(), "no answer") {
		t.Errorf("an executor that does not answer: %v", err)
	}
	want := map[string]time.Time{"a1": until["n1"], "a2": until["n2"], "a4": until["n4"], "a6": now}
	if !maps.Equal(told, want) {
		t.Errorf("told %v, want %v", told, want)
	}
	p.Executors = func(context.Context) ([]Lent, error) { return nil, errors.New("no manager") }
	if err := p.publish(t.Context(), until); err == nil || !strings.Contains(err.Error(), "no manager") {
		t.Errorf("without a manager: %v", err)
	}
	if err := p.publish(t.Context(), nil); err != nil {
		t.Errorf("with nothing to say the manager is not asked: %v", err)
	}
}
