package agent

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/issuer"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// issuer starts the cluster's issuer, whose tenants are rules, and returns its address and what ends it.
func (r *realm) issuer(rules string) (issuer.Address, func()) {
	r.t.Helper()
	tenants, err := identity.ParseTenants(rules)
	if err != nil {
		r.t.Fatal(err)
	}
	s, err := issuer.NewServer(issuer.Config{Cluster: r.cluster, Hosts: []string{"127.0.0.1"}, NodeLife: time.Hour, Tenants: tenants, TokenLife: time.Hour})
	if err != nil {
		r.t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	return issuer.AddressOf(l.Addr().String(), r.cluster.CA()), func() {
		cancel()
		if err := <-done; err != nil {
			r.t.Error(err)
		}
	}
}

// A token that came from an issuer is renewed by the agent when less than a third of its life is left, also after failures.
func TestTokenIsRenewed(t *testing.T) {
	testkit.FakeMunge(t)
	r := newRealm(t)
	at, end := r.issuer("1=ann")
	cred, err := at.GetToken(t.Context(), issuer.Munge{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := cred.Encode()
	if err == nil {
		err = identity.WriteFile(r.token, b, 0o600, false)
	}
	if err != nil {
		t.Fatal(err)
	}
	r.connect()
	first := cred.Claims.ID
	at41, at59 := time.Now().Add(39*time.Minute), time.Now().Add(59*time.Minute)
	renew := func(now time.Time, want string) string {
		t.Helper()
		r.w.agent.renewTokens(t.Context(), now)
		read, err := identity.LoadCredentials(r.token)
		if err != nil || (read.Claims.ID == first) != (want == "kept") {
			t.Fatalf("at %v: %+v, %v, want %s", now, read, err, want)
		}
		return read.Claims.ID
	}
	renew(at41, "kept") // more than a third is left
	end()
	renew(at59, "kept")
	for _, s := range r.w.agent.tokens(at59) {
		if !strings.Contains(s.Warning, "the agent could not renew it") || !strings.Contains(s.Warning, "connection refused") {
			t.Errorf("without the issuer: %+v", s)
		}
	}
	renew(at59.Add(renewSoonest-time.Second), "kept") // it waits after a failure
	// The issuer is back at another address, which the file names.
	if at, end = r.issuer("1=ann"); true {
		t.Cleanup(end)
	}
	cred.Issuer = at.String()
	if b, err = cred.Encode(); err == nil {
		err = identity.WriteFile(r.token, b, 0o600, false)
	}
	if err != nil {
		t.Fatal(err)
	}
	second := renew(at59.Add(renewSoonest), "renewed")
	eventually(t, "the agent uses the new token", func() bool { return r.status().ID == second })
	if s := r.status(); s.Warning != "" {
		t.Errorf("after the renewal: %+v", s)
	}
	first = second
	renew(time.Now(), "kept")
}
