package slurm

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Lent is an executor as the resource manager knows it.
type Lent struct {
	Node    string // its host name
	Address string
	Until   time.Time // when it says that its node is wanted back; zero: not known
}

// Publish tells executors when their nodes are wanted back, as the scheduler's plan changes. Each executor publishes that time, and drains before it.
// Both fields are mandatory, and bound the time that they take.
type Publish struct {
	Executors func(ctx context.Context) ([]Lent, error)
	Tell      func(ctx context.Context, address string, until time.Time) error
}

const (
	// untilSlack is by how much a time may differ from the executor's before the executor is told. Plans move by seconds whenever they are made.
	untilSlack = 30 * time.Second
	// publishBound is how long the controller's other work waits for publish if executors do not answer.
	publishBound = 3 * time.Second
	publishers   = 16 // executors that are notified at the same time
)

// wantedBack returns when nodes with a running executor job are wanted back: at the job's end, or when the plan gives them to another job.
// It ignores planned starts in the past, because those jobs have not started.
func wantedBack(now time.Time, jobs []Job, plan Plan) map[string]time.Time {
	until := map[string]time.Time{}
	for _, j := range jobs {
		if j.State != Running || j.End.IsZero() {
			continue
		}
		until[j.Node] = j.End
		if t, planned := plan[j.Node]; planned && t.After(now) && t.Before(j.End) {
			until[j.Node] = t
		}
	}
	return until
}

// publish tells every executor that has another time. Its error names the executors that it could not reach.
func (p *Publish) publish(ctx context.Context, until map[string]time.Time) error {
	if len(until) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, publishBound)
	defer cancel()
	lent, err := p.Executors(ctx)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var failed []error
	slots := make(chan struct{}, publishers)
	for _, e := range lent {
		at, ours := until[e.Node]
		if !ours { // a host name with its domain
			short, _, _ := strings.Cut(e.Node, ".")
			at, ours = until[short]
		}
		if !ours || e.Until.Sub(at).Abs() < untilSlack {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := p.Tell(ctx, e.Address, at); err != nil {
				mu.Lock()
				failed = append(failed, fmt.Errorf("node %s: %w", e.Node, err))
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return errors.Join(failed...)
}
