package main

import (
	"bytes"
	"context"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rfaas-go/rfaas/internal/executor"
)

func TestSignals(t *testing.T) {
	const term, interrupt = syscall.SIGTERM, syscall.SIGINT
	for _, c := range []struct {
		ending      bool // the earlier program has received the first signal
		signals     []syscall.Signal
		after       time.Duration // between two of them
		first, both bool
		exits       int
	}{
		{false, nil, 0, false, false, 0},
		{false, []syscall.Signal{syscall.SIGUSR2}, 0, false, false, 0},
		{false, []syscall.Signal{term, term}, 0, true, false, 0},
		{false, []syscall.Signal{term, term}, repeat - 1, true, false, 0}, // the same one by another way
		{false, []syscall.Signal{term, term}, repeat, true, true, 0},
		{false, []syscall.Signal{term, interrupt, term}, 0, true, true, 0},
		{false, []syscall.Signal{interrupt, interrupt, interrupt}, 0, true, true, 1},
		{true, nil, 0, true, false, 0},
		{true, []syscall.Signal{term}, 0, true, false, 0},
		{true, []syscall.Signal{term, term}, repeat, true, true, 0},
		{true, []syscall.Signal{interrupt}, 0, true, true, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			s, exits := newSignals(nil, c.ending), 0
			from, to := io.Pipe()
			go s.read(from, func() { exits++ })
			for i, sig := range c.signals {
				if i > 0 {
					time.Sleep(c.after)
				}
				_, _ = to.Write([]byte{byte(sig)})
			}
			to.Close()
			<-s.stopped
			if first, both := s.first.Err() != nil, s.second.Err() != nil; first != c.first || both != c.both || exits != c.exits {
				t.Errorf("ending %v, %v with %v between: first ended %v, second %v, %d exits", c.ending, c.signals, c.after, first, both, exits)
			}
			if asked := len(s.handover) > 0; asked != slices.Contains(c.signals, syscall.SIGUSR2) {
				t.Errorf("%v: asked to hand over: %v", c.signals, asked)
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
