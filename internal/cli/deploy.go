package cli

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/control"
)

// deployed is what `rfaas deploy --json` prints.
type deployed struct {
	Executor  string             `json:"executor"`
	SHA256    string             `json:"sha256"`
	Bytes     int64              `json:"bytes"`
	WasKnown  bool               `json:"was_known"`
	Functions []deployedFunction `json:"functions"`
}

type deployedFunction struct {
	Index int    `json:"index"`
	Name  string `json:"name"`
}

func newDeploy(a *app) *cobra.Command {
	var executor string
	var asJSON bool
	c := &cobra.Command{
		Use:   "deploy LIBRARY.so",
		Short: "Store a library on an executor and list its functions",
		Args:  cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), a.timeout)
			defer cancel()
			d, err := a.deploy(ctx, executor, args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(d)
			}
			how := "stored"
			if d.WasKnown {
				how = "known already"
			}
			fmt.Fprintf(a.Stdout, "%s on %s: %s, sha256 %s\n", args[0], executor, how, d.SHA256)
			for _, f := range d.Functions {
				fmt.Fprintf(a.Stdout, "%5d  %s\n", f.Index, f.Name)
			}
			return nil
		},
	}
	a.addressFlag(c, &executor, "executor", "RFAAS_EXECUTOR", control.DefaultExecutorAddress, "address of the executor")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON object")
	return c
}

func (a *app) deploy(ctx context.Context, executor, path string) (*deployed, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() == 0 {
		return nil, fmt.Errorf("%s is not a regular file with content", path)
	}
	hash := sha256.New()
	if _, err := io.Copy(hash, f); err != nil {
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	conn, err := a.dial(executor)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	sum := [sha256.Size]byte(hash.Sum(nil))
	reply, err := control.Upload(ctx, control.NewExecutorClient(conn), filepath.Base(path), sum, st.Size(), f)
	if err != nil {
		return nil, daemonError{path + " on " + executor, err}
	}
	d := &deployed{Executor: executor, SHA256: fmt.Sprintf("%x", sum), Bytes: st.Size(), WasKnown: reply.GetWasKnown()}
	for i, name := range reply.GetFunctions() {
		d.Functions = append(d.Functions, deployedFunction{Index: i, Name: name})
	}
	return d, nil
}
