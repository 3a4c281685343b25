// Package beat makes periodic work of many goroutines happen at the same moments. A process with a thousand independent tickers wakes a thousand times
// in each period, and each time the kernel switches to it and back. If all of them fire together, it wakes once.
package beat

import "time"

var start = time.Now()

// Beat fires at each multiple of its period, counted from the start of the process.
type Beat struct {
	C     <-chan time.Time
	every time.Duration
	timer *time.Timer
}

// New returns a beat of the period every, which must be positive.
func New(every time.Duration) *Beat {
	b := &Beat{every: every, timer: time.NewTimer(until(time.Since(start), every))}
	b.C = b.timer.C
	return b
}

// Next sets the timer for the next beat. It must be called after each receive from C. Beats that were missed are skipped.
func (b *Beat) Next() { b.timer.Reset(until(time.Since(start), b.every)) }

// Stop ends the beat.
func (b *Beat) Stop() { b.timer.Stop() }

// until returns the time from now to the next multiple.
func until(now, every time.Duration) time.Duration { return every - now%every }
