package cold

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/agent"
	"github.com/rfaas-go/rfaas/internal/daemon"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// executor is an executor process with as many cores as the leases need.
type executor struct{ *daemon.Daemon }

// poolLeast is the smallest size of the executor's pool in mode pooled.
const poolLeast = 4

// startExecutor starts an executor with the settings of cfg.Mode and further arguments.
func startExecutor(ctx context.Context, cfg Config, listen string, args ...string) (executor, error) {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return executor{}, err
	}
	line := append([]string{"--listen", listen, "--data-listen", net.JoinHostPort(host, "0"), "--http-listen", "127.0.0.1:0", "--providers", cfg.Provider,
		"--cores", "1", "--grace", "2s"}, args...)
	d, err := daemon.Start(ctx, cfg.Executor, append(line, cfg.settings()...)...)
	return executor{d}, err
}

// ready waits until the next lease can start in this mode. others is the number of leases before it. Bounded by ctx.
func (e executor) ready(ctx context.Context, cfg *Config, others int) error {
	switch {
	case cfg.Mode == "pooled":
		return e.untilFull(ctx, cfg.pool())
	case cfg.Mode == "spare" && others > 0: // the leases before it prove the demand
		return e.untilSpare(ctx)
	}
	return nil
}

// beforeRelease returns a function to call before a release, or nil. In mode ahead, it waits until the agent has the spare lease that it gives with the release.
func (e executor) beforeRelease(ctx context.Context, cfg *Config) func() error {
	if cfg.Mode != "ahead" {
		return nil
	}
	return func() error { return e.untilSpare(ctx) }
}

// StartExecutor starts an executor on this machine with the settings of cfg.Mode and further arguments.
func StartExecutor(ctx context.Context, cfg Config, args ...string) (*daemon.Daemon, error) {
	e, err := startExecutor(ctx, cfg, "127.0.0.1:0", args...)
	return e.Daemon, err
}

// untilSpare waits until the agent has a spare lease. Bounded by ctx.
func (e executor) untilSpare(ctx context.Context) error {
	socket, err := agent.Path(os.Getenv)
	for err == nil {
		var s agent.Status
		if s, err = agent.Ask(ctx, socket); err != nil {
			break
		}
		if slices.ContainsFunc(s.Leases, func(k agent.CachedStatus) bool { return k.Spare && k.Executor == e.Address }) {
			return nil
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-e.Done():
			err = fmt.Errorf("the executor has ended")
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	return fmt.Errorf("wait for a spare lease: %w", err)
}

// untilFull waits until as many workers wait for a lease. Bounded by ctx.
func (e executor) untilFull(ctx context.Context, workers int) error {
	for {
		text, err := e.read(ctx)
		if err != nil {
			return fmt.Errorf("read the executor's metrics: %w", err)
		}
		if strings.Contains(text, fmt.Sprintf("\nrfaas_executor_waiting_workers %d\n", workers)) {
			return nil
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-e.Done():
			return fmt.Errorf("the executor has ended")
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (e executor) read(ctx context.Context) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+e.Metrics+"/metrics", nil)
	if err != nil {
		return "", err
	}
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	return string(b), err
}

// firstTLS is the first contact by TLS and token with an executor that is not on loopback, ns. 0: there is no such address.
func firstTLS(ctx context.Context, cfg Config, dir string) (int64, error) {
	host := ownAddress()
	if host == "" {
		return 0, nil
	}
	const valid = time.Hour
	now, cluster, node, token := time.Now(), filepath.Join(dir, "cluster"), filepath.Join(dir, "node"), filepath.Join(dir, "token")
	if err := identity.InitCluster(cluster, "bench", valid, now); err != nil {
		return 0, err
	}
	c, err := identity.OpenCluster(cluster)
	if err == nil {
		err = c.IssueNode(node, []string{host}, valid, now)
	}
	if err != nil {
		return 0, err
	}
	cred, err := c.IssueToken(identity.Claims{Tenant: "bench", Role: "tenant", Begins: now.Unix(), Ends: now.Add(valid).Unix()}, nil, now)
	if err != nil {
		return 0, err
	}
	b, err := cred.Encode()
	if err == nil {
		err = os.WriteFile(token, b, 0o600)
	}
	if err != nil {
		return 0, err
	}
	e, err := startExecutor(ctx, cfg, net.JoinHostPort(host, "0"), "--identity-dir", node, "--secret-file", filepath.Join(dir, "secret"))
	if err != nil {
		return 0, err
	}
	defer e.Stop()
	s, first, err := contact(ctx, cfg, client.Options{Executor: e.Address, Provider: cfg.Provider, TokenFile: token})
	if err != nil {
		return 0, fmt.Errorf("with TLS: %w", err)
	}
	return first, s.Close()
}

// ownAddress is an address of this machine that is not loopback; "" if it has none.
func ownAddress() string {
	all, _ := net.InterfaceAddrs()
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
			return n.IP.String()
		}
	}
	return ""
}
