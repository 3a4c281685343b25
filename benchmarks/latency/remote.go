package latency

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// A client and a peer on two machines: Serve runs on the peer's, Config.Remote is set on the client's. Four messages go over TCP, each
// after its length (4 bytes, big endian), then nothing. The measurement ends when either side closes the connection.
//
//	client                              machine of the peer
//	  | remoteGreeting ────────────────▶  |
//	  |  ◀──────────────────── the same   |  or the text of an error
//	  | the bench's hello ─────────────▶  |  starts the peer, passes the hello on
//	  |  ◀─────────── the peer's answer   |
const (
	remoteGreeting = "rfaas bench 1"
	messageMax     = 64 << 10
	// handshakeTime bounds everything up to the peer's answer.
	handshakeTime = 15 * time.Second
	// queueTime is how long a client waits for the one before it to end.
	queueTime = 5 * time.Second
)

func writeMessage(w io.Writer, text []byte) error {
	_, err := w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...))
	return err
}

func readMessage(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > messageMax {
		return nil, fmt.Errorf("a message of %d bytes, at most %d", n, messageMax)
	}
	text := make([]byte, n)
	_, err := io.ReadFull(r, text)
	return text, err
}

// packets is one end of a seqpacket socket. Closing it from another goroutine ends a read.
func packets(fd int) (*os.File, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(dup, true); err != nil {
		_ = unix.Close(dup)
		return nil, err
	}
	return os.NewFile(uintptr(dup), "packets"), nil
}

// carry sends one packet on as a message, and passes the answer back.
func carry(question io.Reader, conn io.ReadWriter, answer io.Writer) error {
	room := make([]byte, messageMax)
	n, err := question.Read(room)
	if err != nil {
		return err
	}
	if err := writeMessage(conn, room[:n]); err != nil {
		return err
	}
	text, err := readMessage(conn)
	if err != nil {
		return err
	}
	_, err = answer.Write(text)
	return err
}

// ---- the client's machine ----

// joinPeer connects to Serve and relays between it and the bench's client at the other end of the socket.
func (s *session) joinPeer(socket int) error {
	dialer := net.Dialer{Timeout: handshakeTime}
	conn, err := dialer.Dial("tcp", s.cfg.Remote)
	if err != nil {
		return fmt.Errorf("reach the peer's machine: %w (rfaas bench serve must run there)", err)
	}
	_ = conn.SetDeadline(time.Now().Add(handshakeTime))
	if err = writeMessage(conn, []byte(remoteGreeting)); err == nil {
		var said []byte
		if said, err = readMessage(conn); err == nil && string(said) != remoteGreeting {
			err = fmt.Errorf("%q", said)
		}
	}
	if err != nil {
		_ = conn.Close()
		return fmt.Errorf("%s refuses this client: %w", s.cfg.Remote, err)
	}
	local, err := packets(socket)
	if err != nil {
		_ = conn.Close()
		return err
	}
	s.kill = sync.OnceFunc(func() {
		_ = conn.Close()
		_ = local.Close()
		_ = unix.Shutdown(socket, unix.SHUT_RDWR) // ends a wait for the answer
	})
	go func() {
		defer close(s.peerEnd)
		if s.peerErr = carry(local, conn, local); s.peerErr == nil {
			_ = conn.SetDeadline(time.Time{})
			if _, s.peerErr = conn.Read(make([]byte, 1)); errors.Is(s.peerErr, io.EOF) {
				s.peerErr = errors.New("its machine has closed the connection")
			}
		}
		if errors.Is(s.peerErr, net.ErrClosed) || errors.Is(s.peerErr, os.ErrClosed) {
			s.peerErr = nil // by us
		}
		s.kill()
	}()
	return nil
}

// ---- the peer's machine ----

// ServeConfig says how to serve clients of other machines.
type ServeConfig struct {
	Device   dataplane.Options
	CPU      int           // to which the peer is pinned; -1: none
	Peer     string        // path of rfaas-bench-peer
	Idle     time.Duration // Serve ends after this long without a new client; 0: never. Counted after the first client
	Progress func(line string)
}

