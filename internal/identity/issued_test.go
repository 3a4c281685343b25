package identity

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// requestFor returns the request of a node with new keys.
func requestFor(t *testing.T, hosts ...string) *NodeRequest {
	t.Helper()
	keys, err := newNodeKeys()
	if err != nil {
		t.Fatal(err)
	}
	q, err := keys.request(hosts)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// While a thief renews a node's certificate, one revocation ends all of its certificates.
func TestRevokeWhileRenewing(t *testing.T) {
	c, dir := issued(t)
	old, err := ReadCertificate(dir)
	if err != nil {
		t.Fatal(err)
	}
	q := requestFor(t, "node7")
	var made atomic.Int32
	some := make(chan struct{})
	var thieves sync.WaitGroup
	for range 8 {
		thieves.Go(func() {
			for {
				if _, err := c.Renew(old, q, time.Hour, noon); err != nil {
					if reason(err) != Revoked {
						t.Error(err)
					}
					return
				}
				if made.Add(1) == 20 {
					close(some)
				}
			}
		})
	}
	<-some
	entries, l, _, err := c.RevokeNode("node7", "stolen", noon)
	if err != nil || len(entries) < 20 {
		t.Fatalf("revoked %d: %v", len(entries), err)
	}
	thieves.Wait()
	nodes, err := c.Nodes()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		if !l.Has(RevokedNode, n.Serial) {
			t.Errorf("%s is valid, and %d are revoked", n.Serial, len(entries))
		}
	}
}

