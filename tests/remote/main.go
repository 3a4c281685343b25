// Command remote runs programs on another machine of a test, like ssh, but without users, keys and encryption. It is only for
// throw-away virtual machines on a private network.
//
//	remote serve HOST:PORT                     runs programs for remote run, until it is killed
//	remote run HOST:PORT [-e NAME=VALUE]... -- PROGRAM ARGS...
//	remote wait HOST:PORT                      returns when remote serve runs there
//
// run behaves like the program: it has the same output and exit status (128 + n after signal n), and passes on SIGTERM, SIGINT and
// SIGCONT. When run is killed, or its connection breaks, the program is killed. While the network is silent, the program goes on.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// order is the first message of run. Signals follow. Each message is a JSON value.
type order struct {
	Args []string `json:"args"`
	Env  []string `json:"env"` // added to the server's
	Dir  string   `json:"dir"`
}

// part is a message to run: output, or the end.
type part struct {
	Stream int    `json:"stream,omitempty"` // 1, 2
	Data   []byte `json:"data,omitempty"`
	Ended  bool   `json:"ended,omitempty"`
	Status int    `json:"status,omitempty"`
	Error  string `json:"error,omitempty"` // why it was not started
}

func main() {
	status, err := doMain(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "remote:", err)
		os.Exit(255)
	}
	os.Exit(status)
}

func doMain(args []string) (int, error) {
	if len(args) == 2 && args[0] == "serve" {
		return 0, serve(args[1])
	}
	if len(args) == 2 && args[0] == "wait" {
		return 0, wait(args[1])
	}
	if len(args) < 4 || args[0] != "run" {
		return 0, errors.New("want serve ADDRESS, wait ADDRESS, or run ADDRESS [-e NAME=VALUE]... -- PROGRAM ARGS")
	}
	o := order{}
	addr, rest := args[1], args[2:]
	for len(rest) > 2 && rest[0] == "-e" {
		o.Env = append(o.Env, rest[1])
		rest = rest[2:]
	}
	if len(rest) < 2 || rest[0] != "--" {
		return 0, fmt.Errorf("no program after %q", rest)
	}
	o.Args = rest[1:]
	var err error
	if o.Dir, err = os.Getwd(); err != nil {
		return 0, err
	}
	return run(addr, o)
}

func wait(addr string) error {
	var err error
	for end := time.Now().Add(60 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		var c net.Conn
		if c, err = net.DialTimeout("tcp", addr, time.Second); err == nil {
			return c.Close()
		}
	}
	return fmt.Errorf("nobody serves after a minute: %w", err)
}

// ---- remote run ----

func run(addr string, o order) (int, error) {
	conn, err := net.DialTimeout("tcp", addr, 10*time.Second)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2)
	out := json.NewEncoder(conn)
	if err := out.Encode(o); err != nil {
		return 0, err
	}
	go func() {
		for s := range signals {
			_ = out.Encode(int(s.(syscall.Signal)))
		}
	}()
	in := json.NewDecoder(bufio.NewReader(conn))
	for {
		var p part
		if err := in.Decode(&p); err != nil {
			return 0, fmt.Errorf("%s: %w", addr, err)
		}
		switch {
		case p.Error != "":
			return 0, errors.New(p.Error)
		case p.Ended:
			return p.Status, nil
		case p.Stream == 1:
			os.Stdout.Write(p.Data)
		default:
			os.Stderr.Write(p.Data)
		}
	}
}

// ---- remote serve ----

func serve(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			answer(conn)
		}()
	}
}

func answer(conn net.Conn) {
	in := json.NewDecoder(conn)
	var o order
	if in.Decode(&o) != nil || len(o.Args) == 0 {
		return // remote wait
	}
	var mu sync.Mutex
	out := json.NewEncoder(conn)
	tell := func(p part) {
		mu.Lock()
		defer mu.Unlock()
		_ = out.Encode(p)
	}
	cmd := exec.Command(o.Args[0], o.Args[1:]...)
	cmd.Dir, cmd.Env = o.Dir, append(os.Environ(), o.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stdout, cmd.Stderr = stream(1, tell), stream(2, tell)
	if err := cmd.Start(); err != nil {
		tell(part{Error: err.Error()})
		return
	}
	ended := make(chan struct{})
	go func() {
		for {
			var s int
			if in.Decode(&s) == nil {
				_ = cmd.Process.Signal(syscall.Signal(s))
				continue
			}
			select {
			case <-ended:
			default: // run is gone
				_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			}
			return
		}
	}()
	_ = cmd.Wait()
	close(ended)
	tell(part{Ended: true, Status: status(cmd.ProcessState)})
}

// stream is a writer that sends parts to run.
func stream(n int, tell func(part)) io.Writer {
	return writer(func(b []byte) (int, error) {
		tell(part{Stream: n, Data: b})
		return len(b), nil
	})
}

type writer func([]byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }

func status(s *os.ProcessState) int {
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return max(s.ExitCode(), 0)
}
