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
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Hooks and node daemon communicate over a unix socket, with one line each way. The node daemon answers "prolog JOB" when no executor runs
// any more, "epilog JOB" and "status" at once. An answer begins with "ok", or is an error. Only root and the node daemon's own user can open
// the socket: its mode is 0600.
const (
	hookTimeout = 30 * time.Second
	lineMax     = 4096
	answerMax   = 1 << 16
)

// ListenHooks makes the node daemon's socket, and its directory if that is missing. It replaces a socket without a listener.
// The directory must belong to this process's user, and no third user may be able to change the path.
func ListenHooks(path string) (net.Listener, error) {
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	p, err := openPlace(path)
	if err != nil {
		return nil, err
	}
	unix.Close(p.dir)
	if p.owner != uint32(os.Geteuid()) {
		return nil, fmt.Errorf("socket %s: its directory belongs to user %d and not to this user, %d: run the node daemon as that user, or choose another directory", path, p.owner, os.Geteuid())
	}
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return nil, fmt.Errorf("socket %s: another node daemon is using it", path)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode().Type() != os.ModeSocket {
		return nil, fmt.Errorf("socket %s: the path is a file and not a socket: remove it, or choose another path", path)
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, fmt.Errorf("socket: %w", err)
	}
	old := unix.Umask(0o177) // so that the socket is never accessible to others
	l, err := net.Listen("unix", path)
	unix.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	return l, nil
}

// ServeHooks answers hooks until ctx ends. It returns when all conversations are over.
func (a *Daemon) ServeHooks(ctx context.Context, l net.Listener, log *slog.Logger) error {
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

// converse answers one line. It takes at most hookTimeout, and ends when the other side closes the connection.
func (a *Daemon) converse(c net.Conn) error {
	c.SetDeadline(time.Now().Add(hookTimeout))
	line, err := bufio.NewReaderSize(io.LimitReader(c, lineMax), lineMax).ReadString('\n')
	if err != nil {
		if err == io.EOF && line == "" {
			return nil // only checked for a listener
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
		return nil // the hook had no more time
	}
	return errors.Join(err, werr)
}

func (a *Daemon) answer(ctx context.Context, line string) (string, error) {
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

// ErrNoDaemon means that no process listens on the socket.
var ErrNoDaemon = errors.New("no node daemon on this node")

// TellDaemon sends one line to the node daemon and returns its answer. With force it kills a node daemon that does not answer
// before ctx's deadline. The executor ends with its node daemon, and the node daemon's supervisor starts a new one.
func TellDaemon(ctx context.Context, path, line string, force bool) (string, error) {
	socket, owner, err := openSocket(path)
	if errors.Is(err, unix.ENOENT) {
		return "", fmt.Errorf("%w: %s", ErrNoDaemon, path)
	}
	if err != nil {
		return "", err
	}
	defer socket.Close()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d", socket.Fd()))
	if errors.Is(err, unix.ECONNREFUSED) {
		return "", fmt.Errorf("%w: %s", ErrNoDaemon, path)
	}
	if err != nil {
		return "", fmt.Errorf("socket %s: %w", path, err)
	}
	defer c.Close()
	if deadline, ok := ctx.Deadline(); ok {
		c.SetDeadline(deadline)
	}
	if _, err = io.WriteString(c, line+"\n"); err == nil {
		var answer string
		answer, err = bufio.NewReader(io.LimitReader(c, answerMax)).ReadString('\n')
		answer = strings.TrimSpace(answer)
		if text, ok := strings.CutPrefix(answer, "ok"); ok && err == nil {
			return strings.TrimSpace(text), nil
		}
		if err == nil {
			return "", fmt.Errorf("the node daemon answered %.200q", strings.TrimPrefix(answer, "error: "))
		}
	}
	if !force || !errors.Is(err, os.ErrDeadlineExceeded) {
		return "", fmt.Errorf("the node daemon does not answer: %w", err)
	}
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return "", err
	}
	var pid int
	var kerr error
	if err := raw.Control(func(fd uintptr) { pid, kerr = killPeer(int(fd), owner) }); err != nil {
		return "", err
	}
	if kerr != nil {
		return "", fmt.Errorf("the node daemon does not answer in time, and cannot be killed: %w", kerr)
	}
	return "", fmt.Errorf("the node daemon, process %d, does not answer in time and was killed", pid)
}
