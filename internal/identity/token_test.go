package identity

import (
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The day of all tests.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// testCluster is a cluster with one token's credentials.
func testCluster(t testing.TB, claims Claims) (*Cluster, *Credentials, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "cluster")
	if err := InitCluster(dir, "test", 24*time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	c, err := OpenCluster(dir)
	if err != nil {
		t.Fatal(err)
	}
	cred, err := c.IssueToken(claims, nil, noon)
	if err != nil {
		t.Fatal(err)
	}
	return c, cred, dir
}

func ann() Claims {
	uid := uint32(1001)
	return Claims{Tenant: "ann", UID: &uid, Role: "tenant", Ends: noon.Add(time.Hour).Unix()}
}

func reason(err error) Reason {
	var e *Error
	if errors.As(err, &e) {
		return e.Reason
	}
	return ""
}

func nonce(b byte) []byte { return append(make([]byte, NonceSize-1), b) }

func TestToken(t *testing.T) {
	c, cred, _ := testCluster(t, ann())
	v, err := OpenVerifier(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, ch := range map[string]*Channel{"tls": {Binding: []byte("x")}, "plain": {Nonce: nonce(1)}} {
		text := ProveToken(cred.Token, cred.Key, ch, noon)
		at := &Channel{Binding: ch.Binding} // as the server knows it
		id, err := v.Verify(text, at, noon)
		if err != nil || id.Tenant != "ann" || *id.UID != 1001 || id.Role != RoleTenant || id.By != "token" || !id.Expires.Equal(noon.Add(time.Hour)) {
			t.Errorf("%s: %+v, %v", name, id, err)
		}
		if err := v.Recheck(&id, text, noon.Add(59*time.Minute)); err != nil {
			t.Errorf("%s: within its time: %v", name, err)
		}
		if err := v.Recheck(&id, text, noon.Add(time.Hour)); reason(err) != Expired || !strings.Contains(err.Error(), "ann") {
			t.Errorf("%s: after its time: %v", name, err)
		}
	}
}

func TestTokenRefused(t *testing.T) {
	c, cred, dir := testCluster(t, ann())
	_, others, _ := testCluster(t, ann())
	v, err := OpenVerifier(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	body, sig, _ := strings.Cut(strings.TrimPrefix(cred.Token, tokenPrefix), ".")
	signed := func(claims string) string { // with the right key, in the wrong form
		s := tokenPrefix + base64.RawURLEncoding.EncodeToString([]byte(claims))
		return s + "." + base64.RawURLEncoding.EncodeToString(ed25519.Sign(c.token, []byte(s)))
	}
	changed := []byte(body)
	changed[len(changed)/2] ^= 1
	for name, k := range map[string]struct {
		token string
		want  Reason
		text  string
	}{
		"empty":          {"", Malformed, `"rfaas1."`},
		"other version":  {"rfaas2." + body + "." + sig, Malformed, `"rfaas1."`},
		"no signature":   {tokenPrefix + body, Malformed, "signature is missing"},
		"short":          {cred.Token[:len(cred.Token)-2], Malformed, "64 bytes"},
		"not base64":     {tokenPrefix + "??." + sig, Malformed, "base64"},
		"long":           {tokenPrefix + strings.Repeat("A", maxToken), Malformed, "2048"},
		"changed":        {tokenPrefix + string(changed) + "." + sig, "", ""},
		"other cluster":  {others.Token, Wrong, "not signed"},
		"other's body":   {tokenPrefix + body + others.Token[strings.LastIndex(others.Token, "."):], Wrong, "not signed"},
		"not JSON":       {signed("x"), Malformed, "claims"},
		"unknown claim":  {signed(`{"id":"00112233445566778899aabbccddeeff","admin":true}`), Malformed, "admin"},
		"two":            {signed(`{} {}`), Malformed, "more than one"},
		"no id":          {signed(`{}`), Malformed, "id"},
		"negative times": {signed(`{"id":"00112233445566778899aabbccddeeff","tenant":"a","role":"tenant","key":"` + strings.Repeat("A", 43) + `=","nbf":-1,"exp":5}`), Malformed, "-1"},
		"uid -1":         {signed(`{"id":"00112233445566778899aabbccddeeff","tenant":"a","uid":4294967295,"role":"tenant","key":"` + strings.Repeat("A", 43) + `=","nbf":1,"exp":5}`), Malformed, "4294967295"},
		"role node":      {signed(`{"id":"00112233445566778899aabbccddeeff","tenant":"a","role":"node","key":"` + strings.Repeat("A", 43) + `=","nbf":1,"exp":5}`), Malformed, "node"},
	} {
		_, err := v.Check(k.token, noon)
		if err == nil || k.want != "" && (reason(err) != k.want || !strings.Contains(err.Error(), k.text)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for at, want := range map[time.Duration]Reason{-time.Minute: TooEarly, -Leeway: "", 0: "", time.Hour - time.Second: "", time.Hour: Expired} {
		if _, err := v.Check(cred.Token, noon.Add(at)); reason(err) != want {
			t.Errorf("at noon%+v: %v", at, err)
		}
	}
	// Revocation is seen without a restart; renewal of the same holder is another token.
	if _, _, err := c.Revoke(noon, Revocation{RevokedToken, cred.Claims.ID, "ann has left us"}); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Check(cred.Token, noon.Add(2*time.Second)); reason(err) != Revoked {
		t.Errorf("revoked: %v", err)
	}
	again := ann()
	renewed, err := c.IssueToken(again, cred.Key, noon)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.Check(renewed.Token, noon); err != nil || renewed.Claims.ID == cred.Claims.ID {
		t.Errorf("renewed: %v", err)
	}
	// With a list that cannot be read no token is taken.
	os.Remove(filepath.Join(dir, fileRevoked))
	os.Mkdir(filepath.Join(dir, fileRevoked), 0o700)
	if _, err := v.Check(renewed.Token, noon.Add(4*time.Second)); reason(err) != Revoked || !strings.Contains(err.Error(), "cannot check whether it is revoked") {
		t.Errorf("unreadable list: %v", err)
	}
}

func TestIssueRefuses(t *testing.T) {
	c, _, _ := testCluster(t, ann())
	for name, change := range map[string]func(*Claims){
		"no tenant":   func(c *Claims) { c.Tenant = "" },
		"long tenant": func(c *Claims) { c.Tenant = strings.Repeat("a", 65) },
		"two lines":   func(c *Claims) { c.Tenant = "a\nb" },
		"role":        func(c *Claims) { c.Role = "king" },
		"node":        func(c *Claims) { c.Role = "node" },
		"times":       func(c *Claims) { c.Begins, c.Ends = 10, 10 },
		"id":          func(c *Claims) { c.ID = "xyz" },
	} {
		claims := ann()
		change(&claims)
		if _, err := c.IssueToken(claims, nil, noon); reason(err) != Malformed {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Proofs are good for one connection, one time and one place.
func TestProofs(t *testing.T) {
	c, cred, _ := testCluster(t, ann())
	tokens, err := OpenVerifier(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	secret := []byte("0123456789abcdef0123456789abcdef")
	for scheme, k := range map[string]struct {
		v     Verifier
		prove func(*Channel, time.Time) string
	}{
		SchemeToken: {tokens, func(ch *Channel, at time.Time) string { return ProveToken(cred.Token, cred.Key, ch, at) }},
		SchemeSecret: {&SecretVerifier{secret, &Replays{}}, func(ch *Channel, at time.Time) string {
			return ProveSecret(secret, ch, at)
		}},
	} {
		n := byte(0)
		try := func(name string, made, got *Channel, at, now time.Time, want Reason, text string) {
			t.Helper()
			n++
			if made.Nonce == nil && made.Binding == nil {
				made.Nonce = nonce(n)
			}
			_, err := k.v.Verify(k.prove(made, at), got, now)
			if reason(err) != want || err != nil && !strings.Contains(err.Error(), text) {
				t.Errorf("%s, %s: %v, want %q %q", scheme, name, err, want, text)
			}
		}
		try("good", &Channel{}, &Channel{}, noon, noon, "", "")
		try("clocks 29 s apart", &Channel{}, &Channel{}, noon, noon.Add(29*time.Second), "", "")
		try("a minute late", &Channel{}, &Channel{}, noon, noon.Add(time.Minute), Skew, "differ by 1m0s")
		try("a minute early", &Channel{}, &Channel{}, noon.Add(time.Minute), noon, Skew, "set the clocks")
		try("address", &Channel{Address: "127.0.0.1:5"}, &Channel{Address: "127.0.0.1:5"}, noon, noon, "", "")
		try("passed on", &Channel{Address: "127.0.0.1:6"}, &Channel{Address: "127.0.0.1:5"}, noon, noon, Replayed, "127.0.0.1:6")
		try("passed on to where no address is known", &Channel{Address: "127.0.0.1:6"}, &Channel{}, noon, noon, Replayed, "127.0.0.1:6")
		try("without an address", &Channel{}, &Channel{Address: "10.0.0.7:5"}, noon, noon, Replayed, "10.0.0.7:5")
		try("other TLS connection", &Channel{Binding: []byte("a")}, &Channel{Binding: []byte("b")}, noon, noon, Wrong, "another connection")
		try("from plain to TLS", &Channel{}, &Channel{Binding: []byte("b")}, noon, noon, Malformed, "nonce")
		try("from TLS to plain", &Channel{Binding: []byte("a")}, &Channel{}, noon, noon, Malformed, "nonce")

		first, second := &Channel{}, &Channel{}
		text := k.prove(&Channel{Nonce: nonce(200)}, noon)
		for i, ch := range []*Channel{first, first, second, first} {
			_, err := k.v.Verify(text, ch, noon)
			if want := map[bool]Reason{true: Replayed}[ch == second]; reason(err) != want {
				t.Errorf("%s, use %d: %v", scheme, i, err)
			}
		}
		for at := range 2 * int(Leeway/time.Second) { // as long as it is fresh, it is remembered
			if _, err := k.v.Verify(text, second, noon.Add(time.Duration(at)*time.Second)); reason(err) != Replayed && reason(err) != Skew {
				t.Errorf("%s, replayed after %d s: %v", scheme, at, err)
			}
		}
		for _, bad := range []string{"", "x", "1.2.3", "a.b.c.d", "1.?.?.?", "-1...", strings.Repeat("1", 600), k.prove(&Channel{Nonce: []byte{1}}, noon)} {
			if scheme == SchemeToken && !strings.Contains(bad, " ") {
				bad = cred.Token + " " + bad
			}
			if _, err := k.v.Verify(bad, &Channel{}, noon); reason(err) != Malformed {
				t.Errorf("%s, %.20q: %v", scheme, bad, err)
			}
		}
	}
	// A token alone, and a token with a proof made with another key.
	if _, err := tokens.Verify(cred.Token, &Channel{}, noon); reason(err) != Malformed {
		t.Errorf("without a proof: %v", err)
	}
	_, thief, _ := ed25519.GenerateKey(nil)
	if _, err := tokens.Verify(ProveToken(cred.Token, thief, &Channel{Nonce: nonce(201)}, noon), &Channel{}, noon); reason(err) != Wrong {
		t.Errorf("with another key: %v", err)
	}
	if _, err := (&SecretVerifier{[]byte("other"), &Replays{}}).Verify(ProveSecret(secret, &Channel{Nonce: nonce(1)}, noon), &Channel{}, noon); reason(err) != Wrong ||
		!strings.Contains(err.Error(), "wrong secret") {
		t.Errorf("wrong secret: %v", err)
	}
}

func TestReplaysAreForgotten(t *testing.T) {
	var r Replays
	for i := range 1000 {
		n := [NonceSize]byte{byte(i), byte(i >> 8)}
		if err := r.take(n, "ann", &Channel{}, noon.Add(time.Duration(i)*time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.first) > 120 || r.of["ann"] != len(r.first) {
		t.Errorf("%d nonces of 1000 s are remembered, %d of ann", len(r.first), r.of["ann"])
	}
}

// A tenant that makes one connection after another does not keep other tenants and operators from connecting.
func TestReplaysOfOneTenant(t *testing.T) {
	var r Replays
	made := 0
	take := func(party string, at time.Time) error {
		made++
		return r.take([NonceSize]byte{byte(made), byte(made >> 8), byte(made >> 16)}, party, &Channel{}, at)
	}
	var err error
	for range maxNonces {
		if err = take("ann", noon); err != nil {
			break
		}
	}
	if reason(err) != Overload || !strings.Contains(err.Error(), `tenant "ann"`) || len(r.first) > maxNonces/4 {
		t.Errorf("after %d connections: %v", len(r.first), err)
	}
	for _, party := range []string{"ben", ""} {
		if err := take(party, noon); err != nil {
			t.Errorf("%q: %v", party, err)
		}
	}
	for range maxOfParty + 1 {
		if err := take("", noon); err != nil {
			t.Fatalf("an operator: %v", err)
		}
	}
	if err := take("ann", noon.Add(3*Leeway)); err != nil {
		t.Errorf("a while later: %v", err)
	}
}

func TestCredentialsFile(t *testing.T) {
	_, cred, dir := testCluster(t, ann())
	b, err := cred.Encode()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "token")
	if err := WriteFile(path, b, 0o600, true); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path, b, 0o600, true); !errors.Is(err, fs.ErrExist) {
		t.Errorf("written over: %v", err)
	}
	got, err := LoadCredentials(path)
	if err != nil || got.Token != cred.Token || !got.Key.Equal(cred.Key) || string(got.CA) != string(cred.CA) {
		t.Fatalf("%+v, %v", got, err)
	}
	os.Chmod(path, 0o640)
	if _, err := LoadCredentials(path); err == nil || !strings.Contains(err.Error(), "0640") {
		t.Errorf("readable by others: %v", err)
	}
	if _, err := LoadCredentials(path + "x"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent: %v", err)
	}
	_, other, _ := testCluster(t, ann())
	mixed := &Credentials{Token: cred.Token, Claims: cred.Claims, Key: other.Key}
	b, _ = mixed.Encode()
	for text, want := range map[string]string{"": "no token", "nonsense": "no token", string(b): "not the one"} {
		if _, err := ParseCredentials([]byte(text)); reason(err) == "" || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v", text, err)
		}
	}
}

func TestCluster(t *testing.T) {
	c, _, dir := testCluster(t, ann())
	if err := InitCluster(dir, "again", time.Hour, noon); !errors.Is(err, fs.ErrExist) {
		t.Errorf("made twice: %v", err)
	}
	for _, key := range []string{fileCAKey, fileTokenKey} {
		if st, err := os.Stat(filepath.Join(dir, key)); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", key, st.Mode(), err)
		}
	}
	node := filepath.Join(t.TempDir(), "node")
	for _, bad := range [][]string{nil, {"a b"}, {"*.a"}, {""}} {
		if err := c.IssueNode(node, bad, time.Hour, noon); err == nil {
			t.Errorf("hosts %q", bad)
		}
	}
	if err := c.IssueNode(node, []string{"node7", "10.0.0.7"}, time.Hour, noon); err != nil {
		t.Fatal(err)
	}
	n, err := OpenNode(node, nil, nil, noon)
	if err != nil {
		t.Fatal(err)
	}
	if id := n.Hosts(noon); id.Role != RoleNode || strings.Join(id.Hosts, " ") != "node7 10.0.0.7" || id.MayUse("") {
		t.Errorf("%+v", id)
	}
	if _, err := OpenNode(node, nil, nil, noon.Add(2*time.Hour)); err == nil || !strings.Contains(err.Error(), "valid from") {
		t.Errorf("expired certificate: %v", err)
	}
	if _, err := os.Stat(filepath.Join(node, fileCAKey)); err == nil {
		t.Error("a node has the cluster's key")
	}
	if _, err := OpenCluster(node); err == nil {
		t.Error("a node is a cluster")
	}
	if _, err := OpenCluster(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "rfaas cluster init") {
		t.Errorf("no cluster: %v", err)
	}
}

// Each token is listed before its user gets it. Damaged lines are named, and hide no others.
func TestIssuedTokensAreListed(t *testing.T) {
	c, first, dir := testCluster(t, ann())
	path := filepath.Join(dir, fileIssued)
	want := []Claims{first.Claims}
	issue := func() {
		t.Helper()
		cred, err := c.IssueToken(ann(), nil, noon)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, cred.Claims)
	}
	check := func(damaged string) {
		t.Helper()
		got, err := c.Issued()
		if !reflect.DeepEqual(got, want) {
			t.Errorf("listed %+v, want %+v", got, want)
		}
		if (err == nil) != (damaged == "") || err != nil && !strings.Contains(err.Error(), damaged) {
			t.Errorf("error %v, want one with %q", err, damaged)
		}
	}
	issue()
	check("")
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(b, `{"id":"0`...), 0o600); err != nil { // an append that was cut off
		t.Fatal(err)
	}
	issue()
	check("issued: line 3 is damaged")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	want = nil
	check("")
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if cred, err := c.IssueToken(ann(), nil, noon); err == nil {
		t.Errorf("a token that is not listed: %+v", cred)
	}
}

// Any token gives claims that meet Check, or an *Error. Only tokens that we have signed are taken.
func FuzzToken(f *testing.F) {
	c, cred, _ := testCluster(f, ann())
	v, err := OpenVerifier(c.dir)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(cred.Token)
	f.Add(ProveToken(cred.Token, cred.Key, &Channel{Nonce: nonce(1)}, noon))
	f.Add(tokenPrefix + "e30.AA")
	f.Fuzz(func(t *testing.T, text string) {
		if claims, err := ReadClaims(text); err == nil && claims.Check() != nil || err != nil && reason(err) == "" {
			t.Errorf("%q: %+v, %v", text, claims, err)
		}
		if _, err := v.Check(text, noon); err == nil && text != cred.Token {
			t.Errorf("%q is taken", text)
		}
		if id, err := v.Verify(text, &Channel{}, noon); err == nil && !strings.HasPrefix(text, cred.Token+" ") || err != nil && reason(err) == "" {
			t.Errorf("%q: %+v, %v", text, id, err)
		}
	})
}
