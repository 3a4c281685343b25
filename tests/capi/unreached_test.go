package capi

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A client that cannot connect to the workers of one executor gets its lease from another one. If it can connect to none, the
// error names each of them and says what to do.
func TestUnreachedWorkers(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("the subject is provider tcp")
	}
	secret, audit := filepath.Join(t.TempDir(), "secret"), filepath.Join(t.TempDir(), "audit")
	manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret, "--heartbeat", "250ms")
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	invoke := func() (string, error) {
		cmd := exec.CommandContext(ctx, built(t, "bin/rfaas"), "invoke", built(t, "build/functions/echo.so"), "echo", "--hex", "01")
		cmd.Env = append(os.Environ(), "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_EXECUTOR=", "RFAAS_PROVIDER=tcp")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	asked := func() int { // how often the first two executors granted a lease
		b, err := os.ReadFile(audit)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), `"event":"grant"`)
	}
	// The data ports of the first two are at 127.0.0.1, so connections to 127.0.0.9 are refused.
	want := []string{"cannot connect to its workers", "127.0.0.9", "onnection refused", "data-listen"}
	for n := range 2 {
		bad := startExecutor(t, secret, "--manager", manager, "--providers", "tcp", "--data-advertise", "127.0.0.9", "--audit-file", audit)
		want = append(want, "executor "+bad)
		out, err := invoke()
		if err == nil {
			t.Errorf("%d executors cannot be reached, but one grants a lease: %s", n+1, out)
		}
		for _, word := range want {
			if !strings.Contains(out, word) {
				t.Errorf("%d executors cannot be reached: the error does not contain %q: %s", n+1, word, out)
			}
		}
	}
	startExecutor(t, secret, "--manager", manager, "--providers", "tcp")
	for before := asked(); asked() == before; { // the order of executors is partly random; ctx bounds it
		if out, err := invoke(); err != nil {
			t.Fatalf("with another executor: %v, %s", err, out)
		}
	}
}

// A client that requires encryption gets its lease from an executor that encrypts, even if another one, which does not, grants the lease
// first. If none encrypts, the error names the two settings and says nothing of firewalls.
func TestEncryptionElsewhere(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("the subject is provider tcp")
	}
	secret, audit := filepath.Join(t.TempDir(), "secret"), filepath.Join(t.TempDir(), "audit")
	manager, _, _ := startDaemon(t, "bin/resource-manager", "--secret-file", secret, "--heartbeat", "250ms")
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	invoke := func() (string, error) {
		cmd := exec.CommandContext(ctx, built(t, "bin/rfaas"), "invoke", built(t, "build/functions/echo.so"), "echo", "--hex", "01")
		cmd.Env = append(os.Environ(), "RFAAS_MANAGER="+manager, "RFAAS_SECRET_FILE="+secret, "RFAAS_EXECUTOR=", "RFAAS_PROVIDER=tcp",
			"RFAAS_DATA_ENCRYPTION=require")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	clear := startExecutor(t, secret, "--manager", manager, "--providers", "tcp", "--data-encryption", "off", "--audit-file", audit)
	out, err := invoke()
	for _, word := range []string{"executor " + clear, "data encryption is require here and off at the tcp peer"} {
		if err == nil || !strings.Contains(out, word) {
			t.Errorf("no executor encrypts, and the error does not contain %q: %v, %s", word, err, out)
		}
	}
	if strings.Contains(out, "firewall") {
		t.Errorf("the error blames a firewall: %s", out)
	}
	startExecutor(t, secret, "--manager", manager, "--providers", "tcp")
	asked := func() int {
		b, err := os.ReadFile(audit)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), `"event":"grant"`)
	}
	for before := asked(); asked() == before; { // the order of executors is partly random; ctx bounds it
		if out, err := invoke(); err != nil {
			t.Fatalf("with an executor that encrypts: %v, %s", err, out)
		}
	}
}
