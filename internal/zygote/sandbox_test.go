package zygote

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/sandbox"
)

var confined = Sandbox{Mode: sandbox.On, UIDs: sandbox.Range{First: 1_900_000_000, N: 1000}, Processes: 200}

// What holds without a sandbox holds within: reports of deaths, limits, kills, a zygote that is replaced, workers in advance.
func TestInSandbox(t *testing.T) {
	if testing.Short() {
		t.Skip("these tests run without a sandbox too")
	}
	testSandbox = confined
	defer func() { testSandbox = Sandbox{} }()
	for name, test := range map[string]func(*testing.T){
		"deaths": TestDeathIsExplained, "time limit": TestTimeLimit, "stopped worker": TestStoppedWorker, "counters": TestCounters,
		"zygote killed": TestZygoteKilledDuringSpawns, "warm workers die": TestWarmWorkersDie,
		"inspection": TestInspect, "refusals": TestInspectRefuses, "bounds": TestInspectIsBounded, "symbols": TestSymbols,
	} {
		t.Run(name, test)
	}
}

// The C library knows its thread by the number that the worker's own process name space has.
func TestThreadInSandbox(t *testing.T) {
	testSandbox = confined
	defer func() { testSandbox = Sandbox{} }()
	w := lease(t, startZygote(t), startClient(t), nil)
	got := w.mustCall(t, fnThreadID, nil)
	for i, what := range []string{"cached thread id", "gettid", "getpid", "owner of a priority-inheritance mutex"} {
		if id := int(binary.LittleEndian.Uint32(got[4*i:])); id != 2 {
			t.Errorf("%s: %d, want 2", what, id)
		}
	}
	if got := w.mustCall(t, fnThreads, nil); got[0] != 1 {
		t.Error("threads, raise or system do not work")
	}
	s := w.Steps()
	if s.Sandbox <= 0 || s.Connect < 0 || s.Code <= 0 {
		t.Errorf("steps %+v", s)
	}
	t.Logf("the sandbox took %v", s.Sandbox)
	if len(w.Exit().Reason) == 0 {
		t.Error("no reason")
	}
}

// Each part can be missing: it is named in one line of the log, workers run with the rest, and none run where all is required.
func TestIncompleteSandbox(t *testing.T) {
	for part, names := range map[uint32]string{partUID: "user ids", partPIDs: "process name space", partFiles: "file system",
		partNet: "network name space", partSeccomp: "filter of system calls", partLandlock: "Landlock", partAll &^ partPrivs: "Landlock"} {
		s := confined
		s.without = part
		var log bytes.Buffer
		z, err := Start(t.Context(), Config{Path: workerPath(t), Log: slog.New(slog.NewTextHandler(&log, nil)), Sandbox: s})
		if err != nil {
			t.Fatal(err)
		}
		w := lease(t, z, startClient(t), nil)
		if got := w.mustCall(t, fnEcho, []byte("x")); string(got) != "x" {
			t.Errorf("without %#x: %q", part, got)
		}
		z.Close()
		if text := log.String(); strings.Count(text, "the sandbox of workers is incomplete") != 1 || !strings.Contains(text, names) {
			t.Errorf("without %#x: log %q does not say %q once", part, text, names)
		}
		s.Mode = sandbox.Require
		_, err = Start(t.Context(), Config{Path: workerPath(t), Log: testLog(t), Sandbox: s})
		if err == nil || !strings.Contains(err.Error(), "required") || !strings.Contains(err.Error(), names) {
			t.Errorf("required, without %#x: %v", part, err)
		}
	}
	s := confined
	s.UIDs = sandbox.Range{}
	if got := s.lacks(partAll, ""); !strings.Contains(got, "no range") {
		t.Errorf("without a range of user ids it lacks %q", got)
	}
}

// A whole sandbox needs root, or says what it lacks.
func TestRequiredSandbox(t *testing.T) {
	s := confined
	s.Mode = sandbox.Require
	z, err := Start(t.Context(), Config{Path: workerPath(t), Log: testLog(t), Sandbox: s})
	if err != nil {
		if os.Getenv("CI") != "" && os.Geteuid() == 0 {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	z.Close()
}

// A user that was verified is the one that the worker is.
func TestVerifiedUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root gives workers other users")
	}
	testSandbox = confined
	defer func() { testSandbox = Sandbox{} }()
	z := startZygote(t)
	w := lease(t, z, startClient(t), func(s *Spec) { s.UID, s.GID = 4242, 4343 })
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", w.PID()))
	if err != nil {
		t.Fatal(err)
	}
	if text := string(b); !strings.Contains(text, "\nUid:\t4242\t4242\t4242\t4242\n") || !strings.Contains(text, "\nGid:\t4343\t4343\t4343\t4343\n") {
		t.Errorf("%s", text)
	}
	w.mustCall(t, fnEcho, []byte("x"))

	// Where there is no sandbox the worker is who the executor is.
	testSandbox = Sandbox{}
	w = lease(t, startZygote(t), startClient(t), func(s *Spec) { s.UID, s.GID = 4242, 4343 })
	if b, err = os.ReadFile(fmt.Sprintf("/proc/%d/status", w.PID())); err != nil || !strings.Contains(string(b), "\nUid:\t0\t0\t0\t0\n") {
		t.Errorf("%v\n%s", err, b)
	}
}

// When the ids are used up, here or by another executor, there is no worker, and those of dead workers serve again.
func TestUserIDsRunOut(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root gives workers other users")
	}
	testSandbox = confined
	testSandbox.UIDs.N, testSandbox.UIDFile = 1, filepath.Join(t.TempDir(), "uids")
	defer func() { testSandbox = Sandbox{} }()
	z, other, c := startZygote(t), startZygote(t), startClient(t)
	w := lease(t, z, c, nil)
	spec, _ := c.spec(t, sealedFile(t, testLibrary(t)))
	for _, z := range []*Zygote{z, other} {
		if _, err := z.Spawn(t.Context(), spec); !errors.Is(err, sandbox.ErrNoUID) {
			t.Errorf("a second worker with one id: %v", err)
		}
	}
	w.Kill()
	<-w.Done()
	lease(t, other, c, nil).mustCall(t, fnEcho, []byte("x"))
}

// What doctor says is what an executor would.
func TestLacks(t *testing.T) {
	missing, err := Lacks(t.Context(), workerPath(t), confined.UIDs)
	if err != nil || (missing == "") != (os.Geteuid() == 0) && os.Getenv("CI") != "" {
		t.Errorf("%q, %v", missing, err)
	}
	if missing, err := Lacks(t.Context(), workerPath(t), sandbox.Range{}); err != nil || !strings.Contains(missing, "user ids") {
		t.Errorf("without ids: %q, %v", missing, err)
	}
	if _, err := Lacks(t.Context(), "/bin/false", confined.UIDs); err == nil {
		t.Error("a program that is no worker lacks nothing")
	}
}
