package main

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// replacing names the environment variable that makes this program replace itself by itself for ever. Its value is the descriptor of the
// signals that the program before it has not read.
const replacing = "RFAAS_TEST_REPLACING"

func TestMain(m *testing.M) {
	if earlier := os.Getenv(replacing); earlier != "" {
		fmt.Print("error: ", replaceAgain(earlier), "\n")
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// replaceAgain prints a line for each signal of the earlier program, and one before it replaces itself. It returns only after a failure.
func replaceAgain(earlier string) error {
	fd, err := strconv.Atoi(earlier)
	if err != nil {
		return err
	}
	if fd > 0 {
		got, err := io.ReadAll(os.NewFile(uintptr(fd), "earlier signals"))
		if err != nil {
			return err
		}
		for _, sig := range got {
			fmt.Println("signal", sig)
		}
	}
	var blocked unix.Sigset_t
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, nil, &blocked); err != nil {
		return err
	}
	if stop := stopSignal(); blocked.Val[0]&stop.Val[0] != 0 {
		return fmt.Errorf("its threads block %v, so they cannot be stopped", unix.SIGPWR)
	}
	const busy = 4
	runtime.GOMAXPROCS(busy)
	var running [busy - 1]chan bool
	var spins atomic.Uint64
	for i := range running {
		running[i] = make(chan bool)
		go func() { // on a thread of its own, which mostly runs
			runtime.LockOSThread()
			for {
				select {
				case <-running[i]:
				default:
					spins.Add(1)
				}
			}
		}()
	}
	go func() {
		for { // makes threads that end
			var ended sync.WaitGroup
			ended.Go(runtime.LockOSThread)
			ended.Wait()
		}
	}()
	if err := replace("/nonexistent", os.Args, os.Environ()); err != syscall.ENOENT {
		return fmt.Errorf("execute a file that does not exist: %w", err)
	}
	for _, c := range running { // all threads go on
		c <- true
	}
	pipe := int(ownPipe().Fd())
	if _, err := unix.FcntlInt(uintptr(pipe), unix.F_SETFD, 0); err != nil {
		return err
	}
	if err := os.Setenv(replacing, strconv.Itoa(pipe)); err != nil {
		return err
	}
	fmt.Println("replaces itself")
	return replace("/proc/self/exe", os.Args, os.Environ())
}

// stopSignal returns a set with the signal that stops a thread.
func stopSignal() (set unix.Sigset_t) {
	set.Val[0] = 1 << (unix.SIGPWR - 1)
	return set
}

// TestReplaceKeepsSignals sends signals around the time at which a program replaces itself. The program, or one after it, gets each of them, even if it was started with
// the signal blocked that stops its threads.
func TestReplaceKeepsSignals(t *testing.T) {
	const rounds = 100
	const most = 10 // programs that may begin until one has printed a signal
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), replacing+"=0")
	out, err := cmd.StdoutPipe()
	runtime.LockOSThread()
	stop := stopSignal()
	if err == nil {
		err = unix.PthreadSigmask(unix.SIG_BLOCK, &stop, nil)
	}
	if err == nil {
		err = cmd.Start()
	}
	if err == nil {
		err = unix.PthreadSigmask(unix.SIG_UNBLOCK, &stop, nil)
	}
	runtime.UnlockOSThread()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	lines := bufio.NewScanner(out)
	kinds := []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGUSR2}
	for round := range rounds {
		sig, waited := kinds[round%len(kinds)], 0
		for lines.Scan() && lines.Text() != "replaces itself" {
			t.Fatalf("round %d: unexpected: %s", round, lines.Text())
		}
		for begin, delay := time.Now(), time.Duration(rand.IntN(1000))*time.Microsecond; time.Since(begin) < delay; {
		}
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		for lines.Scan() && lines.Text() != fmt.Sprint("signal ", int(sig)) {
			if waited++; waited > most || strings.HasPrefix(lines.Text(), "error") {
				t.Fatalf("round %d: %v did not arrive: %s", round, sig, lines.Text())
			}
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
}
