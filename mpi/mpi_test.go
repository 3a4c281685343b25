package mpi_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/mpi"
)

const asRank = "MPI_TEST_RANK" // set where this program is one of several ranks

// TestUnderMPI builds this package's tests for both MPIs and runs them as 2 ranks of each.
func TestUnderMPI(t *testing.T) {
	if os.Getenv(asRank) != "" {
		t.Skip("this is one of its ranks")
	}
	if testing.Short() {
		t.Skip("builds and runs programs")
	}
	for _, c := range []struct{ name, tags, says string }{{"openmpi", "", "Open MPI"}, {"mpich", "mpich", "MPICH"}} {
		t.Run(c.name, func(t *testing.T) {
			mpirun, err := exec.LookPath("mpirun." + c.name)
			if err != nil {
				t.Fatalf("mpirun.%s is missing: run make deps", c.name)
			}
			program := filepath.Join(t.TempDir(), "ranks.test")
			if out, err := exec.Command("go", "test", "-c", "-tags", c.tags, "-o", program, ".").CombinedOutput(); err != nil {
				t.Fatalf("go test -c: %v\n%s", err, out)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
			defer cancel()
			args := []string{"-n", "2", program, "-test.run", "^TestRanks$", "-test.v", "-test.timeout", "60s"}
			if c.name == "openmpi" {
				args = append([]string{"--bind-to", "none"}, args...)
			}
			cmd := exec.CommandContext(ctx, mpirun, args...)
			cmd.Env = append(os.Environ(), asRank+"=1", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
				"OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_mpi_yield_when_idle=1")
			out, err := cmd.CombinedOutput()
			if err != nil || strings.Count(string(out), "--- PASS: TestRanks (") != 2 || !strings.Contains(string(out), c.says) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// Before MPI has begun everything is an error, and nothing ends the program.
func TestNotBegun(t *testing.T) {
	if os.Getenv(asRank) != "" {
		t.Skip("MPI begins here")
	}
	w := mpi.World()
	_, rank := w.Rank()
	_, size := w.Size()
	_, dup := w.Dup()
	_, recv := mpi.Recv(w, []int{1}, 0, 0)
	_, isend := mpi.Isend(w, []int{1}, 0, 0)
	_, sum := mpi.NewComm([]int{0})
	_, _, anyErr := mpi.WaitAny()
	for i, err := range []error{rank, size, dup, recv, isend, sum, anyErr, w.Barrier(), mpi.Send(w, []int{1}, 0, 0), mpi.AllReduce(w, mpi.OpSum, []int{1}, nil),
		mpi.Finalize(), w.Abort(1), w.Free()} {
		var e *mpi.Error
		if !errors.As(err, &e) || !strings.Contains(err.Error(), "has not begun") {
			t.Errorf("%d: %v", i, err)
		}
	}
	if mpi.IsOn() || mpi.Wtime() != 0 {
		t.Error("MPI is on")
	}
}

type celsius float64

// TestRanks is run in two ranks by TestUnderMPI. Each step is collective: the ranks go through the same ones.
func TestRanks(t *testing.T) {
	if os.Getenv(asRank) == "" {
		t.Skip("needs mpirun; TestUnderMPI runs it")
	}
	if err := mpi.Init(); err != nil {
		t.Fatal(err)
	}
	if err := mpi.Init(); err == nil {
		t.Error("Init twice")
	}
	t.Log(mpi.Version(), "threads", mpi.Level())
	w := mpi.World()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%v", err)
			w.Abort(3) // the other rank must not wait for ever
		}
	}
	rank, err := w.Rank()
	must(err)
	size, err := w.Size()
	must(err)
	if size != 2 || mpi.Level() != mpi.ThreadMultiple || !mpi.IsOn() {
		t.Fatalf("%d ranks, threads %d", size, mpi.Level())
	}
	other := 1 - rank
	for _, step := range []struct {
		name string
		run  func(t *testing.T, w *mpi.Comm, rank, other int, must func(error))
	}{{"messages", messages}, {"nonblocking", nonblocking}, {"collective", collective}, {"communicators", communicators}, {"errors", badInput}, {"goroutines", goroutines}} {
		must(w.Barrier())
		t.Run(step.name, func(t *testing.T) { step.run(t, w, rank, other, must) })
	}
	if t.Failed() {
		w.Abort(4)
	}
	must(w.Barrier())
	must(mpi.Finalize())
	if err := w.Barrier(); err == nil || mpi.IsOn() {
		t.Error("MPI is on after Finalize")
	}
	if err := mpi.Init(); err == nil || !strings.Contains(err.Error(), "cannot begin again") {
		t.Errorf("Init after Finalize: %v", err)
	}
}

func equal[T comparable](t *testing.T, what string, got, want []T) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func exchange[T mpi.Number](t *testing.T, w *mpi.Comm, rank, other int, must func(error), vals ...T) {
	t.Helper()
	in := make([]T, len(vals)+3)
	var s mpi.Status
	var err error
	if rank == 0 {
		must(mpi.Send(w, vals, other, 7))
		s, err = mpi.Recv(w, in, other, 8)
	} else {
		s, err = mpi.Recv(w, in, mpi.AnySource, mpi.AnyTag)
		must(mpi.Send(w, vals, other, 8))
	}
	must(err)
	if s.Source != other || s.Tag != 7+other || s.Count != len(vals) {
		t.Errorf("%T: status %+v", vals, s)
	}
	equal(t, fmt.Sprintf("%T", vals), in, append(slices.Clone(vals), 0, 0, 0))
}

func messages(t *testing.T, w *mpi.Comm, rank, other int, must func(error)) {
	exchange[int8](t, w, rank, other, must, -128, 127)
	exchange[int16](t, w, rank, other, must, -1<<15, 5)
	exchange[int32](t, w, rank, other, must, -1<<31, 5)
	exchange[int64](t, w, rank, other, must, -1<<63, 5)
	exchange[int](t, w, rank, other, must, -1<<63, 5)
	exchange[byte](t, w, rank, other, must, 255, 1, 2)
	exchange[uint16](t, w, rank, other, must, 65535)
	exchange[uint32](t, w, rank, other, must, 1<<32-1)
	exchange[uint64](t, w, rank, other, must, 1<<64-1)
	exchange[uint](t, w, rank, other, must, 1<<64-1)
	exchange[float32](t, w, rank, other, must, 1.5, -0.25)
	exchange(t, w, rank, other, must, 1.5, -0.25, 1e300)
	exchange[complex64](t, w, rank, other, must, 1+2i)
	exchange(t, w, rank, other, must, 1+2i, 3-4i)
	exchange[celsius](t, w, rank, other, must, 36.6)
	exchange[float64](t, w, rank, other, must) // nothing
	big := make([]int, 200000)
	for i := range big {
		big[i] = i * (rank + 1)
	}
	in := make([]int, len(big))
	s, err := mpi.SendRecv(w, big, other, 1, in, other, 1)
	must(err)
	if s.Count != len(big) || in[199999] != 199999*(other+1) {
		t.Errorf("SendRecv: %+v, last %d", s, in[199999])
	}
	s, err = mpi.SendRecv(w, nil, other, 2, []int(nil), other, 2)
	must(err)
	if s.Count != 0 {
		t.Errorf("nothing: %+v", s)
	}
	// What comes is asked for before there is room for it.
	if rank == 0 {
		must(mpi.Send(w, []celsius{1, 2, 3, 4, 5}, 1, 11))
	} else {
		s, err := mpi.Probe[celsius](w, mpi.AnySource, 11)
		must(err)
		got := make([]celsius, s.Count)
		_, err = mpi.Recv(w, got, s.Source, s.Tag)
		must(err)
		equal(t, "probed", got, []celsius{1, 2, 3, 4, 5})
	}
	if s, err := mpi.Recv(w, in, mpi.ProcNull, 0); err != nil || s.Count != 0 || s.Source != mpi.ProcNull {
		t.Errorf("from nobody: %+v, %v", s, err)
	}
}

func nonblocking(t *testing.T, w *mpi.Comm, rank, other int, must func(error)) {
	const n = 20
	var requests []*mpi.Request
	in := make([][]float64, n)
	for i := range n {
		in[i] = make([]float64, i+2)
		r, err := mpi.Irecv(w, in[i], other, i)
		must(err)
		requests = append(requests, r)
	}
	for i := range n {
		vals := make([]float64, i) // only the request keeps it from the collector
		for k := range vals {
			vals[k] = float64(100*rank + k)
		}
		r, err := mpi.Isend(w, vals, other, i)
		must(err)
		requests = append(requests, r)
	}
	runtime.GC()
	seen := map[int]bool{}
	for range n {
		at, _, err := mpi.WaitAny(requests...)
		must(err)
		if seen[at] || at < 0 {
			t.Fatalf("WaitAny gives %d", at)
		}
		seen[at] = true
	}
	must(mpi.WaitAll(requests...))
	for i := range n {
		s, err := requests[i].Wait() // again
		must(err)
		if s.Count != i || s.Source != other || s.Tag != i || (i > 0 && in[i][i-1] != float64(100*other+i-1)) || in[i][i] != 0 {
			t.Errorf("%d: %+v %v", i, s, in[i])
		}
	}
	if at, _, err := mpi.WaitAny(requests...); at != -1 || err != nil {
		t.Errorf("WaitAny of nothing: %d, %v", at, err)
	}
	// Test sees the end without waiting for it.
	got := make([]int32, 4)
	r, err := mpi.Irecv(w, got, other, 99)
	must(err)
	if done, _, err := r.Test(); done || err != nil {
		t.Errorf("nothing was sent: %v, %v", done, err)
	}
	must(w.Barrier())
	must(mpi.Send(w, []int32{5, 6}, other, 99))
	for end := time.Now().Add(20 * time.Second); ; {
		done, s, err := r.Test()
		must(err)
		if done {
			if s.Count != 2 || got[1] != 6 {
				t.Errorf("Test: %+v %v", s, got)
			}
			break
		}
		if time.Now().After(end) {
			t.Fatal("the message does not come")
		}
		runtime.Gosched()
	}
	// Collectives.
	b, err := w.Ibarrier()
	must(err)
	v := []int{rank + 10, 3}
	bc, err := mpi.Ibcast(w, 1, v)
	must(err)
	sum := make([]float64, 3)
	ar, err := mpi.IallReduce(w, mpi.OpSum, sum, []float64{1, float64(rank), 2})
	must(err)
	must(mpi.WaitAll(b, bc, ar))
	equal(t, "Ibcast", v, []int{11, 3})
	equal(t, "IallReduce", sum, []float64{2, 1, 4})
	var none *mpi.Request
	if _, err := none.Wait(); err == nil {
		t.Error("waiting for nil")
	}
}

func collective(t *testing.T, w *mpi.Comm, rank, other int, must func(error)) {
	vals := []float64{float64(rank), 2}
	must(mpi.Bcast(w, 0, vals))
	equal(t, "Bcast", vals, []float64{0, 2})
	must(mpi.Bcast(w, 0, []int(nil)))
	orig := []int{rank + 1, 6, -rank}
	dest := make([]int, 3)
	for _, c := range []struct {
		op   mpi.Op
		want []int
	}{
		{mpi.OpSum, []int{3, 12, -1}}, {mpi.OpMax, []int{2, 6, 0}}, {mpi.OpMin, []int{1, 6, -1}}, {mpi.OpProd, []int{2, 36, 0}},
		{mpi.OpLAND, []int{1, 1, 0}}, {mpi.OpLOR, []int{1, 1, 1}}, {mpi.OpBAND, []int{0, 6, 0}}, {mpi.OpBOR, []int{3, 6, -1}}, {mpi.OpBXOR, []int{3, 0, -1}},
	} {
		must(mpi.AllReduce(w, c.op, dest, orig))
		equal(t, fmt.Sprint("AllReduce ", c.op), dest, c.want)
	}
	copy(dest, orig)
	must(mpi.AllReduce(w, mpi.OpSum, dest, nil)) // in place
	equal(t, "in place", dest, []int{3, 12, -1})
	must(mpi.AllReduce(w, mpi.OpSum, []int{}, []int{}))
	must(mpi.AllReduce(w, mpi.OpSum, []int(nil), nil))
	var at1 []int
	if rank == 1 {
		at1 = make([]int, 3)
	}
	must(mpi.Reduce(w, 1, mpi.OpSum, at1, orig))
	if rank == 1 {
		equal(t, "Reduce", at1, []int{3, 12, -1})
	}
	var all []int
	if rank == 0 {
		all = make([]int, 6)
	}
	must(mpi.Gather(w, 0, all, orig))
	if rank == 0 {
		equal(t, "Gather", all, []int{1, 6, 0, 2, 6, -1})
	}
	every := make([]int, 6)
	must(mpi.AllGather(w, every, orig))
	equal(t, "AllGather", every, []int{1, 6, 0, 2, 6, -1})
	must(mpi.AllGather(w, []int(nil), nil))
	part := make([]celsius, 2)
	var whole []celsius
	if rank == 1 {
		whole = []celsius{1, 2, 3, 4}
	}
	must(mpi.Scatter(w, 1, part, whole))
	equal(t, "Scatter", part, []celsius{celsius(1 + 2*rank), celsius(2 + 2*rank)})
}

func communicators(t *testing.T, w *mpi.Comm, rank, other int, must func(error)) {
	d, err := w.Dup()
	must(err)
	must(d.Barrier())
	must(d.Free())
	if err := d.Free(); err == nil || !strings.Contains(err.Error(), "freed") {
		t.Errorf("freed twice: %v", err)
	}
	if _, err := d.Rank(); err == nil {
		t.Error("the rank in a freed communicator")
	}
	if w.Free() == nil || mpi.Self().Free() == nil {
		t.Error("World or Self was freed")
	}
	if n, err := mpi.Self().Size(); n != 1 || err != nil {
		t.Errorf("Self has %d ranks, %v", n, err)
	}
	s, err := w.Split(0, -rank) // backwards
	must(err)
	if r, err := s.Rank(); r != other || err != nil {
		t.Errorf("split: rank %d, %v", r, err)
	}
	must(s.Free())
	if rank == 0 {
		s, err = w.Split(mpi.Undefined, 0)
	} else {
		s, err = w.Split(5, 0)
	}
	must(err)
	if (s == nil) != (rank == 0) {
		t.Errorf("split without color: %v", s)
	}
	if s != nil {
		must(s.Free())
	}
	c, err := mpi.NewComm([]int{1})
	must(err)
	if (c == nil) != (rank == 0) {
		t.Errorf("NewComm: %v", c)
	}
	if c != nil {
		must(c.Barrier())
		must(c.Free())
	}
	c, err = mpi.NewComm(nil)
	must(err)
	if n, err := c.Size(); n != 2 || err != nil {
		t.Errorf("NewComm of all has %d ranks, %v", n, err)
	}
	// Errors of what was made are returned, too.
	if err := mpi.Send(c, []int{1}, 17, 0); err == nil {
		t.Error("sent to rank 17")
	}
	must(c.Free())
}

func badInput(t *testing.T, w *mpi.Comm, rank, other int, must func(error)) {
	// Found by this package, on each rank before anything is sent.
	var none *mpi.Comm
	_, negative := mpi.NewComm([]int{-1})
	_, twice := mpi.NewComm([]int{1, 1})
	_, color := w.Split(-3, 0)
	for word, err := range map[string]error{
		"communicator is nil":                none.Barrier(),
		"rank -1, want 0..1":                 negative,
		"rank 1 is named twice":              twice,
		"color -3":                           color,
		"root 2, want 0..1":                  mpi.Bcast(w, 2, []int{1}),
		"root -1":                            mpi.Gather(w, -1, nil, []int{1}),
		"dest has 2 elements, orig 3":        mpi.AllReduce(w, mpi.OpSum, make([]int, 2), make([]int, 3)),
		"operation 77":                       mpi.AllReduce(w, mpi.Op(77), make([]int, 2), nil),
		"operation -1":                       mpi.Reduce(w, 0, mpi.Op(-1), make([]int, 2), make([]int, 2)),
		"dest has 3 elements, want 2 for ea": mpi.AllGather(w, make([]int, 3), make([]int, 2)),
	} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v, want %q", err, word)
		}
	}
	// Found by MPI, and returned.
	var e *mpi.Error
	for _, err := range []error{mpi.Send(w, []int{1}, 2, 0), mpi.Send(w, []int{1}, -7, 0), mpi.Send(w, []int{1}, other, -5)} {
		if !errors.As(err, &e) || e.Code == 0 || e.Class == 0 || e.Text == "" {
			t.Errorf("%#v", err)
		}
	}
	if _, err := mpi.Irecv(w, []int{1}, 2, 0); !errors.As(err, &e) {
		t.Errorf("Irecv from rank 2: %v", err)
	}
	// A message that is too long is an error and not a crash.
	if rank == 0 {
		must(mpi.Send(w, []int{1, 2, 3}, 1, 5))
		must(mpi.Send(w, []int{1, 2, 3}, 1, 6))
	} else {
		guarded := []int{0, 0, 77}
		if _, err := mpi.Recv(w, guarded[:2], 0, 5); !errors.As(err, &e) || guarded[2] != 77 {
			t.Errorf("truncated: %v, %v", err, guarded)
		}
		r, err := mpi.Irecv(w, guarded[:2], 0, 6)
		must(err)
		if _, err := r.Wait(); !errors.As(err, &e) || guarded[2] != 77 {
			t.Errorf("truncated: %v, %v", err, guarded)
		}
	}
}

// Many goroutines call at once, each with a tag of its own.
func goroutines(t *testing.T, w *mpi.Comm, rank, other int, must func(error)) {
	const n, rounds = 8, 50
	failed := make(chan error, n)
	for g := range n {
		go func() {
			failed <- func() error {
				in := make([]int, 4)
				for i := range rounds {
					s, err := mpi.SendRecv(w, []int{rank, g, i}, other, 1000+g, in, other, 1000+g)
					if err != nil {
						return err
					}
					if s.Count != 3 || in[0] != other || in[1] != g || in[2] != i {
						return fmt.Errorf("goroutine %d, round %d: %+v %v", g, i, s, in)
					}
				}
				return nil
			}()
		}()
	}
	for range n {
		must(<-failed)
	}
}
