package cli

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-multierror"
	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// invoked is what `rfaas invoke --json` prints, for each worker.
type invoked struct {
	Function string   `json:"function"`
	Executor string   `json:"executor"`
	Node     string   `json:"node"`
	Provider string   `json:"provider"`
	Worker   int      `json:"worker"`
	Size     int      `json:"size"`
	Hex      string   `json:"hex"`
	Text     *string  `json:"text,omitempty"`   // when the result is plain text
	Values   []number `json:"values,omitempty"` // with --print of numbers
	LeaseUS  float64  `json:"lease_us"`
	CallUS   float64  `json:"call_us"`

	out []byte
}

// invokeFlags are the flags of rfaas invoke.
type invokeFlags struct {
	executor, manager, provider string
	input, hexInput, print      string
	args                        []string
	capacity, workers, cores    int
	workersMin                  int
	memory                      string
	callLimit                   time.Duration
	bundle                      []string
	asJSON                      bool

	shown valueType // of print
}

func newInvoke(a *app) *cobra.Command {
	var f invokeFlags
	c := &cobra.Command{
		Use:   "invoke LIBRARY.so FUNCTION",
		Short: "Lease workers, call one function on each and print the results",
		Long: "Lease workers, call one function on each of them and print the results in the order of the workers. The payload is the same\n" +
			"for all. --args describes it by values: a type, a colon, and values with commas between them, in the byte order of this\n" +
			"machine. The types are i8, i16, i32, i64, u8, u16, u32, u64, f32 and f64, and str for the rest of the argument as text\n" +
			"without a terminating NUL. Several --args follow each other without padding.",
		Example: "  rfaas invoke libhypot.so hypotenuse --args f64:3,4 --print f64",
		Args:    cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			if err := a.oneFlag(c, "input", "hex", "args"); err != nil {
				return err
			}
			if err := a.oneFlag(c, "executor", "manager"); err != nil {
				return err
			}
			in, err := f.payload(a)
			if err != nil {
				return err
			}
			o, err := f.lease(a, args[0], len(in))
			if err != nil {
				return err
			}
			results, err := a.invoke(c.Context(), &f, o, args[1], in)
			for _, r := range results {
				if perr := a.printResult(&f, r); perr != nil {
					return perr
				}
			}
			return err
		},
	}
	c.Flags().StringVar(&f.executor, "executor", "", "address of an executor ($RFAAS_EXECUTOR)")
	c.Flags().StringVar(&f.manager, "manager", "", "address of a resource manager that finds one ($RFAAS_MANAGER)")
	c.Flags().StringVar(&f.provider, "provider", "", "auto, shm, verbs, tcp or ofi ($RFAAS_PROVIDER)")
	c.Flags().StringVar(&f.input, "input", "", "file with the payload, - for standard input (default: no payload)")
	c.Flags().StringVar(&f.hexInput, "hex", "", "the payload in hexadecimal digits")
	c.Flags().StringArrayVar(&f.args, "args", nil, "values of the payload, like f64:3,4")
	c.Flags().IntVar(&f.capacity, "capacity", 1<<20, "most bytes that a result may have")
	c.Flags().IntVar(&f.workers, "workers", 1, "workers to lease and to call")
	c.Flags().IntVar(&f.workersMin, "workers-min", 0, "fewest workers to call if there is no room for all (default: all)")
	c.Flags().IntVar(&f.cores, "cores", 1, "cores for each worker")
	c.Flags().StringVar(&f.memory, "memory", "", "memory for each worker, like 2GiB (default: the executor's)")
	c.Flags().DurationVar(&f.callLimit, "call-limit", 0, "how long the call may run: a worker that takes longer is killed (default: the executor's limit)")
	c.Flags().StringArrayVar(&f.bundle, "bundle", nil, "send this file or directory with the library; functions find it by rfaas_bundle_path (repeatable)")
	c.Flags().StringVar(&f.print, "print", "", "how results are printed: hex, or the type of their values (default: the bytes as they are)")
	c.Flags().BoolVar(&f.asJSON, "json", false, "print a JSON object for each worker")
	return c
}

// oneFlag returns an error if the command line has more than one of these flags.
func (a *app) oneFlag(c *cobra.Command, names ...string) error {
	given := slices.DeleteFunc(names, func(name string) bool { return !c.Flags().Changed(name) })
	if len(given) > 1 {
		return a.BadUsage(fmt.Errorf("--%s: want one", strings.Join(given, " and --")))
	}
	return nil
}

// payload reads what shall be sent.
func (f *invokeFlags) payload(a *app) ([]byte, error) {
	if f.print != "" && f.print != "hex" {
		t, ok := valueTypes[f.print]
		if !ok {
			return nil, a.BadUsage(fmt.Errorf("--print %s: want hex, or one of %s", f.print, typeNames()))
		}
		f.shown = t
	}
	switch {
	case f.capacity < 0 || f.capacity > 1<<30:
		return nil, a.BadUsage(fmt.Errorf("--capacity %d is not in 0..%d", f.capacity, 1<<30))
	case f.hexInput != "":
		b, err := hex.DecodeString(strings.Join(strings.Fields(f.hexInput), ""))
		if err != nil {
			return nil, a.BadUsage(fmt.Errorf("--hex %.64s: %s: want two digits for each byte", f.hexInput, strings.TrimPrefix(err.Error(), "encoding/hex: ")))
		}
		return b, nil
	case len(f.args) > 0:
		var b []byte
		for _, arg := range f.args {
			var err error
			if b, err = appendValues(b, arg); err != nil {
				return nil, a.BadUsage(fmt.Errorf("--args %s: %w", arg, err))
			}
		}
		return b, nil
	case f.input == "-":
		return io.ReadAll(os.Stdin)
	case f.input != "":
		return os.ReadFile(f.input)
	}
	return nil, nil
}

