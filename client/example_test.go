package client_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// cores starts an executor for an example and sets the environment so that the example finds it. It returns a function
// that stops the executor.
func cores() (stop func()) {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	secret := filepath.Join(dir, "secret")
	cmd := exec.Command(filepath.Join(root, "bin/executor"), "--listen", "127.0.0.1:0", "--secret-file", secret, "--cores", "2",
		"--providers", provider(), "--grace", "1s")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		log.Fatal(err)
	}
	lines := bufio.NewScanner(stderr)
	address := ""
	for address == "" && lines.Scan() {
		if _, rest, ok := strings.Cut(lines.Text(), "msg=ready address="); ok {
			address, _, _ = strings.Cut(rest, " ")
		}
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		for lines.Scan() {
		}
	}()
	env := map[string]string{"RFAAS_EXECUTOR": address, "RFAAS_MANAGER": "", "RFAAS_SECRET_FILE": secret, "RFAAS_PROVIDER": provider()}
	before := map[string]string{}
	for name, value := range env {
		before[name] = os.Getenv(name)
		os.Setenv(name, value)
	}
	return func() {
		for name, value := range before {
			os.Setenv(name, value)
		}
		cmd.Process.Signal(syscall.SIGTERM)
		<-read
		cmd.Wait()
		os.RemoveAll(dir)
	}
}

// montecarlo.so has the function circle: given {seed, n}, it returns how many of n random points lie in a circle.
const montecarlo = root + "/build/functions/montecarlo.so"

// A session, a lease of two workers, and calls with slices of numbers.
func Example() {
	defer cores()() // an executor for this example; programs find theirs by RFAAS_MANAGER
	ctx := context.Background()
	session, err := client.Connect(ctx, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	lease, err := session.Lease(ctx, client.LeaseOptions{Library: montecarlo, Workers: 2})
	if err != nil {
		log.Fatal(err)
	}
	circle, err := lease.Function("circle")
	if err != nil {
		log.Fatal(err)
	}
	hits := make([]uint64, 1)
	if _, err := client.Invoke(ctx, circle, []uint64{1, 100000}, hits); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("pi is about %.2f\n", 4*float64(hits[0])/100000)
	// Output: pi is about 3.14
}

// A context bounds a call. The error says whether the function may have run.
func ExampleFunction_Invoke() {
	defer cores()()
	session, err := client.Connect(context.Background(), client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	lease, err := session.Lease(context.Background(), client.LeaseOptions{Library: root + "/build/functions/echo.so"})
	if err != nil {
		log.Fatal(err)
	}
	sleep, err := lease.Function("sleep_ns") // its argument is a duration in nanoseconds
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = client.Invoke(ctx, sleep, []uint64{2e9}, make([]uint64, 1))
	var e *client.Error
	if errors.As(err, &e) && !e.Started {
		log.Print("the function has not started")
	}
	fmt.Println(errors.Is(err, context.DeadlineExceeded))
	// Output: true
}

// Numeric slices are sent as they are in memory.
func ExampleInvoke() {
	defer cores()()
	ctx := context.Background()
	session, err := client.Connect(ctx, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	lease, err := session.Lease(ctx, client.LeaseOptions{Library: root + "/build/functions/echo.so"})
	if err != nil {
		log.Fatal(err)
	}
	echo, err := lease.Function("echo")
	if err != nil {
		log.Fatal(err)
	}
	out := make([]float32, 8)
	n, err := client.Invoke(ctx, echo, []float32{1, 2.5, 4}, out)
	fmt.Println(out[:n], err)
	// Output: [1 2.5 4] <nil>
}

// Many short calls cross into C together.
func ExampleBatch() {
	defer cores()()
	ctx := context.Background()
	session, err := client.Connect(ctx, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	lease, err := session.Lease(ctx, client.LeaseOptions{Library: montecarlo, Workers: 2, Depth: 64})
	if err != nil {
		log.Fatal(err)
	}
	circle, err := lease.Function("circle")
	if err != nil {
		log.Fatal(err)
	}
	batch := lease.NewBatch()
	defer batch.Free()
	for seed := range uint64(1000) {
		if err := batch.Add(circle, client.Bytes([]uint64{seed, 100}), 8); err != nil {
			log.Fatal(err)
		}
	}
	if err := batch.Wait(ctx); err != nil {
		log.Fatal(err)
	}
	hits, all := make([]uint64, 1), uint64(0)
	for i := range batch.Len() {
		if _, err := batch.Result(i, client.Bytes(hits)); err != nil {
			log.Fatal(err)
		}
		all += hits[0]
	}
	fmt.Printf("pi is about %.1f\n", 4*float64(all)/100000)
	// Output: pi is about 3.1
}

// A call that may run more than once survives the death of its worker and, with Failover, of its executor: the lease
// moves to another executor. Here the call itself kills the worker each time.
func ExampleIdempotent() {
	defer cores()()
	ctx := context.Background()
	session, err := client.Connect(ctx, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	lease, err := session.Lease(ctx, client.LeaseOptions{Library: root + "/build/functions/echo.so", Workers: 2, Failover: true})
	if err != nil {
		log.Fatal(err)
	}
	crash, err := lease.Function("crash")
	if err != nil {
		log.Fatal(err)
	}
	_, err = crash.Invoke(client.Idempotent(ctx, 2), nil, nil)
	fmt.Println(errors.Is(err, client.ErrConnection), lease.Statistics().Repeated)
	// Output: true 2
}

// With Local, functions run in this process if no executor has a free core.
func ExampleLeaseOptions_local() {
	defer cores()()
	ctx := context.Background()
	session, err := client.Connect(ctx, client.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()
	for range 2 { // the first lease takes both cores
		lease, err := session.Lease(ctx, client.LeaseOptions{Library: montecarlo, Workers: 2, Local: true})
		if err != nil {
			log.Fatal(err)
		}
		circle, err := lease.Function("circle")
		if err != nil {
			log.Fatal(err)
		}
		hits := make([]uint64, 1)
		_, err = client.Invoke(ctx, circle, []uint64{1, 100000}, hits)
		fmt.Println(lease.Provider() == "local", lease.Statistics().Local, 4*hits[0]/100000, err)
	}
	// Output:
	// false 0 3 <nil>
	// true 1 3 <nil>
}
