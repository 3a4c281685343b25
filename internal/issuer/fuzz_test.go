package issuer

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// An address or a code that is accepted is written as it was read, and no error contains the secret.
func FuzzParseCode(f *testing.F) {
	hash, secret := strings.Repeat("A", 43), strings.Repeat("A", 22)
	for _, s := range []string{"", "#", "##", "service:7466#" + hash + "#" + secret, "[::1]:1#" + hash + "#" + secret, "service:0#" + hash + "#" + secret,
		"service:7466#" + hash + "#" + secret + "#", "service:7466#" + hash + "#" + secret[1:] + "B", ":1#" + hash + "#" + secret} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		c, err := ParseCode(s)
		if err == nil && c.Text() != s {
			t.Errorf("%q is written as %q", s, c.Text())
		}
		if _, after, _ := strings.Cut(s, "#"); err != nil && len(after) > 40 && strings.Contains(err.Error(), after) {
			t.Errorf("%q: the error is %v", s, err)
		}
		if a, err := ParseAddress(s); err == nil && a.String() != s {
			t.Errorf("%q is written as %q", s, a)
		}
	})
}

// A request without a valid code is refused with a reason, whatever it contains.
func FuzzEnrol(f *testing.F) {
	dir := filepath.Join(f.TempDir(), "cluster")
	if err := identity.InitCluster(dir, "test", time.Hour, time.Now()); err != nil {
		f.Fatal(err)
	}
	cluster, err := identity.OpenCluster(dir)
	if err != nil {
		f.Fatal(err)
	}
	_, err = identity.JoinNode(f.TempDir(), "", [32]byte{}, []string{"node7", "192.0.2.7"}, false, func(r *identity.NodeRequest) (*identity.NodeReply, error) {
		b, err := json.Marshal(enrolRequest{make([]byte, identity.SecretSize), *r})
		f.Add(b)
		return nil, errors.Join(err, os.ErrClosed)
	}, time.Now())
	if !errors.Is(err, os.ErrClosed) {
		f.Fatal(err)
	}
	f.Add([]byte(`{"secret":"","node":"","page":""}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		var q enrolRequest
		if parse(bytes.NewReader(body), maxRequest, &q) != nil {
			return
		}
		_, err := cluster.Enrol(q.Secret, &q.NodeRequest, nil, time.Hour, time.Now())
		var e *identity.Error
		if !errors.As(err, &e) || e.Reason != identity.Malformed && e.Reason != identity.Wrong {
			t.Errorf("%q: %v", body, err)
		}
	})
}
