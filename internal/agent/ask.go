package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
)

// ErrNone means that no agent listens at a socket.
var ErrNone = errors.New("no agent is running")

// Ask returns the status of the agent at a socket. Errors: ErrNone.
func Ask(ctx context.Context, socket string) (s Status, err error) {
	b, err := exchange(ctx, socket, protocol.OpStatus)
	if err != nil {
		return s, err
	}
	text, err := protocol.DecodeReport(b)
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return s, fmt.Errorf("status of the agent at %s: %w", socket, err)
	}
	return s, nil
}

// Stop makes the agent at a socket exit. The agent releases no leases. Processes that have leases start another agent,
// which takes them over. Errors: ErrNone.
func Stop(ctx context.Context, socket string) error {
	_, err := exchange(ctx, socket, protocol.OpStop)
	return err
}

// exchange sends a request that needs no hello.
func exchange(ctx context.Context, socket string, op protocol.Op) ([]byte, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("%w at %s: a client process starts one when it needs it", ErrNone, socket)
	}
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	defer conn.Close()
	if err := checkOwner(conn.(*net.UnixConn)); err != nil {
		return nil, fmt.Errorf("agent at %s: %w", socket, err)
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	b := protocol.Begin(nil, op, 1, 0)
	protocol.End(b, 0)
	if _, err := conn.Write(b); err != nil {
		return nil, fmt.Errorf("agent at %s: %w", socket, err)
	}
	head := make([]byte, protocol.HeaderSize)
	if _, err = io.ReadFull(conn, head); err != nil {
		return nil, fmt.Errorf("agent at %s: no reply: %w", socket, errors.Join(ctx.Err(), err))
	}
	h, err := protocol.DecodeHeader(head)
	if err != nil {
		return nil, err
	}
	body := make([]byte, h.Size-protocol.HeaderSize)
	if _, err = io.ReadFull(conn, body); err != nil {
		return nil, fmt.Errorf("agent at %s: no reply: %w", socket, errors.Join(ctx.Err(), err))
	}
	if h.Status != 0 {
		text, err := protocol.DecodeFailure(op, body)
		if err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("agent at %s: %s", socket, text)
	}
	return body, nil
}

// checkOwner returns an error unless the process behind a connection runs as this user.
func checkOwner(conn *net.UnixConn) error {
	cred, err := credentials(conn)
	if err != nil {
		return err
	}
	if uid := int(cred.Uid); uid != os.Geteuid() {
		return fmt.Errorf("the socket belongs to an agent of user %d, and this process runs as user %d: each user has an agent of its own; set %s to another path, "+
			"or unset it, or remove the socket", uid, os.Geteuid(), EnvSocket)
	}
	return nil
}
