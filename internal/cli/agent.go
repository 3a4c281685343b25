package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/agent"
)

func newAgent(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "agent",
		Short: "Look at or stop the agent, which runs the control plane of your processes on this node",
		Long: "Look at or stop the agent of this user on this node. It runs the control plane of all client processes: it finds executors,\n" +
			"renews leases and reports failures. The first process that needs an agent starts it. Its socket is $RFAAS_AGENT_SOCKET, else\n" +
			"agent-NET.sock, in a batch job agent-NET-JOB.sock, in $XDG_RUNTIME_DIR/rfaas or /tmp/rfaas-UID. NET is the inode of the network " +
			"namespace.\nThe page rfaas-agent(8) describes the program.",
	}
	c.AddCommand(newAgentStatus(a), newAgentStop(a))
	for _, sub := range c.Commands() {
		sub.Args = cobra.NoArgs
	}
	return c
}

// onAgent runs f with the path of the agent's socket.
func (a *app) onAgent(c *cobra.Command, f func(ctx context.Context, socket string) error) error {
	ctx, cancel := context.WithTimeout(c.Context(), a.timeout)
	defer cancel()
	socket, err := agent.Path(a.Getenv)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w; a client process makes it and starts an agent when it needs one", agent.ErrNone, err)
	}
	if err != nil {
		return err
	}
	return f(ctx, socket)
}

func newAgentStatus(a *app) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "status",
		Short: "Print what the agent serves",
		RunE: func(c *cobra.Command, _ []string) error {
			return a.onAgent(c, func(ctx context.Context, socket string) error {
				s, err := agent.Ask(ctx, socket)
				if err != nil {
					return err
				}
				if asJSON {
					return json.NewEncoder(a.Stdout).Encode(s)
				}
				return printAgent(a.Stdout, socket, &s)
			})
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func printAgent(out io.Writer, socket string, s *agent.Status) error {
	board := "not attached"
	if s.Board {
		board = "attached by " + plain(s.BoardBy)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "agent\t%s\n", s.Version)
	fmt.Fprintf(w, "process\t%d\n", s.PID)
	fmt.Fprintf(w, "socket\t%s\n", socket)
	fmt.Fprintf(w, "up\t%v\n", (time.Duration(s.UptimeMS) * time.Millisecond).Round(time.Millisecond))
	fmt.Fprintf(w, "executors\t%d connected\n", s.Executors)
	fmt.Fprintf(w, "board\t%s\n", board)
	fmt.Fprintf(w, "cached leases\t%d, with %d descriptors for other processes\n", s.Cached, s.Held)
	for _, k := range s.Leases {
		whose := "of one process"
		if k.Spare {
			whose = "spare, for any process"
		} else if k.Orphaned {
			whose = "of an ended session"
		} else if k.Shared {
			whose = "of any process"
		}
		fmt.Fprintf(w, "\t%s on %s (%s), workers: %d, %s\n", plain(k.Library), plain(k.Node), plain(k.Executor), k.Workers, whose)
	}
	fmt.Fprintf(w, "operations\t%d\n", s.Served)
	for _, t := range s.Tokens {
		fmt.Fprintf(w, "token\t%s, tenant %s, expires %s\n", t.File, t.Tenant, t.Expires.Format(time.RFC3339))
		if t.Warning != "" {
			fmt.Fprintf(w, "\twarning: %s\n", t.Warning)
		}
	}
	fmt.Fprintf(w, "clients\t%d\n", len(s.Clients))
	if len(s.Clients) > 0 {
		fmt.Fprintf(w, "\nPROCESS\tSESSIONS\tLEASES\n")
	}
	for _, x := range s.Clients {
		fmt.Fprintf(w, "%d\t%d\t%d\n", x.PID, x.Sessions, x.Leases)
	}
	return w.Flush()
}

func newAgentStop(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "stop",
		Short: "Stop the agent",
		Long: "Stop the agent. Processes that hold leases start another agent, which takes the leases over: calls go on, and cached\n" +
			"workers are lost.",
		RunE: func(c *cobra.Command, _ []string) error {
			return a.onAgent(c, agent.Stop)
		},
	}
}
