package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
)

// The faults of TestChaos that are not kills or stops: a full disk and damaged files.

// noticed waits until a fault has its required effect, while the other faults go on, and records how long it took.
func (c *chaos) noticed(kind, what string, cond func() bool) {
	c.Helper()
	began := time.Now()
	for !cond() {
		if time.Since(began) > 2*recoverBound {
			c.Fatalf("%s: not within %v: %s; %s", kind, 2*recoverBound, what, c.lastly)
		}
		c.pass(20 * time.Millisecond)
	}
	c.kind(kind).took(time.Since(began))
}

func (c *chaos) damage(kind string) {
	c.kind(kind).count++
	c.history.add(fmt.Sprintf("%.1f s: %s", time.Since(c.began).Seconds(), kind))
}

// get reads a path of the manager over HTTP. It returns "" while the manager does not answer.
func (c *chaos) get(path string) string {
	ctx, cancel := context.WithTimeout(context.Background(), callerBound)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", c.http)
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://manager"+path, nil)
	if err != nil {
		c.Fatal(err)
	}
	r, err := transport.RoundTrip(req)
	if err != nil {
		return ""
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body)
	return r.Status + "\n" + string(b)
}

// fillLedger fills the ledger's disk. Health, metric, log and bill report it, and report that it is over.
func (c *chaos) fillLedger(r *rand.Rand) {
	c.Helper()
	c.damage(ledgerFull)
	path := filepath.Join(filepath.Dir(c.state), "ballast")
	f, err := os.Create(path)
	if err != nil {
		c.Fatal(err)
	}
	for _, size := range []int{1 << 16, 512} {
		for block := make([]byte, size); err == nil; {
			_, err = f.Write(block)
		}
		if !errors.Is(err, unix.ENOSPC) {
			c.Fatal(err)
		}
		err = nil
	}
	f.Close()
	text := syscall.ENOSPC.Error()
	// The ledger reuses its pages. It only grows with new tenants.
	d := c.newAuditedExecutor(fmt.Sprintf("executor-disk-%d", c.kind(ledgerFull).count), "--share-cores", "16")
	tenants := 0
	var leaseErr error
	c.noticed(ledgerFull, "health, metric, log and bill report it", func() bool {
		for range 20 {
			tenants++
			leaseErr = c.leaseAs(d, fmt.Sprintf("%s-%d-%s", d.name, tenants, strings.Repeat("x", 200)))
		}
		bill, billErr := c.rfaas("bill", "--timeout", "5s")
		health, metrics := c.get("/healthz"), c.get("/metrics")
		c.lastly = fmt.Sprint(string(bill), health, leaseErr)
		return billErr == nil && strings.Contains(string(bill), text) && strings.HasPrefix(health, "503") && strings.Contains(health, text) &&
			strings.Contains(metrics, "\nrfaas_manager_ledger_ok 0\n") && strings.Contains(c.manager.log.tail(1<<20), "does not accept charges")
	})
	c.pass(time.Duration(r.Int64N(int64(2 * time.Second))))
	if err := os.Remove(path); err != nil {
		c.Fatal(err)
	}
	c.noticed(ledgerFull, "the ledger accepts charges again", func() bool {
		c.lastly = c.get("/healthz")
		return strings.HasPrefix(c.lastly, "200") && strings.Contains(c.get("/metrics"), "\nrfaas_manager_ledger_ok 1\n")
	})
	for len(c.stopped) > 0 {
		c.pass(5 * time.Millisecond)
	}
	c.noteGroups(d)
	d.stop()
	c.await(ledgerFull)
}

// leaseAs takes a lease of a tenant and releases it, which gives the executor something to charge. It may fail.
func (c *chaos) leaseAs(d *daemon, tenant string) error {
	s, err := client.Connect(c.t.Context(), client.Options{Executor: d.address, SecretFile: c.secret, Provider: provider(), Tenant: tenant, Timeout: callerBound})
	if err != nil {
		return err
	}
	defer s.Close()
	l, err := s.Lease(c.t.Context(), client.LeaseOptions{Library: built(c, "build/functions/echo.so"), Memory: 16 << 20, Bulk: -1})
	if err == nil {
		err = l.Release(c.t.Context())
	}
	return err
}

// damageLedgerCopy damages a copy of the ledger. The command that checks ledgers must report it and restore nothing.
func (c *chaos) damageLedgerCopy(r *rand.Rand) {
	c.Helper()
	c.damage(damagedLedger)
	began := time.Now()
	dir := filepath.Join(c.dir, "copy")
	defer os.RemoveAll(dir)
	b, err := os.ReadFile(filepath.Join(c.state, "ledger"))
	if err != nil {
		c.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		c.Fatal(err)
	}
	const page, head = 4096, 16
	for at := 0; at < len(b); at += page { // in the head of each page, because a page may have unused space
		b[at+r.IntN(head)] ^= byte(1 + r.IntN(255))
	}
	c.write(filepath.Join(dir, "ledger"), b)
	if out, err := c.rfaas("ledger", "check", dir); err == nil || !strings.Contains(string(out), "ledger") || strings.Contains(string(out), "goroutine") {
		c.Errorf("a damaged copy of the ledger is accepted: %s", out)
	}
	if out, err := c.rfaas("ledger", "restore", filepath.Join(c.dir, "copy"), filepath.Join(dir, "ledger")); err == nil {
		c.Errorf("a damaged copy of the ledger is restored: %s", out)
	}
	c.kind(damagedLedger).took(time.Since(began))
	c.await(damagedLedger)
}

