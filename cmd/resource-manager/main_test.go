package main

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"--help"}, 0, "--listen"},
		{[]string{"--version"}, 0, "resource-manager unknown"},
		{[]string{"--check-config"}, 0, "good"},
		{[]string{"--print-config"}, 0, "listen: "},
		{[]string{"--nonsense"}, 2, "--nonsense"},
		{[]string{"--listen", "0.0.0.0:0"}, 2, "--allow-plaintext"},
		{[]string{"--listen", "unix:" + secret + ".socket", "--secret-file", secret, "--state-dir", "/proc/sys/x"}, 1,
			"resource-manager: ledger: mkdir /proc/sys/x"},
		{[]string{"--listen", "192.0.2.1:1", "--allow-plaintext", "--secret-file", secret}, 1, "resource-manager: "},
	} {
		var out, errs bytes.Buffer
		code := run(context.Background(), c.args, []string{"HOME=/nonexistent"}, &out, &errs)
		if code != c.code || !strings.Contains(out.String()+errs.String(), c.text) {
			t.Errorf("%q: code %d, output %q, errors %q; want %d and %q", c.args, code, &out, &errs, c.code, c.text)
		}
	}
}

func TestServesUntilItsContextEnds(t *testing.T) {
	dir := t.TempDir()
	ctx, stop := context.WithCancel(context.Background())
	stop() // a signal that came early
	var out, errs bytes.Buffer
	if code := run(ctx, []string{"--listen", "unix:" + filepath.Join(dir, "s"), "--secret-file", filepath.Join(dir, "secret")}, nil, &out, &errs); code != 0 {
		t.Errorf("code %d, %s", code, &errs)
	}
}
