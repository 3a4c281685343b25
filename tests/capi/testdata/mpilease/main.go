// Test of mpilease: leases for all ranks at once. Needs a resource manager with executors that lend as many cores as there are ranks.
// The argument is the path of build/functions/echo.so. Rank 0 prints which executor each rank was given.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/mpi"
	"github.com/rfaas-go/rfaas/mpi/mpilease"
)

func must(err error) {
	if err != nil {
		log.Print(err)
		mpi.World().Abort(1)
	}
}

func check(ok bool, what string, args ...any) {
	if !ok {
		must(fmt.Errorf(what, args...))
	}
}

func main() {
	must(mpi.Init())
	world := mpi.World()
	rank, err := world.Rank()
	must(err)
	ranks, err := world.Size()
	must(err)
	ctx := context.Background()
	for _, failover := range []bool{false, true} {
		o := client.LeaseOptions{Library: os.Args[1], Failover: failover}
		var s *client.Session
		var l *client.Lease
		// What was released a moment ago may not be on the board yet.
		for end := time.Now().Add(20 * time.Second); ; {
			over := []int{0}
			if time.Now().After(end) {
				over[0] = 1
			}
			must(mpi.Bcast(world, 0, over))
			if s, l, err = mpilease.Open(ctx, world, client.Options{}, o); !errors.Is(err, client.ErrBusy) || over[0] != 0 {
				break
			}
		}
		must(err)
		echo, err := l.Function("echo")
		must(err)
		in, out := make([]byte, 8), make([]byte, 8)
		for i := range 100 {
			binary.LittleEndian.PutUint64(in, uint64(rank*1000+i))
			n, err := echo.Invoke(ctx, in, out)
			check(err == nil && n == 8 && bytes.Equal(in, out), "call %d: %d, %v", i, n, err)
		}
		mine, all := make([]byte, 256), make([]byte, 256*ranks)
		copy(mine, l.Executor())
		must(mpi.Gather(world, 0, all, mine))
		for i := 0; i < ranks && rank == 0; i++ {
			fmt.Printf("rank %d on %s\n", i, bytes.TrimRight(all[256*i:256*(i+1)], "\x00"))
		}
		// There is no room for as many again: all ranks learn it, and nothing is taken.
		t, m, err := mpilease.Open(ctx, world, client.Options{}, o)
		check(errors.Is(err, client.ErrBusy) && t == nil && m == nil, "a second lease for each rank: %v", err)
		must(world.Barrier())
		must(s.Close())
	}
	_, _, err = mpilease.Open(ctx, world, client.Options{}, client.LeaseOptions{Library: os.Args[1], Workers: -1})
	check(errors.Is(err, client.ErrInvalid), "%v", err)
	must(mpi.Finalize())
}
