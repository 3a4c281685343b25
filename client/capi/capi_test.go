package main

import (
	"bufio"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/leakcheck"
)

var objects = leakcheck.Objects(dataplane.Live)

// compiled returns the directory of the programs that tests compile: RFAAS_TEST_PROGRAMS or a new one.
var compiled = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("RFAAS_TEST_PROGRAMS"); dir != "" {
		return dir, nil
	}
	return os.MkdirTemp("", "rfaas-capi-test")
})

func TestMain(m *testing.M) {
	code := leakcheck.Run(m, nil, objects)
	if dir, err := compiled(); err == nil && dir != os.Getenv("RFAAS_TEST_PROGRAMS") {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

const root = "../.."

// built returns the absolute path of something that make build makes, or fails.
func built(t *testing.T, path string) string {
	t.Helper()
	p, err := filepath.Abs(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(p); err != nil {
		t.Fatalf("%s is missing: run make build first", path)
	}
	return p
}

// startExecutor starts an executor that lends two cores and returns its address.
func startExecutor(t *testing.T, secret string, args ...string) string {
	t.Helper()
	address, _, _ := startProcess(t, secret, args...)
	return address
}

// startProcess is startExecutor that also returns the process and what is closed when it has ended.
func startProcess(t *testing.T, secret string, args ...string) (string, *exec.Cmd, <-chan struct{}) {
	t.Helper()
	providers := "shm"
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		providers = "verbs"
	}
	return startDaemon(t, "bin/executor", append([]string{"--secret-file", secret, "--cores", "2", "--providers", providers, "--grace", "2s"},
		args...)...)
}

// checked are the tests at whose end leaks are looked for.
var checked sync.Map

// checkLeaks has the test fail if at its end there is more of anything than now, the first time that it is called.
func checkLeaks(t *testing.T) {
	t.Helper()
	if _, again := checked.LoadOrStore(t.Name(), true); !again {
		t.Cleanup(func() { checked.Delete(t.Name()) })
		leakcheck.Check(t, objects)
	}
}

// startDaemon starts a daemon on a free port; it returns its address, its process, and what is closed when it has ended.
func startDaemon(t *testing.T, program string, args ...string) (string, *exec.Cmd, <-chan struct{}) {
	t.Helper()
	if *compileFlag {
		t.Skip("-compile: what it runs is there")
	}
	checkLeaks(t)
	cmd := exec.Command(built(t, program), append([]string{"--listen", "127.0.0.1:0"}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ready, done := make(chan string, 1), make(chan struct{})
	var log strings.Builder
	go func() {
		defer close(done)
		for s := bufio.NewScanner(stderr); s.Scan(); {
			log.WriteString(s.Text() + "\n")
			if _, rest, ok := strings.Cut(s.Text(), "msg=ready address="); ok {
				addr, _, _ := strings.Cut(rest, " ")
				ready <- addr
			}
		}
		cmd.Wait()
	}()
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-done:
		case <-time.After(40 * time.Second): // more than any grace of these tests
			cmd.Process.Signal(syscall.SIGKILL)
			t.Errorf("%s did not end within 40 s of SIGTERM", program)
			<-done
		}
		if t.Failed() {
			t.Logf("%s said:\n%s", program, log.String())
		}
	})
	select {
	case addr := <-ready:
		return addr, cmd, done
	case <-done:
		t.Fatalf("%s ended at once:\n%s", program, log.String())
	case <-time.After(20 * time.Second):
		t.Fatalf("%s was not ready within 20 s", program)
	}
	return "", nil, nil
}

// The tags and operations on the two sides of the seam are the same numbers.
func TestSeamNumbers(t *testing.T) {
	header, err := os.ReadFile(root + "/internal/dataplane/rfaas_api.h")
	if err != nil {
		t.Fatal(err)
	}
	c := map[string]int{}
	for _, m := range regexp.MustCompile(`RFAAS_(OP|TAG|NEWS)_([A-Z_]+) = (\d+)`).FindAllStringSubmatch(string(header), -1) {
		c[m[1]+m[2]], _ = strconv.Atoi(m[3])
	}
	source, err := os.ReadFile("wire.go")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, m := range regexp.MustCompile(`(?m)^\t(op|tag|news)([A-Za-z]+) += (\d+)$`).FindAllStringSubmatch(string(source), -1) {
		name := strings.ToUpper(m[1]) + strings.ToUpper(regexp.MustCompile(`([a-z])([A-Z])`).ReplaceAllString(m[2], "${1}_$2"))
		if want, _ := strconv.Atoi(m[3]); c[name] != want {
			t.Errorf("%s is %d in Go and %d in C", name, want, c[name])
		}
		n++
	}
	if n != len(c) || n == 0 {
		t.Errorf("%d numbers in Go, %d in C", n, len(c))
	}
}

func TestMessage(t *testing.T) {
	var m message
	m.u64(tagKey, 1<<63+5)
	m.str(tagLibrary, "libx.so")
	m.bytes(tagBlob, nil)
	m.bytes(tagBlob, []byte{1, 2, 3})
	f, err := decode(m)
	if err != nil {
		t.Fatal(err)
	}
	if f.u64(tagKey) != 1<<63+5 || f.str(tagLibrary) != "libx.so" || len(f[tagBlob]) != 2 || string(f[tagBlob][1]) != "\x01\x02\x03" {
		t.Errorf("decoded %v", f)
	}
	for cut := 1; cut < len(m); cut++ {
		f, err := decode(m[:cut])
		whole := cut == 16 || cut == 16+15 || cut == 16+15+8
		if (err == nil) != whole {
			t.Errorf("the first %d bytes: %v, %v", cut, f, err)
		}
	}
}

func FuzzService(f *testing.F) {
	var m message
	m.u64(tagKey, 1)
	m.u64(tagSession, 1)
	f.Add(uint32(opPlan), []byte(m))
	f.Add(uint32(opGrant), []byte{1, 0, 0, 0, 255, 255, 255, 255})
	s := newService(func([]byte) {})
	f.Fuzz(func(t *testing.T, op uint32, req []byte) {
		if op == opSessionOpen {
			return // that one dials
		}
		if status, reply := s.handle(op, req); status == 0 && op != opRelease {
			t.Errorf("operation %d of nothing gives success: %x", op, reply)
		}
	})
}

// A message never decodes to more than it holds.
func TestDecodeRandom(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 10000 {
		b := make([]byte, r.IntN(64))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		if len(b) >= fieldHead && r.IntN(2) == 0 {
			binary.LittleEndian.PutUint32(b[4:], uint32(r.IntN(64)))
		}
		f, err := decode(b)
		total := 0
		for _, values := range f {
			for _, v := range values {
				total += fieldHead + len(v)
			}
		}
		if err == nil && total != len(b) {
			t.Fatalf("%x decodes to %d of %d bytes", b, total, len(b))
		}
	}
}
