package cli

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/hashicorp/go-multierror"
	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/control"
)

// invoked is what `rfaas invoke --json` prints.
type invoked struct {
	Function string  `json:"function"`
	Executor string  `json:"executor"`
	Node     string  `json:"node"`
	Provider string  `json:"provider"`
	Size     int     `json:"size"`
	Hex      string  `json:"hex"`
	Text     *string `json:"text,omitempty"` // when the result is plain text
	LeaseUS  float64 `json:"lease_us"`
	CallUS   float64 `json:"call_us"`
}

// invokeFlags are the flags of rfaas invoke.
type invokeFlags struct {
	executor, manager, provider string
	input, hexInput             string
	capacity                    int
	asJSON, asHex               bool
}

func newInvoke(a *app) *cobra.Command {
	var f invokeFlags
	c := &cobra.Command{
		Use:   "invoke LIBRARY.so FUNCTION",
		Short: "Lease a worker, call one function there and print its result",
		Args:  cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), a.timeout)
			defer cancel()
			in, err := f.payload(a)
			if err != nil {
				return err
			}
			r, out, err := a.invoke(ctx, &f, args[0], args[1], in)
			if r == nil {
				return err
			}
			var perr error
			switch {
			case f.asJSON:
				perr = a.printJSON(r)
			case f.asHex:
				_, perr = fmt.Fprintln(a.Stdout, r.Hex)
			default:
				_, perr = a.Stdout.Write(out)
			}
			if perr != nil {
				return perr
			}
			return err
		},
	}
	c.Flags().StringVar(&f.executor, "executor", "", "address of an executor ($RFAAS_EXECUTOR)")
	c.Flags().StringVar(&f.manager, "manager", "", "address of a resource manager that finds one ($RFAAS_MANAGER)")
	c.Flags().StringVar(&f.provider, "provider", "", "auto, shm, verbs or tcp ($RFAAS_PROVIDER)")
	c.Flags().StringVar(&f.input, "input", "", "file with the payload, - for standard input (default: no payload)")
	c.Flags().StringVar(&f.hexInput, "hex", "", "the payload in hexadecimal digits")
	c.Flags().IntVar(&f.capacity, "capacity", 1<<20, "most bytes that the result may have")
	c.Flags().BoolVar(&f.asHex, "print-hex", false, "print the result in hexadecimal digits")
	c.Flags().BoolVar(&f.asJSON, "json", false, "print a JSON object")
	c.MarkFlagsMutuallyExclusive("input", "hex")
	c.MarkFlagsMutuallyExclusive("executor", "manager")
	return c
}

// payload reads what shall be sent.
func (f *invokeFlags) payload(a *app) ([]byte, error) {
	switch {
	case f.capacity < 0 || f.capacity > 1<<30:
		return nil, a.BadUsage(fmt.Errorf("--capacity %d is not in 0..%d", f.capacity, 1<<30))
	case f.hexInput != "":
		b, err := hex.DecodeString(strings.Join(strings.Fields(f.hexInput), ""))
		if err != nil {
			return nil, a.BadUsage(fmt.Errorf("--hex: %w", err))
		}
		return b, nil
	case f.input == "-":
		return io.ReadAll(os.Stdin)
	case f.input != "":
		return os.ReadFile(f.input)
	}
	return nil, nil
}

// invoke leases a worker and calls the function. After an error from releasing the lease the result is returned too.
func (a *app) invoke(ctx context.Context, f *invokeFlags, library, name string, in []byte) (_ *invoked, out []byte, err error) {
	o := client.Options{Executor: f.executor, Manager: f.manager, Provider: f.provider, SecretFile: a.secretFile, TokenFile: a.tokenFile,
		AllowPlaintext: a.allowPlaintext, Timeout: a.timeout}
	if f.executor == "" && f.manager == "" && a.Getenv("RFAAS_EXECUTOR") == "" && a.Getenv("RFAAS_MANAGER") == "" {
		o.Executor = control.DefaultExecutorAddress
	}
	s, err := client.Connect(ctx, o)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if cerr := s.Close(); err == nil && cerr != nil && !errors.Is(cerr, client.ErrLease) {
			err = fmt.Errorf("the result is complete, but the lease could not be released: %w", lastError(cerr))
		}
	}()
	began := time.Now()
	bulk := int64(max(len(in), f.capacity, 1<<16))
	l, err := s.Lease(ctx, client.LeaseOptions{Library: library, Depth: 1, Bulk: bulk})
	if err != nil {
		return nil, nil, err
	}
	leased := time.Since(began)
	fn, err := l.Function(name)
	if err != nil {
		return nil, nil, err
	}
	out = make([]byte, f.capacity)
	began = time.Now()
	n, err := fn.Invoke(ctx, in, out)
	called := time.Since(began)
	if err != nil {
		return nil, nil, err
	}
	out = out[:n]
	r := &invoked{Function: name, Executor: l.Executor(), Node: l.Node(), Provider: l.Provider(), Size: n,
		Hex: hex.EncodeToString(out), LeaseUS: microseconds(leased), CallUS: microseconds(called)}
	if !bytes.ContainsFunc(out, func(r rune) bool { return r == '\ufffd' || r < ' ' && r != '\n' && r != '\t' }) {
		text := string(out)
		r.Text = &text
	}
	return r, out, nil
}

// lastError takes a single error out of the list that Close returns.
func lastError(err error) error {
	var list *multierror.Error
	if errors.As(err, &list) && len(list.Errors) == 1 {
		return list.Errors[0]
	}
	return err
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