// A certificate is found by each of its names, and by its address.
func TestRevokeNodeNames(t *testing.T) {
	c, _ := issued(t)
	if err := c.IssueNode(filepath.Join(t.TempDir(), "n"), []string{"zzz.", "node9", "192.0.2.9"}, time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	for _, h := range []string{"ZZZ", "zzz.", "node9.", "192.0.2.9"} {
		nodes, err := c.Nodes()
		if last := nodes[len(nodes)-1]; err != nil || !last.Has(h) || last.Hosts[0] != "zzz" || last.Has("node7") {
			t.Errorf("%s: %+v, %v", h, last, err)
		}
	}
	if entries, _, _, err := c.RevokeNode("node9", "", noon); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
	if _, l, _, err := c.RevokeNode("node9", "", noon); l != nil || err == nil || !strings.Contains(err.Error(), "no valid certificate") {
		t.Errorf("again: %v", err)
	}
}

// A renewed certificate is valid for at most as long as the one before.
func TestRenewKeepsLife(t *testing.T) {
	c, dir := issued(t)
	old, err := ReadCertificate(dir)
	if err != nil {
		t.Fatal(err)
	}
	q := requestFor(t, "node7")
	for valid, want := range map[time.Duration]time.Duration{time.Minute: time.Minute, 1000 * time.Hour: old.NotAfter.Sub(noon)} {
		reply, err := c.Renew(old, q, valid, noon)
		if err != nil {
			t.Fatal(err)
		}
		made, err := ParseCertificate([]byte(reply.Certificate))
		if err != nil || made.NotAfter.Sub(noon) != want {
			t.Errorf("%v: until %v, want %v, %v", valid, made.NotAfter.Sub(noon), want, err)
		}
	}
}

// The reply of an issuer with certificates for other keys replaces nothing.
func TestReplyForOtherKeys(t *testing.T) {
	c, dir := issued(t)
	foreign := requestFor(t, "node7")
	before, err := os.ReadFile(filepath.Join(dir, fileNode))
	if err != nil {
		t.Fatal(err)
	}
	for i, change := range []func(*NodeRequest){func(q *NodeRequest) { q.Node = foreign.Node }, func(q *NodeRequest) { q.Page = foreign.Page }} {
		_, err := JoinNode(dir, "", sha256.Sum256(c.ca.Raw), []string{"node7"}, true, func(q *NodeRequest) (*NodeReply, error) {
			change(q)
			hosts, keys, err := q.parse()
			if err != nil {
				return nil, err
			}
			return c.sign(hosts, keys, time.Hour, noon, c.record)
		}, noon)
		if after, rerr := os.ReadFile(filepath.Join(dir, fileNode)); err == nil || !strings.Contains(err.Error(), "another key") || rerr != nil || string(after) != string(before) {
			t.Errorf("%d: %v, %v", i, err, rerr)
		}
	}
}

// What expired is removed from all lists, also from a revocation list that users have filled and from lists that are too long.
func TestPrune(t *testing.T) {
	c, _, dir := testCluster(t, ann())
	uid := uint32(1000)
	claims := ann()
	claims.UID, claims.Begins, claims.Ends = &uid, 0, noon.Add(time.Hour).Unix()
	cred, err := c.IssueToken(claims, nil, noon)
	if err != nil {
		t.Fatal(err)
	}
	l := &RevocationList{Serial: 5, Made: noon, Entries: []Revocation{{RevokedToken, cred.Claims.ID, ""}}}
	for i := range (maxRevoked - forOperators) / len("token 00112233445566778899aabbccddeeff\n") {
		l.Entries = append(l.Entries, Revocation{RevokedToken, fmt.Sprintf("%032x", i), ""})
	}
	write := func() {
		t.Helper()
		b, err := l.Sign(c.token)
		if err != nil {
			t.Fatal(err)
		}
		if err := WriteFile(filepath.Join(dir, fileRevoked), b, 0o644, false); err != nil {
			t.Fatal(err)
		}
	}
	write()
	if _, err := c.IssueToken(claims, nil, noon); err != nil {
		t.Fatal(err)
	}
	if _, err := c.RevokeOf(uid, "", noon); err == nil || !strings.Contains(err.Error(), "want at most") {
		t.Errorf("a user's revocation in a full list: %v", err)
	}
	if _, _, err := c.Revoke(noon, Revocation{RevokedNode, fmt.Sprintf("%032x", 7), "stolen"}); err != nil {
		t.Errorf("the operator's: %v", err)
	}
	l.Serial, l.Entries = 9, l.Entries[:2]
	write()
	has := func() bool {
		t.Helper()
		list, err := c.Revocations()
		if err != nil || len(list.Entries) == 0 {
			t.Fatal(list, err)
		}
		return list.Has(RevokedToken, cred.Claims.ID)
	}
	if err := c.Prune(noon.Add(2 * time.Hour)); err != nil || !has() {
		t.Errorf("soon after the expiry: %v", err)
	}
	if err := c.Prune(noon.Add(time.Hour + revokedKept + time.Second)); err != nil || has() {
		t.Errorf("a day after the expiry: %v", err)
	}
	path := filepath.Join(dir, fileIssued)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString("damaged\n{}\n"); err != nil {
		t.Fatal(err)
	}
	if err := c.Prune(noon.Add(time.Hour + tokensKept + time.Second)); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(path); err != nil || strings.Contains(string(b), cred.Claims.ID) || !strings.Contains(string(b), "damaged\n{}\n") {
		t.Errorf("%s, %v", b, err)
	}
	// A list at its bound takes no more lines.
	if err := os.Truncate(path, maxIssued); err != nil {
		t.Fatal(err)
	}
	if _, err := c.IssueToken(claims, nil, noon); err == nil || !strings.Contains(err.Error(), "more than it may have") {
		t.Errorf("a full list: %v", err)
	}
}

// A list that is a link is not followed, and a directory of another user is not used.
func TestListIsNoLink(t *testing.T) {
	c, _, dir := testCluster(t, ann())
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(dir, fileNodes)); err != nil {
		t.Fatal(err)
	}
	if err := c.IssueNode(filepath.Join(t.TempDir(), "n"), []string{"node1"}, time.Hour, noon); err == nil {
		t.Error("a link is followed")
	}
	if os.Geteuid() != 0 {
		return
	}
	if err := os.Chown(dir, 1, 1); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Revoke(noon, Revocation{RevokedNode, fmt.Sprintf("%032x", 7), ""}); err == nil || !strings.Contains(err.Error(), "belongs to user 1") {
		t.Error(err)
	}
}