// write replaces a file atomically and keeps its owner and mode.
func (c *chaos) write(path string, b []byte) {
	c.Helper()
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		c.Fatal(err)
	}
	if i, err := os.Stat(path); err == nil {
		s := i.Sys().(*syscall.Stat_t)
		if err := errors.Join(os.Chown(path+".new", int(s.Uid), int(s.Gid)), os.Chmod(path+".new", i.Mode().Perm())); err != nil {
			c.Fatal(err)
		}
	}
	if err := os.Rename(path+".new", path); err != nil {
		c.Fatal(err)
	}
}

// asAnn asks the manager with the token.
func (c *chaos) asAnn() (string, error) {
	cmd := exec.Command(built(c, "bin/rfaas"), "executors", "--timeout", "5s", "--token-file", c.token)
	for _, kv := range c.env {
		if !strings.HasPrefix(kv, "RFAAS_SECRET_FILE=") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// damageList truncates the list of revoked tokens. Tokens are refused until it is complete again. Clients with the secret go on.
func (c *chaos) damageList() {
	c.Helper()
	c.damage(damagedList)
	path := filepath.Join(c.identity, "revoked")
	good, err := os.ReadFile(path)
	if err != nil {
		c.Fatal(err)
	}
	seen := len(c.manager.log.tail(1 << 20))
	c.write(path, good[:len(good)/2])
	c.noticed(damagedList, "tokens are refused", func() bool {
		out, err := c.asAnn()
		log := c.manager.log.tail(1 << 20)
		log = log[min(seen, len(log)):]
		c.lastly = out + log
		// A manager that was killed just before does not start with the damaged file, and its log names the file.
		unstarted := strings.Contains(log, "revocation list") && strings.Contains(log, "started again")
		return err != nil && (strings.Contains(out, "revocation list") || strings.Contains(out, "revoked") || unstarted)
	})
	c.write(path, good)
	c.noticed(damagedList, "tokens are accepted again", func() bool {
		out, err := c.asAnn()
		c.lastly = out
		return err == nil
	})
	c.await(damagedList)
}

// damageIdentity replaces the node's certificate by text. Running daemons keep the old one, and their logs name the file.
func (c *chaos) damageIdentity() {
	c.Helper()
	c.damage(damagedIdentity)
	path := filepath.Join(c.identity, "node.crt")
	good, err := os.ReadFile(path)
	if err != nil {
		c.Fatal(err)
	}
	seen := len(c.manager.log.tail(1 << 20))
	// logged calls the manager, since a daemon reads its files again when it is called, and returns what its log says since the damage.
	logged := func() (log string, err error) {
		out, err := c.asAnn()
		log = c.manager.log.tail(1 << 20)
		log = log[min(seen, len(log)):]
		c.lastly = out + log
		return log, err
	}
	c.write(path, []byte("damaged"))
	c.noticed(damagedIdentity, "the manager's log names the file", func() bool {
		log, err := logged()
		// A manager that was started with the damaged file does not answer, and its log names the file too.
		return strings.Contains(log, "node.crt") && (err == nil || strings.Contains(log, "started again"))
	})
	c.write(path, good)
	// The same damage is logged again only after that.
	c.noticed(damagedIdentity, "the manager has loaded the file", func() bool {
		log, err := logged()
		return err == nil && (strings.Contains(log, "reloaded the identity") || strings.Contains(log, "started again"))
	})
	c.await(damagedIdentity)
}

// damageJournal kills an executor and damages a byte in the middle of its journal before the next executor reads it. That one reports how
// many records it skipped, if any, and goes on.
func (c *chaos) damageJournal(r *rand.Rand) {
	c.Helper()
	c.damage(damagedJournal)
	v, ok := c.find("executor", r)
	for end := time.Now().Add(recoverBound); !ok; v, ok = c.find("executor", r) {
		if time.Now().After(end) {
			c.Fatalf("no executor to hit within %v", recoverBound)
		}
		c.pass(20 * time.Millisecond)
	}
	files, err := filepath.Glob(filepath.Join(c.journals(v.executor.name), "*.journal"))
	if err != nil {
		c.Fatal(err)
	}
	v.signal(unix.SIGSTOP) // lets the damage happen before the supervisor starts the next one
	from := time.Now()
	for _, path := range files {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			c.Fatal(err)
		}
		var b [1]byte
		if i, err := f.Stat(); err == nil && i.Size() > 0 {
			at := r.Int64N(i.Size())
			_, err = f.ReadAt(b[:], at)
			b[0] ^= 0x55
			_, err2 := f.WriteAt(b[:], at)
			if err = errors.Join(err, err2); err != nil {
				c.Fatal(err)
			}
		}
		f.Close()
	}
	c.events.damaged(v.executor.name, from)
	c.kill(v)
	v.close()
	c.await(damagedJournal)
}
