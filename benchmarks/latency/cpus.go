package latency

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/topology"
)

// siblingsOf returns the allowed CPUs that are hardware threads of the core of cpu, as far as the kernel reports them.
func siblingsOf(cpu int, allowed []int) []int {
	cores, _ := topology.Cores("/", allowed)
	for _, core := range cores {
		if slices.Contains(core.CPUs, cpu) {
			return core.CPUs
		}
	}
	return []int{cpu}
}

// choosePair returns two of the allowed CPUs, of different cores if there are two. With more than four CPUs it avoids CPU 0,
// which serves most interrupts. A single CPU is returned twice.
func choosePair(allowed []int, siblings func(cpu int, allowed []int) []int) []int {
	if len(allowed) == 1 {
		return []int{allowed[0], allowed[0]}
	}
	candidates := slices.Clone(allowed)
	if len(candidates) > 4 && candidates[0] == 0 {
		candidates = candidates[1:]
	}
	first := candidates[0]
	same := siblings(first, allowed)
	for _, cpu := range candidates[1:] {
		if !slices.Contains(same, cpu) {
			return []int{first, cpu}
		}
	}
	return []int{first, candidates[1]}
}

// pin binds the calling thread to the client's CPU. It binds all other threads of this process to the CPUs that neither client
// nor peer uses, or to the client's if there are no others: threads of the Go runtime would otherwise interrupt the peer
// whenever they wake. New threads inherit that. undo removes the bindings.
func pin(client, peer int, allowed []int) (undo func(), err error) {
	var all, mine, others unix.CPUSet
	for _, cpu := range allowed {
		all.Set(cpu)
		if cpu != client && cpu != peer {
			others.Set(cpu)
		}
	}
	mine.Set(client)
	if others.Count() == 0 {
		others = mine
	}
	if err := setAffinity(&others); err != nil {
		return nil, fmt.Errorf("move the runtime's threads off CPU %d: %w", peer, err)
	}
	if err := unix.SchedSetaffinity(0, &mine); err != nil {
		return nil, fmt.Errorf("pin to CPU %d: %w", client, err)
	}
	return func() { _ = setAffinity(&all) }, nil
}

// setAffinity sets the affinity of every thread. A new thread inherits that of the thread which makes it, so the threads are listed until none is new.
func setAffinity(set *unix.CPUSet) error {
	for done := map[int]bool{}; ; {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return err
		}
		before := len(done)
		for _, t := range tasks {
			id, err := strconv.Atoi(t.Name())
			if err != nil || done[id] {
				continue
			}
			if err := unix.SchedSetaffinity(id, set); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
			done[id] = true
		}
		if len(done) == before {
			return nil
		}
	}
}
