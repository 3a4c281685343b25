package manager

import (
	"log/slog"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/control"
)

// Any message to any operation: an answer or a named error, and the table stays one that can be told to others.
func FuzzService(f *testing.F) {
	marshal := func(m proto.Message) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		return b
	}
	info := &control.InfoReply{ProtocolVersion: control.ProtocolVersion, Node: "n1", Incarnation: []byte("0123456789abcdef"), Cores: 4, FreeCores: 2,
		Providers: []string{"shm"}}
	f.Add(byte(0), marshal(&control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: "127.0.0.1:7465", Info: info}))
	f.Add(byte(1), marshal(&control.HeartbeatRequest{ExecutorId: 1, Info: info}))
	f.Add(byte(2), marshal(&control.DeregisterRequest{ExecutorId: 1}))
	f.Add(byte(3), marshal(&control.AttachExecutorRequest{Incarnation: info.Incarnation, Provider: "shm", Blob: make([]byte, 80)}))
	f.Add(byte(4), marshal(&control.AttachClientRequest{Provider: "shm", Blob: make([]byte, 80)}))
	f.Add(byte(5), marshal(&control.SettleRequest{Entries: []*control.AccountEntry{{}}}))
	f.Add(byte(6), marshal(&control.BillRequest{}))
	f.Add(byte(7), []byte{})
	f.Fuzz(func(t *testing.T, op byte, b []byte) {
		now := time.Unix(1000, 0)
		m, err := New(Config{Heartbeat: time.Second, Slots: 8, Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return now }})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		first, err := m.Register(t.Context(), &control.RegisterRequest{ProtocolVersion: control.ProtocolVersion, Address: "127.0.0.1:1", Info: info})
		if err != nil {
			t.Fatal(err)
		}
		switch op % 8 {
		case 0:
			req := new(control.RegisterRequest)
			if proto.Unmarshal(b, req) == nil {
				_, err = m.Register(t.Context(), req)
			}
		case 1:
			req := new(control.HeartbeatRequest)
			if proto.Unmarshal(b, req) == nil {
				if op&8 != 0 {
					req.ExecutorId = first.GetExecutorId()
				}
				_, err = m.Heartbeat(t.Context(), req)
			}
		case 2:
			req := new(control.DeregisterRequest)
			if proto.Unmarshal(b, req) == nil {
				_, err = m.Deregister(t.Context(), req)
			}
		case 3:
			req := new(control.AttachExecutorRequest)
			if proto.Unmarshal(b, req) == nil {
				if op&8 != 0 {
					req.ExecutorId = first.GetExecutorId()
				}
				_, err = m.AttachExecutor(t.Context(), req)
			}
		case 4:
			req := new(control.AttachClientRequest)
			if proto.Unmarshal(b, req) == nil {
				_, err = m.AttachClient(t.Context(), req)
			}
		case 5:
			req := new(control.SettleRequest)
			if proto.Unmarshal(b, req) == nil {
				_, err = m.Settle(t.Context(), req)
			}
		case 6:
			req := new(control.BillRequest)
			if proto.Unmarshal(b, req) == nil {
				_, err = m.Bill(t.Context(), req)
			}
		case 7:
			req := new(control.ManagerHelloRequest)
			if proto.Unmarshal(b, req) == nil {
				_, err = m.Hello(t.Context(), req)
			}
		}
		if st, ok := status.FromError(err); err != nil && (!ok || control.ClassOf(err) == 0 || st.Message() == "" || !utf8.ValidString(st.Message())) {
			t.Errorf("an error without class or text: %v", err)
		}
		l, err := m.List(t.Context(), &control.ListRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := proto.Marshal(l); err != nil {
			t.Errorf("the list cannot be sent: %v", err)
		}
		for _, e := range l.GetExecutors() {
			if _, err := control.ParseAddress(e.GetAddress()); err != nil || e.GetInfo().GetFreeCores() > e.GetInfo().GetCores() {
				t.Errorf("listed: %v (%v)", e, err)
			}
		}
	})
}
