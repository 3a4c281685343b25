package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rfaas-go/rfaas/internal/executor"
)

func TestSignals(t *testing.T) {
	for _, c := range []struct {
		signal os.Signal
		after  time.Duration
		want   int
	}{
		{syscall.SIGTERM, 0, 0},
		{syscall.SIGTERM, repeat - 1, 0}, // the same one by another way
		{syscall.SIGTERM, repeat, 1},
		{syscall.SIGINT, 0, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			signals := make(chan os.Signal)
			first, second, done := 0, 0, make(chan struct{})
			go func() {
				defer close(done)
				heed(signals, func() { first++ }, func() { second++ })
			}()
			signals <- syscall.SIGTERM
			time.Sleep(c.after)
			signals <- c.signal
			close(signals)
			<-done
			if first != 1 || second != c.want {
				t.Errorf("SIGTERM and %v after it %v: first %d times, second %d times", c.after, c.signal, first, second)
			}
		})
	}
}

func TestRun(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"--help"}, 0, "--listen"},
		{[]string{"--version"}, 0, "executor unknown"},
		{[]string{"--check-config"}, 0, "good"},
		{[]string{"--print-config"}, 0, "listen: "},
		{[]string{"--nonsense"}, 2, "--nonsense"},
		{[]string{"--listen", "0.0.0.0:0"}, 2, "--allow-plaintext"},
		{[]string{"--listen", "192.0.2.1:1", "--allow-plaintext", "--secret-file", secret}, 1, "executor: "},
	} {
		var out, errs bytes.Buffer
		code := run(context.Background(), context.Background(), false, c.args, []string{"HOME=/nonexistent"}, executor.Handover{}, &out, &errs)
		if code != c.code || !strings.Contains(out.String()+errs.String(), c.text) {
			t.Errorf("%q: code %d, output %q, errors %q; want %d and %q", c.args, code, &out, &errs, c.code, c.text)
		}
	}
}

// An executor without a resource manager logs that, and explains RFAAS_MANAGER if it is set.
func TestWithoutManager(t *testing.T) {
	listen := []string{"--listen", "192.0.2.1:1", "--allow-plaintext", "--secret-file", filepath.Join(t.TempDir(), "secret")} // fails at once
	const alone, meant = "no resource manager (--manager): only RFAAS_EXECUTOR=ADDRESS", "did you mean --manager?"
	for _, c := range []struct {
		args         []string
		environ      string
		alone, meant bool
	}{
		{nil, "RFAAS_MANAGER=", true, false},
		{nil, "RFAAS_MANAGER=127.0.0.1:7464", true, true},
		{[]string{"--manager", "127.0.0.1:7464"}, "RFAAS_MANAGER=127.0.0.1:7464", false, false},
	} {
		var out, errs bytes.Buffer
		run(context.Background(), context.Background(), false, append(c.args, listen...), []string{"HOME=/nonexistent", c.environ}, executor.Handover{}, &out, &errs)
		if strings.Contains(errs.String(), alone) != c.alone || strings.Contains(errs.String(), meant) != c.meant {
			t.Errorf("%q with %s logs %q", c.args, c.environ, &errs)
		}
	}
}
