package identity

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func testList() *RevocationList {
	return &RevocationList{Serial: 7, Made: noon, Entries: []Revocation{{RevokedToken, strings.Repeat("0a", 16), "ann has left"}, {RevokedNode, strings.Repeat("0b", 16), ""}}}
}

// A list has exactly the signed content, or is refused.
func TestRevocationList(t *testing.T) {
	public, key, _ := ed25519.GenerateKey(nil)
	other, otherKey, _ := ed25519.GenerateKey(nil)
	b, err := testList().Sign(key)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ParseRevocations(b, []ed25519.PublicKey{other, public}); err != nil || fmt.Sprint(got) != fmt.Sprint(testList()) {
		t.Errorf("%+v, %v", got, err)
	}
	resign := func(text string) []byte { // what our key would not sign
		return fmt.Appendf(nil, "%ssignature %s\n", text, base64.StdEncoding.EncodeToString(ed25519.Sign(key, []byte(text))))
	}
	body := string(b[:bytes.LastIndex(b, []byte("signature "))])
	foreign, _ := testList().Sign(otherKey)
	for name, b := range map[string][]byte{
		"empty":             nil,
		"one byte":          b[:1],
		"no signature":      []byte(body),
		"cut off":           b[:len(b)-1],
		"more behind it":    append(bytes.Clone(b), "token x\n"...),
		"a line behind it":  append(bytes.Clone(b), '\n'),
		"a byte changed":    bytes.Replace(b, []byte("0a0a"), []byte("0a0b"), 1),
		"of another's key":  foreign,
		"with CRs":          bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n")),
		"of before":         []byte("# ids\n" + strings.Repeat("0a", 16) + " left\n"),
		"no head":           resign(strings.TrimPrefix(body, revokedHead)),
		"no serial":         resign(strings.Replace(body, "serial 7\n", "", 1)),
		"serial 0":          resign(strings.Replace(body, "serial 7", "serial 0", 1)),
		"serial of letters": resign(strings.Replace(body, "serial 7", "serial x", 1)),
		"no time":           resign(strings.Replace(body, "made 2", "made x", 1)),
		"unknown kind":      resign(strings.Replace(body, "node 0b", "user 0b", 1)),
		"short id":          resign(strings.Replace(body, "0b0b", "0b", 1)),
		"id in capitals":    resign(strings.Replace(body, "0b0b", "0B0b", 1)),
		"an empty line":     resign(body + "\n"),
	} {
		if l, err := ParseRevocations(b, []ed25519.PublicKey{public}); err == nil {
			t.Errorf("%s: %+v", name, l)
		} else if errors.Is(err, ErrUnsigned) != (name == "of before" || name == "one byte" || name == "no head" || name == "with CRs") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, change := range map[string]func(*RevocationList){
		"serial 0":      func(l *RevocationList) { l.Serial = 0 },
		"kind":          func(l *RevocationList) { l.Entries[0].Kind = "user" },
		"id":            func(l *RevocationList) { l.Entries[0].ID = "x" },
		"two lines":     func(l *RevocationList) { l.Entries[0].Note = "a\nb" },
		"note too long": func(l *RevocationList) { l.Entries[0].Note = strings.Repeat("a", maxNote+1) },
	} {
		l := testList()
		change(l)
		if _, err := l.Sign(key); err == nil {
			t.Errorf("%s: it is signed", name)
		}
	}
}

// A node's files and its revocation list are read only through its opener, at the start and when they change.
func TestOpener(t *testing.T) {
	c, cred, _ := testCluster(t, ann())
	real := filepath.Join(t.TempDir(), "node")
	if err := c.IssueNode(real, []string{"node7"}, time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	opened := map[string]int{}
	open := func(path string) (fs.File, error) { // opens what the node asks for in a directory that does not exist
		name, ok := strings.CutPrefix(path, "/nowhere/at/all/")
		if !ok {
			t.Errorf("opened %s", path)
		}
		mu.Lock()
		opened[name]++
		mu.Unlock()
		return os.Open(filepath.Join(real, name))
	}
	n, err := OpenNode("/nowhere/at/all", open, nil, noon)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{fileNode, fileNodeKey, fileCA, fileTokenPub, fileRevoked} {
		if opened[name] == 0 {
			t.Errorf("%s was not read", name)
		}
	}
	first := n.Files(noon).Certificate.Leaf
	reloads := make(chan struct{}, 1)
	n.OnReload(func() { reloads <- struct{}{} })
	if err := c.IssueNode(real, []string{"node7"}, 2*time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	if n.Files(noon.Add(lookAgain-1)).Certificate.Leaf != first {
		t.Error("the files were looked at twice within a second")
	}
	if got := n.Files(noon.Add(lookAgain)).Certificate.Leaf; got.Equal(first) {
		t.Error("the new certificate is not used")
	}
	<-reloads
	if _, path, err := c.Revoke(noon, Revocation{Kind: RevokedToken, ID: cred.Claims.ID}); err != nil {
		t.Fatal(err)
	} else if b, err := os.ReadFile(path); err != nil {
		t.Fatal(err)
	} else if err := WriteFile(filepath.Join(real, fileRevoked), b, 0o644, false); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Tokens.Check(cred.Token, noon.Add(2*lookAgain)); reason(err) != Revoked {
		t.Errorf("revoked: %v", err)
	}
}

// Certificates that expire within 30 days are logged once a day. Reloads and failed reloads are logged once.
func TestNodeWarns(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cluster")
	if err := InitCluster(dir, "test", 4000*24*time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	c, err := OpenCluster(dir)
	if err != nil {
		t.Fatal(err)
	}
	node := filepath.Join(t.TempDir(), "node")
	if err := c.IssueNode(node, []string{"node7"}, 60*24*time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	n, err := OpenNode(node, nil, slog.New(slog.NewTextHandler(&log, nil)), noon)
	if err != nil {
		t.Fatal(err)
	}
	said := func(day float64, text string, want int) {
		t.Helper()
		log.Reset()
		for i := range 5 {
			n.Watch(noon.Add(time.Duration(day*24*float64(time.Hour)) + time.Duration(i)*time.Minute))
		}
		if got := strings.Count(log.String(), text); got != want {
			t.Errorf("day %v: %q is said %d times, want %d:\n%s", day, text, got, want, log.String())
		}
	}
	expires := `level=WARN msg="a certificate expires soon`
	said(29, "level=", 0)
	said(30.5, expires, 2) // the node's and the page's
	said(30.9, expires, 0)
	said(31.6, expires, 2)
	said(61, `level=ERROR msg="a certificate has expired`, 2)
	if err := n.Trouble(noon.Add(61 * 24 * time.Hour)); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Errorf("after the end: %v", err)
	}
	if err := os.WriteFile(filepath.Join(node, fileNodeKey), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	said(61.01, `level=ERROR msg="cannot reload the identity`, 1)
	if err := c.IssueNode(node, []string{"node7"}, 400*24*time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	said(61.02, `level=INFO msg="reloaded the identity`, 1)
	if err := n.Trouble(noon.Add(62 * 24 * time.Hour)); err != nil {
		t.Errorf("with another certificate: %v", err)
	}
	own, err := ReadCertificate(node)
	if err != nil {
		t.Fatal(err)
	}
	_, path, err := c.Revoke(noon, Revocation{Kind: RevokedNode, ID: NodeSerial(own)})
	if err != nil {
		t.Fatal(err)
	}
	list, err := os.ReadFile(path)
	if err == nil {
		err = WriteFile(filepath.Join(node, fileRevoked), list, 0o644, false)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Trouble(noon.Add(63 * 24 * time.Hour)); reason(err) != Revoked {
		t.Errorf("with its own certificate revoked: %v", err)
	}
	said(63, `level=ERROR msg="the certificate of this daemon is revoked`, 1)
}

// Any file is the list that was signed, or an error.
func FuzzRevocations(f *testing.F) {
	public, key, _ := ed25519.GenerateKey(nil)
	b, err := testList().Sign(key)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(revokedHead + "serial 1\nmade 2026-03-01T12:00:00Z\nsignature AA==\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if l, err := ParseRevocations(text, []ed25519.PublicKey{public}); err == nil && !bytes.Equal(text, b) {
			t.Errorf("%q is taken for %+v", text, l)
		}
		if l, err := parseRevocations(string(text)); err == nil {
			if again, err := l.Sign(key); err != nil {
				t.Errorf("%+v: %v", l, err)
			} else if _, err := ParseRevocations(again, []ed25519.PublicKey{public}); err != nil {
				t.Errorf("%+v is not read back: %v", l, err)
			}
		}
	})
}

// A list that another daemon sent is used if the cluster signed it and it is newer. It never replaces a file that is missing or invalid.
func TestAdoptedRevocations(t *testing.T) {
	public, key, _ := ed25519.GenerateKey(nil)
	_, other, _ := ed25519.GenerateKey(nil)
	path := filepath.Join(t.TempDir(), "revoked")
	sign := func(serial uint64, key ed25519.PrivateKey) []byte {
		l := testList()
		l.Serial = serial
		b, err := l.Sign(key)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	write := func(b []byte) {
		if err := WriteFile(path, b, 0o644, false); err != nil {
			t.Fatal(err)
		}
	}
	write(sign(5, key))
	now := noon
	r := NewRevocations(path, nil, func(time.Time) []ed25519.PublicKey { return []ed25519.PublicKey{public} }, slog.New(slog.DiscardHandler))
	for _, c := range []struct {
		name    string
		list    []byte
		adopted bool
		serial  uint64
		refused bool
	}{
		{"older", sign(4, key), false, 5, false},
		{"the same", sign(5, key), false, 5, false},
		{"of another cluster", sign(9, other), false, 5, true},
		{"cut off", sign(9, key)[:40], false, 5, true},
		{"newer", sign(7, key), true, 7, false},
		{"older than the adopted one", sign(6, key), false, 7, false},
	} {
		adopted, err := r.Adopt(c.list, now)
		if adopted != c.adopted || (err != nil) != c.refused || r.Serial(now) != c.serial {
			t.Errorf("%s: adopted %t, %v, then serial %d", c.name, adopted, err, r.Serial(now))
		}
	}
	later := func() time.Time { now = now.Add(2 * time.Second); return now }
	write(sign(6, key))
	if n := r.Serial(later()); n != 7 {
		t.Errorf("with an older file: serial %d, want 7", n)
	}
	write(sign(8, key))
	if n := r.Serial(later()); n != 8 {
		t.Errorf("with a newer file: serial %d, want 8", n)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Has(RevokedToken, "x", later()); !errors.Is(err, fs.ErrNotExist) && (err == nil || !strings.Contains(err.Error(), "missing")) {
		t.Errorf("without a file: %v", err)
	}
}