// Serve starts a peer for each client that connects, one at a time, until ctx ends. It does not authenticate clients. It closes l.
func Serve(ctx context.Context, l net.Listener, cfg ServeConfig) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer l.Close()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	busy := make(chan struct{}, 1)
	var all sync.WaitGroup
	defer all.Wait()
	idle := time.AfterFunc(time.Hour, stop)
	idle.Stop()
	defer idle.Stop()
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		all.Go(func() {
			select {
			case busy <- struct{}{}:
				idle.Stop()
				defer func() {
					if cfg.Idle > 0 {
						idle.Reset(cfg.Idle)
					}
					<-busy
				}()
			case <-ctx.Done():
				_ = conn.Close()
				return
			case <-time.After(queueTime):
				refuse(conn, "another client is being served")
				return
			}
			if err := serveOne(ctx, conn, cfg); err != nil {
				cfg.Progress(fmt.Sprintf("%v: %v", conn.RemoteAddr(), err))
			}
		})
	}
}

// refuse sends a client the reason and closes the connection.
func refuse(conn net.Conn, why string) {
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	_ = writeMessage(conn, []byte(why))
	_ = conn.Close()
}

// serveOne serves until the client or the peer ends.
func serveOne(ctx context.Context, conn net.Conn, cfg ServeConfig) error {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	_ = conn.SetDeadline(time.Now().Add(handshakeTime))
	said, err := readMessage(conn)
	if err != nil {
		return fmt.Errorf("no greeting: %w", err)
	}
	if string(said) != remoteGreeting {
		refuse(conn, fmt.Sprintf("this is %s, not %q", remoteGreeting, said[:min(len(said), 40)]))
		return fmt.Errorf("greeting %q", said[:min(len(said), 40)])
	}
	if err := writeMessage(conn, said); err != nil {
		return err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(pair[0])
	local, err := packets(pair[0])
	if err != nil {
		_ = unix.Close(pair[1])
		return err
	}
	defer local.Close()
	cfg.Progress(fmt.Sprintf("serving %v", conn.RemoteAddr()))
	kill, ended, err := cfg.startPeer(pair[1])
	if err != nil {
		return err
	}
	go func() { // relays the client's hello and the peer's answer
		text, err := readMessage(conn)
		if err == nil {
			_, err = local.Write(text)
		}
		if err == nil {
			room := make([]byte, messageMax)
			var n int
			if n, err = local.Read(room); err == nil && n > 0 {
				err = writeMessage(conn, room[:n])
			}
		}
		if err == nil {
			_ = conn.SetDeadline(time.Time{})
			_, _ = conn.Read(make([]byte, 1)) // until the client has gone
		}
		kill()
	}()
	return <-ended
}

// startPeer starts the peer at the other end of a socket, which it takes over. kill ends the peer; any goroutine may call it, more
// than once. ended gets one value when the peer has ended: nil after kill, otherwise the cause.
func (cfg *ServeConfig) startPeer(socket int) (kill func(), ended chan error, err error) {
	ended = make(chan error, 1)
	d := cfg.Device
	cmd := exec.Command(cfg.Peer, "--here", d.Device)
	for _, n := range []int{d.Port, d.GIDIndex, d.PKeyIndex, d.TrafficClass, d.ServiceLevel, d.MTU, cfg.CPU} {
		cmd.Args = append(cmd.Args, strconv.Itoa(n))
	}
	f := os.NewFile(uintptr(socket), "")
	defer f.Close()
	cmd.ExtraFiles, cmd.Stderr = []*os.File{f}, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	var killed sync.Once
	asked := make(chan struct{})
	started := make(chan error)
	go func() { // the thread that starts it must outlive it
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		err = cmd.Wait()
		select {
		case <-asked:
			err = nil
		default:
		}
		ended <- err
	}()
	if err := <-started; err != nil {
		return nil, nil, fmt.Errorf("start the bench's peer: %w (make build makes it; --peer says where it is)", err)
	}
	return func() {
		killed.Do(func() { close(asked) })
		_ = cmd.Process.Kill()
	}, ended, nil
}
