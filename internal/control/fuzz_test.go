package control

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// An address that is accepted reads back as itself, and plain text is refused wherever somebody could listen.
func FuzzParseAddress(f *testing.F) {
	for _, s := range []string{"127.0.0.1:7465", "[::1]:0", "localhost:1", "node7:65535", "unix:/run/rfaas", "unix:///run/rfaas",
		"unix:", ":80", "[fe80::1%eth0]:1", "a:b:c", "127.0.0.1:-1", "[::ffff:127.0.0.1]:9", "127.0.0.1.evil.example:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := ParseAddress(s)
		if err != nil {
			if !strings.Contains(err.Error(), "address") {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		if b, err := ParseAddress(a.String()); err != nil || b != a {
			t.Errorf("%q is %+v, written as %q is %+v, %v", s, a, a, b, err)
		}
		if (a.CheckPlaintext(false) == nil) != a.Local() || a.CheckPlaintext(true) != nil {
			t.Errorf("%q: local %t", s, a.Local())
		}
	})
}

// A secret file is the 32 bytes that it spells, or an error that does not tell what was in it.
func FuzzSecretFile(f *testing.F) {
	path := filepath.Join(f.TempDir(), "secret")
	good := strings.Repeat("0123456789abcdef", 4)
	for _, s := range []string{good, good + "\n", " " + strings.ToUpper(good) + "\r\n", good[1:], good + "0", strings.Repeat("g", 64), "", "\x00"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := LoadSecret(path)
		spelled := strings.TrimSpace(string(text))
		if err == nil && s.Hex() != strings.ToLower(spelled) {
			t.Errorf("%q is read as %s", text, s.Hex())
		}
		if err != nil && (s != Secret{} || len(spelled) >= 8 && strings.Contains(err.Error(), spelled)) {
			t.Errorf("%q: secret %s, error %v", text, s.Hex(), err)
		}
	})
}

// FuzzError reads the status of a failed call as a peer may have made it.
func FuzzError(f *testing.F) {
	add := func(code codes.Code, text string, info *errdetails.ErrorInfo) {
		s := &spb.Status{Code: int32(code), Message: text}
		if info != nil {
			any, err := anypb.New(info)
			if err != nil {
				f.Fatal(err)
			}
			s.Details = append(s.Details, any)
		}
		b, err := proto.Marshal(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	add(codes.InvalidArgument, "bad", &errdetails.ErrorInfo{Reason: "invalid", Domain: errorDomain, Metadata: map[string]string{statusKey: "-203"}})
	add(codes.Aborted, "failed", &errdetails.ErrorInfo{Reason: "nonsense", Domain: errorDomain, Metadata: map[string]string{statusKey: "7"}})
	add(codes.Unavailable, "", nil)
	add(codes.Code(99), "x", &errdetails.ErrorInfo{Domain: "elsewhere"})
	f.Fuzz(func(t *testing.T, b []byte) {
		var s spb.Status
		if proto.Unmarshal(b, &s) != nil || s.GetCode() == 0 {
			return
		}
		err := status.ErrorProto(&s)
		class, st := ClassOf(err), StatusOf(err)
		if class.String() == "none" || st >= 0 {
			t.Errorf("%v: class %v, status %d", err, class, st)
		}
		if text := Text(err); text != s.GetMessage() {
			t.Errorf("%v reads %q", err, text)
		}
		again := StatusError(st, Text(err))
		if ClassOf(again).String() == "none" || !utf8.ValidString(Text(again)) {
			t.Errorf("%v passed on is %v", err, again)
		}
	})
}
