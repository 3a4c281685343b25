package slurm

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/control"
)

// asEnv makes this test binary one of the processes of runAs, inside the cluster.
const asEnv = "RFAAS_SLURM_TEST_AS"

// markEnv is the text in the arguments of deserters. The caller gets it by the environment, so that its own arguments do not contain it.
const markEnv = "RFAAS_SLURM_TEST_MARK"

// runAs runs a process. Its arguments follow the flags of the test binary, if any.
func runAs(as string, args []string) int {
	switch as {
	case "watcher":
		return watcher(args[0])
	case "caller":
		return caller(args[0], args[1], os.Getenv(markEnv))
	}
	return 2
}

// untilStdinEnds returns a context that ends with standard input: when the test is gone or has closed its end of the pipe.
func untilStdinEnds() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return ctx
}

// listed is an executor in the manager's list.
type listed struct {
	Node        string
	State       string // up or draining
	Incarnation string
	Cores       uint32
	Memory      uint64
	Until       uint64
}

// listing is the manager's list at some time.
type listing struct {
	At        time.Time
	Executors []listed
}

// watcher asks for the list every 10 ms, and prints it whenever it has changed.
func watcher(manager string) int {
	ctx := untilStdinEnds()
	conn, err := control.Dial(manager, control.DialConfig{SecretFile: os.Getenv("RFAAS_SECRET_FILE"), AllowPlaintext: true})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer conn.Close()
	out := json.NewEncoder(os.Stdout)
	last := "nothing"
	for tick := time.NewTicker(10 * time.Millisecond); ctx.Err() == nil; <-tick.C {
		reply, err := control.NewManagerClient(conn).List(ctx, &control.ListRequest{})
		if err != nil {
			continue
		}
		l := listing{At: time.Now()}
		for _, e := range reply.GetExecutors() {
			i := e.GetInfo()
			if !e.GetAlive() {
				continue
			}
			state := "up"
			if i.GetDraining() {
				state = "draining"
			}
			l.Executors = append(l.Executors, listed{i.GetNode(), state, fmt.Sprintf("%x", i.GetIncarnation()), i.GetCores(), i.GetMemoryBytes(), i.GetAvailableUntil()})
		}
		if text := fmt.Sprint(l.Executors); text != last {
			last = text
			if out.Encode(l) != nil {
				return 0
			}
		}
	}
	return 0
}

// called is the report of a caller, its last line.
type called struct {
	Calls, Right, Wrong int
	Errors              map[string]int // by class and text, of calls
	Leases              int
	Longest             time.Duration // of a call
}

// className returns the name of an error's class; "" if it has none.
func className(err error) string {
	for name, class := range map[string]error{"busy": client.ErrBusy, "invalid": client.ErrInvalid, "unsupported": client.ErrUnsupported,
		"function": client.ErrFunction, "connection": client.ErrConnection, "lease": client.ErrLease, "fatal": client.ErrFatal, "credential": client.ErrCredential} {
		if errors.Is(err, class) {
			return name
		}
	}
	return ""
}

// callBound is how long a call may take, whatever happens to its executor.
const callBound = 10 * time.Second

// caller leases a worker of a reachable executor and calls nap, one call after the other, until standard input ends. Each lease
// leaves a deserter. If a lease fails, caller tries again.
func caller(manager, library, mark string) int {
	ctx := untilStdinEnds()
	report := called{Errors: map[string]int{}}
	said := bufio.NewWriter(os.Stdout)
	for ctx.Err() == nil {
		if err := callUntilError(ctx, manager, library, mark, &report); err != nil && ctx.Err() == nil {
			time.Sleep(20 * time.Millisecond)
		}
	}
	json.NewEncoder(said).Encode(report)
	said.Flush()
	return 0
}

func callUntilError(ctx context.Context, manager, library, mark string, report *called) error {
	s, err := client.Connect(ctx, client.Options{Manager: manager, AllowPlaintext: true, Timeout: 5 * time.Second})
	if err != nil {
		return err
	}
	defer s.Close()
	l, err := s.Lease(ctx, client.LeaseOptions{Library: library, WaitMode: client.Warm})
	if err != nil {
		return err
	}
	defer l.Release(context.Background())
	report.Leases++
	desert, err := l.Function("desert")
	if err != nil {
		return err
	}
	nap, err := l.Function("nap")
	if err != nil {
		return err
	}
	once := func(f *client.Function, in, out []byte) (int, error) {
		bounded, cancel := context.WithTimeout(context.Background(), callBound)
		defer cancel()
		begin := time.Now()
		n, err := f.Invoke(bounded, in, out)
		report.Calls++
		report.Longest = max(report.Longest, time.Since(begin))
		if err != nil {
			report.Errors[className(err)+": "+err.Error()]++
		}
		return n, err
	}
	if _, err := once(desert, []byte(mark), nil); err != nil {
		return err
	}
	report.Right++
	fmt.Println("leased", l.Node())
	in, out := make([]byte, 16), make([]byte, 8)
	for tag := uint64(1); ctx.Err() == nil; tag++ {
		binary.LittleEndian.PutUint64(in, 20) // ms
		binary.LittleEndian.PutUint64(in[8:], tag)
		n, err := once(nap, in, out)
		if err != nil {
			return err
		}
		if n == 8 && binary.LittleEndian.Uint64(out) == tag {
			report.Right++
		} else {
			report.Wrong++
		}
	}
	return nil
}

// named says whether every error of a report has a class and a text.
func (c *called) named() error {
	for _, text := range slices.Sorted(maps.Keys(c.Errors)) {
		class, rest, _ := strings.Cut(text, ": ")
		if class != "connection" && class != "lease" && class != "busy" || rest == "" {
			return fmt.Errorf("%q", text)
		}
	}
	return nil
}
