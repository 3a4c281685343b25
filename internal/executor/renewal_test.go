package executor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// renewing gives the output of a program.
type renewing struct {
	fakeSpawner
	say  string
	hang bool
	err  error
}

func (r *renewing) Renew() (*os.File, error) {
	if r.err != nil {
		return nil, r.err
	}
	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	_, _ = in.WriteString(r.say)
	if !r.hang {
		in.Close()
	} else {
		r.t.Cleanup(func() { in.Close() })
	}
	return out, nil
}

// An executor that cannot write its directory gets the result from the program of its spawner, and an error that says what to do.
func TestRenewalBySpawner(t *testing.T) {
	const none = "/proc/self/no such directory"
	ends := time.Date(2031, 2, 3, 4, 5, 6, 0, time.UTC)
	for _, c := range []struct {
		say     string
		err     error
		renewed bool
		want    string
	}{
		{"renewed 2031-02-03T04:05:06Z\n", nil, true, ""},
		{"valid 2031-02-03T04:05:06Z\n", nil, false, ""},
		{"issuer service:7466: revoked\n", nil, false, "issuer service:7466: revoked"},
		{"renewed perhaps", nil, false, "renewed perhaps"},
		{"", nil, false, "without a result"},
		{"", unix.EACCES, false, "chown it"},
		{"", fs.ErrNotExist, false, "chown it"},
		{"", unix.EBUSY, false, "busy"},
	} {
		got, renewed, err := renewal(none, &renewing{fakeSpawner: fakeSpawner{t: t}, say: c.say, err: c.err})(t.Context())
		if c.want == "" && (err != nil || !got.Equal(ends)) || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) || renewed != c.renewed {
			t.Errorf("%q, %v: %v, %t, %v", c.say, c.err, got, renewed, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := renewal(none, &renewing{fakeSpawner: fakeSpawner{t: t}, hang: true})(ctx); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a program that hangs: %v", err)
	}
}
