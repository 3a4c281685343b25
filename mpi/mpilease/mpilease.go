// Package mpilease opens leases for all ranks of an MPI communicator in one call, as rfaas_mpi.h does for C, C++ and Fortran.
package mpilease

import (
	"context"
	"errors"
	"fmt"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/api"
	"github.com/rfaas-go/rfaas/mpi"
)

// Bounds of what ranks send each other, in bytes.
const (
	textMost  = api.MPIErrorMax // text of an error
	placeMost = 256             // address of an executor
)

// Open opens a session and a lease on every rank of a communicator, or on none. Only rank 0 asks the resource manager where there is room,
// with its own options, and sends each rank the address of an executor. Ranks with neighbouring numbers share an executor. The other
// ranks open a session with their executor, unless the lease has Failover. If the executor of a rank has no room any more, the rank
// searches by itself.
//
// Open is collective: every rank calls it, with the same options. Each rank gets a lease of o.Workers workers, and closes its session,
// which releases the lease. Either all ranks return an error or none does. The class of the error is the same on every rank: that of the
// most serious error of any rank. ctx bounds the rank's own operations, and not its waits for other ranks.
func Open(ctx context.Context, comm *mpi.Comm, so client.Options, o client.LeaseOptions) (*client.Session, *client.Lease, error) {
	rank, err := comm.Rank()
	if err != nil {
		return nil, nil, err
	}
	ranks, err := comm.Size()
	if err != nil {
		return nil, nil, err
	}
	var session *client.Session
	var lease *client.Lease
	fail := func(err error) (*client.Session, *client.Lease, error) {
		if session != nil {
			_ = session.Close() // releases the lease; the first error is reported
		}
		return nil, nil, err
	}
	var places []client.Place
	if rank == 0 {
		if session, err = client.Connect(ctx, so); err == nil {
			places, err = session.Places(ctx, o, ranks)
		}
		if errors.Is(err, client.ErrBusy) && o.Local {
			places, err = nil, nil // each rank searches by itself
		}
		for _, p := range places {
			if len(p) > placeMost {
				err = fmt.Errorf("lease for a communicator: the address %q has %d bytes, want at most %d", p, len(p), placeMost)
			}
		}
	}
	if err = agree(comm, rank, err); err != nil {
		return fail(err)
	}
	at, err := scatter(comm, rank, ranks, places)
	if err != nil {
		return fail(err)
	}
	session, lease, err = take(ctx, session, so, o, at)
	if err = agree(comm, rank, err); err != nil {
		return fail(err)
	}
	return session, lease, nil
}

// take opens a rank's lease, and its session unless it has one. It tries the executor that rank 0 has chosen first.
func take(ctx context.Context, s *client.Session, so client.Options, o client.LeaseOptions, at client.Place) (*client.Session, *client.Lease, error) {
	only := so
	own := s == nil && !o.Failover && at != ""
	if own {
		only.Manager, only.Executor = "", string(at)
	}
	var err error
	if s == nil {
		s, err = client.Connect(ctx, only)
	}
	var l *client.Lease
	switch {
	case err != nil:
	case at == "":
		l, err = s.Lease(ctx, o)
	default:
		if l, err = s.LeaseAt(ctx, o, at); err == nil && l.Provider() == "local" {
			_ = l.Release(ctx)
			l, err = nil, client.ErrBusy // other executors may have room
		}
	}
	if at == "" || !errors.Is(err, client.ErrBusy) && !errors.Is(err, client.ErrConnection) {
		return s, l, err
	}
	if own {
		if s != nil {
			_ = s.Close()
		}
		if s, err = client.Connect(ctx, so); err != nil {
			return nil, nil, err
		}
	}
	l, err = s.Lease(ctx, o)
	return s, l, err
}

// agree returns nil if every rank passes nil, else an error of one of the ranks with the most serious status.
func agree(comm *mpi.Comm, rank int, err error) error {
	status := 0
	if err != nil {
		status = int(client.StatusFatal)
		var e *client.Error
		if errors.As(err, &e) {
			status = int(e.Status)
		}
	}
	worst := make([]int, 1)
	if err := mpi.AllReduce(comm, mpi.OpMin, worst, []int{status}); err != nil {
		return err
	}
	if worst[0] == 0 {
		return nil
	}
	ranks, err2 := comm.Size()
	if err2 != nil {
		return err2
	}
	first, mine := make([]int, 1), ranks
	if status == worst[0] {
		mine = rank
	}
	if err := mpi.AllReduce(comm, mpi.OpMin, first, []int{mine}); err != nil {
		return err
	}
	text := make([]byte, textMost)
	if rank == first[0] {
		copy(text, err.Error())
	}
	if err := mpi.Bcast(comm, first[0], text); err != nil {
		return err
	}
	if rank == first[0] {
		return err
	}
	return &client.Error{Status: client.Status(worst[0]), Text: fmt.Sprintf("rank %d: %s", first[0], cut(text))}
}

// scatter sends each rank the address of its executor.
func scatter(comm *mpi.Comm, rank, ranks int, places []client.Place) (client.Place, error) {
	var all []byte
	if rank == 0 {
		all = make([]byte, placeMost*ranks)
		for i, p := range places {
			copy(all[i*placeMost:], p)
		}
	}
	mine := make([]byte, placeMost)
	if err := mpi.Scatter(comm, 0, mine, all); err != nil {
		return "", err
	}
	return client.Place(cut(mine)), nil
}

// cut returns the text before the first NUL.
func cut(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
