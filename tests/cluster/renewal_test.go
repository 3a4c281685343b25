package cluster

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/issuer"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Daemons renew their certificates at the issuer and use the new ones without a restart: the resource manager writes its identity directory
// itself. The executor has given up root, and cannot read what root writes there for it.
func TestDaemonsRenewTheirCertificates(t *testing.T) {
	testkit.Root(t, "runs an executor that gives up root")
	c := newCluster(t)
	c.install(current)
	keys := filepath.Join(c.dir, "keys")
	if err := identity.InitCluster(keys, "test", 1000*time.Hour, time.Now().Add(-50*time.Hour)); err != nil {
		t.Fatal(err)
	}
	cl, err := identity.OpenCluster(keys)
	if err != nil {
		t.Fatal(err)
	}
	var behind atomic.Int64 // the issuer's clock
	behind.Store(int64(11 * time.Hour))
	clock := func() time.Time { return time.Now().Add(-time.Duration(behind.Load())) }
	server, err := issuer.NewServer(issuer.Config{Cluster: cl, Hosts: []string{"127.0.0.1"}, NodeLife: 30 * time.Hour, Now: clock})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	join := func(name string) string { // 11 of 30 hours of its certificate have passed
		secret, err := cl.NewEnrolCode([]string{name, "127.0.0.1"}, 100*time.Hour, clock())
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(c.root, name)
		if _, err := issuer.Join(t.Context(), issuer.Code{Address: issuer.AddressOf(l.Addr().String(), cl.CA()), Secret: secret}, dir, []string{name, "127.0.0.1"}, false); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	daemons := map[string][]string{"bin/resource-manager": nil, "bin/executor": {"--sandbox", "on", "--cores", "1"}}
	for program, args := range daemons {
		name := filepath.Base(program)
		dir, web := join(name), filepath.Join(c.root, name+".http")
		before, err := identity.ReadCertificate(dir)
		if err != nil {
			t.Fatal(err)
		}
		behind.Store(0)
		p := c.start(program, append(args, "--identity-dir", dir, "--http-listen", "unix:"+web)...)
		p.await(t, "renewed the certificate", "cannot renew")
		behind.Store(int64(11 * time.Hour))
		after, err := identity.ReadCertificate(dir)
		if err != nil || !after.NotAfter.After(before.NotAfter) {
			t.Errorf("%s: the certificate in its directory is valid until %v, was until %v: %v", name, after.NotAfter, before.NotAfter, err)
		}
		expiry := strconv.FormatFloat(float64(after.NotAfter.Unix()), 'g', -1, 64)
		testkit.Eventually(t, name+" uses the new certificate", func() bool {
			_, metrics := c.get(web, "/metrics")
			return strings.Contains(metrics, `rfaas_certificate_expiry_timestamp_seconds{certificate="node"} `+expiry+"\n")
		})
		if _, metrics := c.get(web, "/metrics"); !strings.Contains(metrics, `rfaas_certificate_renewals_total{result="renewed"} 1`+"\n") ||
			!strings.Contains(metrics, `rfaas_certificate_renewals_total{result="failed"} 0`+"\n") {
			t.Errorf("%s does not count one renewal", name)
		}
		if st, err := os.Stat(filepath.Join(dir, "node.key")); err != nil || st.Mode().Perm() != 0o600 || uid(st) != 0 {
			t.Errorf("%s: the new key: %v, %v", name, st, err)
		}
		p.end(t)
	}
}

func uid(st os.FileInfo) uint32 { return st.Sys().(*syscall.Stat_t).Uid }
