package control

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// issued has the tokens of one cluster.
type issued struct {
	t       *testing.T
	cluster *identity.Cluster
	path    string // of the token file
}

func newIssued(t *testing.T) *issued {
	t.Helper()
	dir := t.TempDir()
	if err := identity.InitCluster(filepath.Join(dir, "cluster"), "test", time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	c, err := identity.OpenCluster(filepath.Join(dir, "cluster"))
	if err != nil {
		t.Fatal(err)
	}
	return &issued{t, c, filepath.Join(dir, "token")}
}

// content returns the content of a token file.
func (i *issued) content(tenant string, life time.Duration) []byte {
	i.t.Helper()
	now := time.Now()
	cred, err := i.cluster.IssueToken(identity.Claims{Tenant: tenant, Role: "tenant", Begins: now.Add(-24 * time.Hour).Unix(),
		Ends: now.Add(life).Unix()}, nil, now)
	if err != nil {
		i.t.Fatal(err)
	}
	b, err := cred.Encode()
	if err != nil {
		i.t.Fatal(err)
	}
	return b
}

func (i *issued) write(b []byte) {
	i.t.Helper()
	if err := os.RemoveAll(i.path); err != nil {
		i.t.Fatal(err)
	}
	if err := identity.WriteFile(i.path, b, 0o600, false); err != nil {
		i.t.Fatal(err)
	}
}

// Only a valid token of the same tenant replaces the token in use.
func TestTokenFileChanges(t *testing.T) {
	i := newIssued(t)
	first, second := i.content("ann", time.Hour), i.content("ann", 2*time.Hour)
	for name, c := range map[string]struct {
		place func() // changes the file
		want  string // part of the problem
	}{
		"another tenant":     {func() { i.write(i.content("bob", 3*time.Hour)) }, `it is of tenant "bob" now`},
		"expired":            {func() { i.write(i.content("ann", -time.Minute)) }, "its token expired at"},
		"missing":            {func() { os.Remove(i.path) }, "no such file"},
		"empty":              {func() { i.write(nil) }, "contains no token"},
		"cut off":            {func() { i.write(second[:len(second)/2]) }, "token file"},
		"text":               {func() { i.write([]byte("ann\n")) }, "contains no token"},
		"zeros":              {func() { i.write(make([]byte, 4096)) }, "contains no token"},
		"too large":          {func() { i.write(append(bytes.Clone(second), make([]byte, 1<<20)...)) }, "more than"},
		"other key":          {func() { i.write(otherKey(t, first, second)) }, "key is not the one"},
		"damaged":            {func() { i.write(bytes.Replace(second, []byte("MIIB"), []byte("AAAA"), 1)[1:]) }, "token file"},
		"readable by others": {func() { i.write(second); os.Chmod(i.path, 0o644) }, "mode 0644"},
		"a directory":        {func() { os.Remove(i.path); os.Mkdir(i.path, 0o700) }, "not a regular file"},
		"a pipe":             {func() { os.Remove(i.path); unix.Mkfifo(i.path, 0o600) }, "not a regular file"},
	} {
		t.Run(name, func(t *testing.T) {
			i.write(first)
			token, err := OpenToken(i.path)
			if err != nil {
				t.Fatal(err)
			}
			later := time.Now()
			look := func() string { // as of a second later each time
				later = later.Add(2 * lookAgain)
				return token.get(later).Claims.ID
			}
			was := look()
			c.place()
			if id := look(); id != was {
				t.Errorf("token %s was replaced by %s", was, id)
			}
			if s := token.State(); s.Problem == nil || !strings.Contains(s.Problem.Error(), c.want) || s.Tenant != "ann" || s.ID != was {
				t.Errorf("%+v, want a problem with %q", s, c.want)
			}
			i.write(second)
			if id := look(); id == was {
				t.Error("a renewed token is not used")
			}
			if s := token.State(); s.Problem != nil || s.ID == was || time.Until(s.Expires) < time.Hour {
				t.Errorf("with the renewed token: %+v", s)
			}
		})
	}
}

// otherKey returns a token file with the token of b and the key of a.
func otherKey(t *testing.T, a, b []byte) []byte {
	t.Helper()
	cut := []byte("-----BEGIN PRIVATE")
	i, j := bytes.Index(a, cut), bytes.Index(b, cut)
	if i < 0 || j < 0 {
		t.Fatal("no key in a token file")
	}
	return append(bytes.Clone(b[:j]), a[i:]...)
}

func TestOpenToken(t *testing.T) {
	i := newIssued(t)
	if _, err := OpenToken(i.path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	i.write([]byte("no token"))
	if _, err := OpenToken(i.path); ClassOf(err) != ClassInvalid {
		t.Errorf("a file without a token: %v", err)
	}
	// A new session may begin with an expired token: the daemon says so.
	i.write(i.content("ann", -time.Hour))
	token, err := OpenToken(i.path)
	if err != nil {
		t.Fatal(err)
	}
	if s := token.State(); s.Problem != nil || time.Until(s.Expires) > 0 {
		t.Errorf("%+v", s)
	}
	// A token that expired later replaces it.
	i.write(i.content("ann", -time.Minute))
	was := token.State().ID
	if c := token.get(time.Now().Add(time.Minute)); c.Claims.ID == was {
		t.Errorf("still token %s", was)
	}
}
