package slurm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Hooks and agent speak over a unix socket: one line each way. "prolog JOB" is answered when no executor runs any more,
// "epilog JOB" and "status" at once. An answer begins with "ok", or is an error. Who may open the socket may speak: its
// directory and mode say who that is.
const (
	hookTimeout = 30 * time.Second
	lineMax     = 4096
)

// ListenHooks makes the agent's socket. A socket that nobody listens on any more is replaced.
func ListenHooks(path string) (net.Listener, error) {
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return nil, fmt.Errorf("socket %s: another agent listens there", path)
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, fmt.Errorf("socket: %w", err)
	}
	old := unix.Umask(0o177) // from the first moment on
	l, err := net.Listen("unix", path)
	unix.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	return l, nil
}

// ServeHooks answers until ctx ends, and returns when every conversation is over.
func (a *Agent) ServeHooks(ctx context.Context, l net.Listener, log *slog.Logger) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	var all sync.WaitGroup
	defer all.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return fmt.Errorf("socket: %w", err)
		}
		all.Go(func() {
			defer c.Close()
			if err := a.converse(c); err != nil {
				log.Warn("hook", "error", err)
			}
		})
	}
}

// converse answers one line. It lasts no longer than hookTimeout, nor than the other side.
func (a *Agent) converse(c net.Conn) error {
	c.SetDeadline(time.Now().Add(hookTimeout))
	line, err := bufio.NewReaderSize(io.LimitReader(c, lineMax), lineMax).ReadString('\n')
	if err != nil {
		if err == io.EOF && line == "" {
			return nil // looked whether somebody is here
		}
		return fmt.Errorf("request %q: %w", line, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), hookTimeout)
	defer cancel()
	answer, err := a.answer(ctx, strings.TrimSpace(line))
	if err != nil {
		answer = "error: " + strings.ReplaceAll(err.Error(), "\n", " ")
	}
	_, werr := io.WriteString(c, answer+"\n")
	if err == nil && errors.Is(werr, unix.EPIPE) {
		return nil // it had no more time
	}
	return errors.Join(err, werr)
}

func (a *Agent) answer(ctx context.Context, line string) (string, error) {
	word, rest, _ := strings.Cut(line, " ")
	if word == "status" && rest == "" {
		s, err := a.Status(ctx)
		if err != nil {
			return "", err
		}
		text, err := json.Marshal(s)
		return "ok " + string(text), err
	}
	job, err := strconv.ParseInt(rest, 10, 64)
	if err != nil || job <= 0 || word != "prolog" && word != "epilog" {
		return "", fmt.Errorf("%q: want prolog or epilog and a job's number, or status", line)
	}
	begin := time.Now()
	if word == "prolog" {
		err = a.Prolog(ctx, job)
	} else {
		err = a.Epilog(ctx, job)
	}
	return fmt.Sprintf("ok %d ms", time.Since(begin).Milliseconds()), err
}

// ErrNoAgent: nobody listens on the socket.
var ErrNoAgent = errors.New("no agent on this node")

// TellAgent says one line to the agent and returns its answer. When the agent does not answer until ctx's deadline, and
// force is set and we may, it is killed: the executor dies with it, and whoever supervises the agent starts another.
func TellAgent(ctx context.Context, path, line string, force bool) (string, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
			return "", fmt.Errorf("%w: %s", ErrNoAgent, path)
		}
		return "", err
	}
	defer c.Close()
	if deadline, ok := ctx.Deadline(); ok {
		c.SetDeadline(deadline)
	}
	if _, err = io.WriteString(c, line+"\n"); err == nil {
		var answer string
		answer, err = bufio.NewReader(c).ReadString('\n')
		answer = strings.TrimSpace(answer)
		if text, ok := strings.CutPrefix(answer, "ok"); ok && err == nil {
			return strings.TrimSpace(text), nil
		}
		if err == nil {
			return "", fmt.Errorf("the agent: %s", strings.TrimPrefix(answer, "error: "))
		}
	}
	if !force || !errors.Is(err, os.ErrDeadlineExceeded) {
		return "", fmt.Errorf("the agent does not answer: %w", err)
	}
	pid, kerr := killPeer(c.(*net.UnixConn))
	if kerr != nil {
		return "", fmt.Errorf("the agent does not answer in time, and cannot be killed: %w", kerr)
	}
	return "", fmt.Errorf("the agent, process %d, does not answer in time and was killed", pid)
}

// killPeer kills the process that listens at the other end, and returns when it has ended, within a second.
func killPeer(c *net.UnixConn) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var pidfd int
	cerr := raw.Control(func(fd uintptr) {
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil && cred.Pid > 0 {
			pidfd, err = unix.PidfdOpen(int(cred.Pid), 0)
		}
	})
	if err = errors.Join(cerr, err); err != nil {
		return 0, err
	}
	if cred.Pid <= 0 {
		return 0, errors.New("it is in another process name space")
	}
	defer unix.Close(pidfd)
	if err := unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0); err != nil {
		return 0, err
	}
	for end := time.Now().Add(time.Second); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(max(0, time.Until(end)).Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR): // the runtime's own signals come at any time
		case err != nil:
			return 0, fmt.Errorf("waiting for the end of process %d: %w", cred.Pid, err)
		case n == 0:
			return 0, fmt.Errorf("process %d has not ended within a second of SIGKILL", cred.Pid)
		default:
			return int(cred.Pid), nil
		}
	}
}
