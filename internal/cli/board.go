package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
)

// attachEvery is the time from a failed attempt to connect to the memory to the next one.
const attachEvery = 30 * time.Second

// boardView lists executors by remote reads of the resource manager's memory. On shm and verbs these reads cost the manager nothing and
// succeed while it is stopped. If the memory cannot be reached, boardView asks the manager by message. One goroutine.
type boardView struct {
	app     *app
	manager string

	conn    *grpc.ClientConn
	devices link.Devices
	end     *link.Client // nil: not attached
	reader  *board.Reader

	provider string    // of the connection to the resource manager's memory
	tried    time.Time // when the last attempt to connect failed
}

func (a *app) openBoard(manager string) (*boardView, error) {
	encrypt, known := dataplane.Encryption(a.dataEncryption, a.allowPlaintext)
	if !known {
		return nil, a.BadUsage(fmt.Errorf("--data-encryption: %q is not one of off, on, require", a.dataEncryption))
	}
	conn, err := a.dial(manager)
	if err != nil {
		return nil, err
	}
	return &boardView{app: a, manager: manager, conn: conn, devices: link.Devices{Options: dataplane.Options{GIDIndex: -1, Encrypt: encrypt}}}, nil
}

func (v *boardView) close() {
	v.detach()
	v.devices.Close()
	v.conn.Close()
}

func (v *boardView) detach() {
	if v.end != nil {
		v.end.Close()
	}
	v.end, v.reader = nil, nil
}

func (v *boardView) attach(ctx context.Context) error {
	if v.reader != nil {
		return nil
	}
	m := control.NewManagerClient(v.conn)
	hello, err := m.Hello(ctx, &control.ManagerHelloRequest{ProtocolVersion: control.ProtocolVersion})
	if err != nil {
		return err
	}
	self, err := control.NodeID()
	if err != nil {
		return err
	}
	v.provider, err = v.devices.Try(link.Providers(hello, self, v.app.Getenv("RFAAS_PROVIDER")), func(dev *dataplane.Device) (err error) {
		v.end, err = link.AttachClient(ctx, m, dev)
		return err
	})
	if err != nil {
		return err
	}
	if v.reader, err = board.NewReader(v.end, self); err != nil {
		v.detach()
	}
	return err
}

// list returns the executors by node and address.
func (v *boardView) list(parent context.Context) ([]executorRow, error) {
	ctx, cancel := context.WithTimeout(parent, v.app.timeout)
	defer cancel()
	if time.Since(v.tried) < attachEvery {
		return v.ask(ctx)
	}
	err := v.attach(ctx)
	if errors.Is(err, link.ErrNoWay) || control.ClassOf(err) == control.ClassUnsupported {
		return v.ask(ctx)
	}
	var unreachable *dataplane.Error
	if errors.As(err, &unreachable) {
		v.tried = time.Now()
		fmt.Fprintf(v.app.Stderr, "rfaas: the memory of the resource manager at %s cannot be reached, so it is asked by message: %v\n", v.manager, err)
		ctx, cancel := context.WithTimeout(parent, v.app.timeout) // the attempt has used up the first one
		defer cancel()
		return v.ask(ctx)
	}
	var rows []executorRow
	if err == nil {
		if rows, err = v.read(); err != nil {
			v.detach() // the next time attaches anew: the manager may have been started again
		}
	}
	if err != nil {
		return nil, daemonError{"resource manager at " + v.manager, err}
	}
	slices.SortFunc(rows, func(a, b executorRow) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Address, b.Address))
	})
	return rows, nil
}

func (v *boardView) read() ([]executorRow, error) {
	lines, err := v.reader.All()
	if err != nil {
		return nil, err
	}
	now, head := time.Now(), v.reader.Header()
	rows := make([]executorRow, 0, len(lines))
	for i := range lines {
		l := &lines[i]
		if l.State == board.Left {
			continue
		}
		id, err := v.reader.Identity(l)
		if errors.Is(err, board.ErrGone) || errors.Is(err, board.ErrTorn) {
			continue // it comes or goes at this moment
		} else if err != nil {
			return nil, err
		}
		rows = append(rows, rowOfLine(l, id, now, time.Duration(head.HeartbeatMS)*time.Millisecond))
	}
	return rows, nil
}

func rowOfLine(l *board.Line, id *board.Identity, now time.Time, heartbeat time.Duration) executorRow {
	r := executorRow{Address: id.Control, Node: id.Node, State: stateText(l.State != board.Silent && !l.Stale(now, heartbeat), l.State == board.Draining, l.Cordoned, l.FreeCores, l.Cores),
		Cores: l.Cores, FreeCores: l.FreeCores, MemoryBytes: uint64(l.MemoryMiB) << 20, FreeMemoryBytes: uint64(l.FreeMiB) << 20,
		Providers: l.Providers.Names(), Leases: l.Leases, Slowdown: float64(l.Slowdown) / 1000, AgeMS: uint64(max(now.Sub(l.Written), 0).Milliseconds()),
		Incarnation: fmt.Sprintf("%x", id.Incarnation), By: "memory", nodeID: id.NodeID}
	if !l.Until.IsZero() {
		r.Until = uint64(l.Until.Unix())
	}
	for _, a := range id.Addresses {
		r.Addresses = append(r.Addresses, a.String())
	}
	return r
}

// ask lists the executors by message.
func (v *boardView) ask(ctx context.Context) ([]executorRow, error) {
	reply, err := control.NewManagerClient(v.conn).List(ctx, &control.ListRequest{})
	if err != nil {
		return nil, daemonError{"resource manager at " + v.manager, err}
	}
	rows := make([]executorRow, 0, len(reply.GetExecutors()))
	for _, e := range reply.GetExecutors() {
		rows = append(rows, rowOf(e))
	}
	return rows, nil
}

// checkBoard reports the provider over which this node reaches the resource manager's memory.
func (a *app) checkBoard(ctx context.Context, manager string) finding {
	const check = "manager's memory"
	v, err := a.openBoard(manager)
	if err == nil {
		defer v.close()
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, min(a.timeout, 3*time.Second))
		defer cancel()
		err = v.attach(ctx)
	}
	var unreachable *dataplane.Error
	switch {
	case err == nil:
		return ok(check, "reached by %s", v.provider)
	case errors.Is(err, dataplane.ErrUnsupported) && !errors.Is(err, link.ErrNoWay): // the error says what to change
		return note(check, "", "executors and clients of this node use messages: %v", err)
	case errors.Is(err, link.ErrNoWay), errors.As(err, &unreachable):
		return note(check, "without an RDMA device, start the resource manager with tcp among its providers, and set data-listen to an address "+
			"of its network",
			"executors and clients of this node use messages: %v", err)
	}
	return note(check, "", "not checked: %s", control.Text(err))
}
