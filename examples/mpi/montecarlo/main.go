// Command montecarlo estimates pi on MPI ranks and leased cores, in Go. Rank 0 distributes chunks of random points. Each rank and
// the workers of its lease count its chunks, and a reduction adds the sums. Every count is compared with the same points counted
// by the rank alone.
//
// The calls are idempotent, so the program survives the death of executors: their leases move to other executors, or calls run in
// the ranks themselves while there is no other executor.
//
//	mpirun -n 2 build/examples/montecarlo -points 4000000
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/mpi"
	"github.com/rfaas-go/rfaas/mpi/mpilease"
)

const chunk = 20000 // points

// circle is examples/functions/montecarlo.c in Go.
func circle(seed, n uint64) (hits uint64) {
	for range n {
		seed += 0x9e3779b97f4a7c15
		z := seed
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		z ^= z >> 31
		if x, y := z>>33, z&0x7fffffff; x*x+y*y < 1<<62 {
			hits++
		}
	}
	return hits
}

func main() {
	points := flag.Uint64("points", 4000000, "total number of random points")
	workers := flag.Int("workers", 1, "workers of each rank")
	mourn := flag.Bool("mourn", false, "after a tenth, print the executor on which rank 0 calls, and go on when an executor is lost")
	library := flag.String("library", "", "path of montecarlo.so (default: where make build puts it)")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "montecarlo: unexpected argument %q (-help lists the flags)\n", flag.Arg(0))
		os.Exit(2)
	}
	if err := mpi.Init(); err != nil {
		fmt.Fprintln(os.Stderr, "montecarlo:", err)
		os.Exit(1)
	}
	if err := run(*points, *workers, *library, *mourn); err != nil {
		fmt.Fprintln(os.Stderr, "montecarlo:", err)
		mpi.World().Abort(1) // a rank that fails must not leave the others waiting
	}
	if err := mpi.Finalize(); err != nil {
		fmt.Fprintln(os.Stderr, "montecarlo:", err)
		os.Exit(1)
	}
}

func run(points uint64, workers int, library string, mourn bool) error {
	world := mpi.World()
	rank, err := world.Rank()
	if err != nil {
		return err
	}
	ranks, err := world.Size()
	if err != nil {
		return err
	}
	// Rank 0 chooses the number of points, and distributes the seeds.
	total := []uint64{points / chunk}
	if err := mpi.Bcast(world, 0, total); err != nil {
		return err
	}
	share := int(total[0]) / ranks
	if share < 1 {
		return fmt.Errorf("%d points are less than a chunk of %d for each of %d ranks", points, chunk, ranks)
	}
	var all []uint64
	if rank == 0 {
		all = make([]uint64, share*ranks)
		for i := range all {
			all[i] = uint64(i) << 32
		}
	}
	seeds := make([]uint64, share)
	if err := mpi.Scatter(world, 0, seeds, all); err != nil {
		return err
	}
	start := time.Now()
	alone := uint64(0)
	for _, seed := range seeds {
		alone += circle(seed, chunk)
	}
	before := time.Since(start)
	if err := world.Barrier(); err != nil {
		return err
	}
	c, err := count(seeds, workers, library, mourn && rank == 0)
	if err != nil {
		return err
	}
	wrong := uint64(0)
	if c.hits != alone {
		wrong = 1
	}
	sums := make([]uint64, 6)
	mine := []uint64{c.hits, c.remote, wrong, c.Repeated, c.Moved, c.Local}
	if err := mpi.Reduce(world, 0, mpi.OpSum, sums, mine); err != nil {
		return err
	}
	slowest := make([]float64, 2)
	if err := mpi.AllReduce(world, mpi.OpMax, slowest, []float64{before.Seconds(), c.took.Seconds()}); err != nil {
		return err
	}
	if rank == 0 {
		n := float64(share * ranks * chunk)
		pi := 4 * float64(sums[0]) / n
		fmt.Printf("montecarlo: pi is %.5f by %.0f points on %d ranks, %d of %d chunks remotely, %d counts wrong\n", pi, n, ranks, sums[1], share*ranks, sums[2])
		fmt.Printf("  alone %.2f ms, with workers %.2f ms: speed-up %.2f\n", slowest[0]*1e3, slowest[1]*1e3, slowest[0]/slowest[1])
		fmt.Printf("  leases that moved %d, calls repeated %d, calls in a rank without another executor %d\n", sums[4], sums[3], sums[5])
		if mourn && sums[4]+sums[5] == 0 {
			return errors.New("-mourn: no executor was lost")
		}
		if math.Abs(pi-math.Pi) > 10/math.Sqrt(n) {
			return fmt.Errorf("pi is not %v", pi)
		}
	}
	if wrong > 0 {
		return fmt.Errorf("rank %d counts %d points with its workers and %d alone", rank, c.hits, alone)
	}
	return nil
}

// counted has the figures of a rank.
type counted struct {
	hits, remote uint64
	took         time.Duration
	client.LeaseStatistics
}

// callUntilLost counts the points of one seed again and again, until the lease's executor is lost. The counts are not used.
func callUntilLost(ctx context.Context, lease *client.Lease, f *client.Function, seed uint64) error {
	out := make([]uint64, 1)
	for s := lease.Statistics(); s.Moved+s.Local == 0; s = lease.Statistics() {
		if _, err := client.Invoke(ctx, f, []uint64{seed, chunk}, out); err != nil {
			return err
		}
	}
	return nil
}

// count counts the points of all seeds. Each worker and the rank itself take the next chunk when they are ready.
func count(seeds []uint64, workers int, library string, tell bool) (c counted, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if library == "" {
		program, err := os.Executable()
		if err != nil {
			return c, err
		}
		library = filepath.Join(filepath.Dir(program), "../functions/montecarlo.so")
	}
	session, lease, err := mpilease.Open(ctx, mpi.World(), client.Options{},
		client.LeaseOptions{Library: library, Workers: workers, Failover: true, Local: true})
	if err != nil {
		return c, err
	}
	defer session.Close()
	f, err := lease.Function("circle")
	if err != nil {
		return c, err
	}
	var next, sum, there atomic.Uint64
	var wg sync.WaitGroup
	failed := make(chan error, lease.Workers())
	start := time.Now()
	// Each worker gets one chunk in any case, however slowly it starts.
	next.Store(uint64(min(lease.Workers(), len(seeds))))
	calls := client.Idempotent(ctx, 3)
	for w := range min(lease.Workers(), len(seeds)) {
		wg.Go(func() {
			out := make([]uint64, 1)
			for i := uint64(w); i < uint64(len(seeds)); i = next.Add(1) - 1 {
				if _, err := client.Invoke(calls, f, []uint64{seeds[i], chunk}, out); err != nil {
					failed <- err
					return
				}
				sum.Add(out[0])
				there.Add(1)
			}
		})
	}
	var lost error
	for i := next.Add(1) - 1; i < uint64(len(seeds)); i = next.Add(1) - 1 {
		if tell && i >= uint64(len(seeds))/10 {
			fmt.Printf("montecarlo: rank 0 calls on %s\n", lease.Executor())
			tell = false
			if lost = callUntilLost(calls, lease, f, seeds[i]); lost != nil {
				break
			}
		}
		sum.Add(circle(seeds[i], chunk))
	}
	wg.Wait()
	c = counted{hits: sum.Load(), took: time.Since(start), LeaseStatistics: lease.Statistics()}
	c.remote = there.Load() - min(c.Local, there.Load())
	select {
	case err = <-failed:
	default:
		err = errors.Join(lost, lease.Release(ctx))
	}
	return c, err
}