// lease returns what the flags ask for.
func (f *invokeFlags) lease(a *app, library string, payload int) (client.LeaseOptions, error) {
	o := client.LeaseOptions{Library: library, Depth: 1, Bulk: int64(max(payload, f.capacity, 1<<16)), Workers: f.workers, WorkersMin: f.workersMin,
		CoresPerWorker: f.cores, CallLimit: f.callLimit, Bundle: f.bundle}
	var memory config.Bytes
	if err := memory.UnmarshalText([]byte(f.memory)); err != nil {
		return o, a.BadUsage(fmt.Errorf("--memory: %w", err))
	}
	o.Memory = uint64(memory)
	for name, n := range map[string]int{"workers": f.workers, "cores": f.cores} {
		if n < 1 {
			return o, a.BadUsage(fmt.Errorf("--%s %d: want 1 at least", name, n))
		}
	}
	if f.workersMin < 0 || f.workersMin > f.workers {
		return o, a.BadUsage(fmt.Errorf("--workers-min %d: want 1 to %d (--workers), or 0 for all", f.workersMin, f.workers))
	}
	if f.callLimit < 0 {
		return o, a.BadUsage(fmt.Errorf("--call-limit %v is negative", f.callLimit))
	}
	return o, nil
}

// printResult prints one worker's result as the flags say.
func (a *app) printResult(f *invokeFlags, r *invoked) error {
	var err error
	switch {
	case f.asJSON:
		err = a.printJSON(r)
	case f.print == "hex":
		_, err = fmt.Fprintln(a.Stdout, r.Hex)
	case f.print != "":
		_, err = fmt.Fprintln(a.Stdout, strings.Trim(fmt.Sprint(r.Values), "[]"))
	default:
		_, err = a.Stdout.Write(r.out)
	}
	return err
}

// invoke leases the workers and calls the function on each. After an error it returns the results of the calls that succeeded.
func (a *app) invoke(ctx context.Context, f *invokeFlags, lease client.LeaseOptions, name string, in []byte) (results []*invoked, err error) {
	o := client.Options{Executor: f.executor, Manager: f.manager, Provider: f.provider, SecretFile: a.secretFile, TokenFile: a.tokenFile,
		AllowPlaintext: a.allowPlaintext, DataEncryption: a.dataEncryption, Timeout: a.timeout}
	byDefault := f.executor == "" && f.manager == "" && a.Getenv(grant.EnvExecutor) == "" && a.Getenv(grant.EnvManager) == ""
	if byDefault {
		o.Executor = control.DefaultExecutorAddress
	}
	s, err := client.Connect(ctx, o)
	if err != nil {
		return nil, withDefault(err, byDefault, control.DefaultExecutorAddress, "executor", grant.EnvExecutor)
	}
	defer func() {
		if cerr := s.Close(); err == nil && cerr != nil && !errors.Is(cerr, client.ErrLease) {
			err = fmt.Errorf("the result is complete, but the lease could not be released: %w", lastError(cerr))
		}
	}()
	began := time.Now()
	l, err := s.Lease(ctx, lease) // within the session's time-out, which is longer for a large library or bundle
	if err != nil {
		return nil, withDefault(err, byDefault, control.DefaultExecutorAddress, "executor", grant.EnvExecutor)
	}
	leased := microseconds(time.Since(began))
	fn, err := l.Function(name)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	calls := make([]call, l.Workers())
	var wg sync.WaitGroup
	for i := range calls {
		wg.Go(func() { calls[i].run(ctx, l.Worker(i), fn, in, f.capacity) })
	}
	wg.Wait()
	var failures *multierror.Error
	for i, call := range calls {
		if call.err != nil {
			failures = multierror.Append(failures, remedy(call.err, a.timeout))
			continue
		}
		r := &invoked{Function: name, Executor: l.Executor(), Node: l.Node(), Provider: l.Provider(), Worker: i, Size: len(call.out),
			Hex: hex.EncodeToString(call.out), LeaseUS: leased, CallUS: microseconds(call.time), out: call.out}
		if !bytes.ContainsFunc(call.out, func(r rune) bool { return r == '\ufffd' || r < ' ' && r != '\n' && r != '\t' }) {
			text := string(call.out)
			r.Text = &text
		}
		if f.shown.size > 0 {
			if r.Values, err = f.shown.values(call.out); err != nil {
				failures = multierror.Append(failures, fmt.Errorf("--print %s: result of worker %d: %w", f.print, i, err))
				continue
			}
		}
		results = append(results, r)
	}
	return results, lastError(failures.ErrorOrNil())
}

// remedy adds the flag that sets the limit which a call has exceeded.
func remedy(err error, timeout time.Duration) error {
	var e *client.Error
	switch {
	case !errors.As(err, &e):
	case e.Status == client.StatusResultTooLarge:
		return fmt.Errorf("%w: raise --capacity", err)
	case e.Status == client.StatusDeadline:
		return fmt.Errorf("%w: raise --timeout (%v)", err, timeout)
	}
	return err
}

// call is the call of one worker.
type call struct {
	out  []byte
	time time.Duration
	err  error
}

func (c *call) run(ctx context.Context, w *client.Worker, fn *client.Function, in []byte, capacity int) {
	out := make([]byte, capacity)
	began := time.Now()
	n, err := w.Invoke(ctx, fn, in, out)
	c.out, c.time, c.err = out[:min(n, capacity)], time.Since(began), err // n is beyond the capacity if the result was too large
}

// lastError takes a single error out of a list.
func lastError(err error) error {
	var list *multierror.Error
	if errors.As(err, &list) && len(list.Errors) == 1 {
		return list.Errors[0]
	}
	return err
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
