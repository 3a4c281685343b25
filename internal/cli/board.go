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

// boardView lists executors as the resource manager's memory has them, by remote reads that cost the manager nothing and
// succeed while it is stopped; where its memory cannot be reached, by message. One goroutine.
type boardView struct {
	app     *app
	manager string

	conn    *grpc.ClientConn
	devices link.Devices
	end     *link.Client // nil: not attached
	reader  *board.Reader
}

func (a *app) openBoard(manager string) (*boardView, error) {
	conn, err := a.dial(manager)
	if err != nil {
		return nil, err
	}
	return &boardView{app: a, manager: manager, conn: conn, devices: link.Devices{Options: dataplane.Options{GIDIndex: -1}}}, nil
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
	_, err = v.devices.Try(link.Providers(hello, self, v.app.Getenv("RFAAS_PROVIDER")), func(dev *dataplane.Device) (err error) {
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
func (v *boardView) list(ctx context.Context) ([]executorRow, error) {
	ctx, cancel := context.WithTimeout(ctx, v.app.timeout)
	defer cancel()
	err := v.attach(ctx)
	if errors.Is(err, link.ErrNoWay) || control.ClassOf(err) == control.ClassUnsupported {
		return v.ask(ctx)
	}
	var rows []executorRow
	if err == nil {
		if rows, err = v.read(); err != nil {
			v.detach() // the next time attaches anew: the manager may have been started again
		}
	}
	if err != nil {
		return nil, fmt.Errorf("resource manager at %s: %s", v.manager, control.Text(err))
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
	r := executorRow{Address: id.Control, Node: id.Node, State: stateText(l.State != board.Silent && !l.Stale(now, heartbeat), l.State == board.Draining, l.FreeCores, l.Cores),
		Cores: l.Cores, FreeCores: l.FreeCores, MemoryBytes: uint64(l.MemoryMiB) << 20, FreeMemoryBytes: uint64(l.FreeMiB) << 20,
		Providers: l.Providers.Names(), Leases: l.Leases, AgeMS: uint64(max(now.Sub(l.Written), 0).Milliseconds()),
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
		return nil, fmt.Errorf("resource manager at %s: %s", v.manager, control.Text(err))
	}
	rows := make([]executorRow, 0, len(reply.GetExecutors()))
	for _, e := range reply.GetExecutors() {
		rows = append(rows, rowOf(e))
	}
	return rows, nil
}
