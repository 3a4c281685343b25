package agent

import (
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

const (
	// pauseAccept is how long accepting pauses when this process has no descriptor left.
	pauseAccept = 50 * time.Millisecond
	// turnAwayPatience is how long a refused client may take to send its hello and to read the answer.
	turnAwayPatience = 200 * time.Millisecond
)

// noFiles returns the error for a client when this process has no file descriptors left.
func (a *Agent) noFiles() error {
	var l unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &l)
	return failed("agent", dataplane.StatusBusy, "the agent (pid %d) has no file descriptors left for another request or client: its limit is %d. "+
		"End client processes, or stop it with `rfaas agent stop` and start it from a process with a higher limit (ulimit -n)", os.Getpid(), l.Cur)
}

// tooMany returns the error for a client beyond mostClients.
func tooMany() error {
	return failed("agent", dataplane.StatusBusy, "%d processes are connected to the agent, which is its limit: end some of them", mostClients)
}

// turnAway closes the spare descriptor, accepts a client in its place, and refuses it. Only the accepting goroutine may call it.
func (a *Agent) turnAway() {
	if a.spare == nil {
		time.Sleep(pauseAccept)
	} else {
		a.spare.Close()
		_ = a.cfg.Socket.listener.SetDeadline(time.Now().Add(lastWait)) // the client may have disconnected
		conn, err := a.cfg.Socket.listener.AcceptUnix()
		a.linger()
		if err == nil {
			refuse(conn, a.noFiles())
		} else if a.ctx.Err() == nil {
			time.Sleep(pauseAccept)
		}
	}
	a.spare, _ = os.Open(os.DevNull)
}

// refuse answers the first request of a client with an error and closes the connection.
func refuse(conn *net.UnixConn, why error) {
	defer conn.Close()
	if _, err := peer(conn); err != nil {
		return
	}
	_ = conn.SetDeadline(time.Now().Add(turnAwayPatience))
	head := make([]byte, protocol.HeaderSize)
	if _, err := io.ReadFull(conn, head); err != nil { // Read discards descriptors that come with it
		return
	}
	h, err := protocol.DecodeHeader(head)
	if err != nil {
		return
	}
	if _, err := io.CopyN(io.Discard, conn, int64(h.Size-protocol.HeaderSize)); err != nil {
		return
	}
	_, _ = conn.Write(protocol.Failure(h.Op, h.ID, int32(dataplane.StatusBusy), why.Error()))
}
