package others

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const maxMessage = 64 << 20

// Serve is the server side of gRPC and HTTP: it prints its address and serves until stdin ends. kind is one of Names.
func Serve(kind string, stdin io.Reader, stdout io.Writer) error {
	network, address := "tcp", "127.0.0.1:0"
	if kind == "grpc-unix" {
		dir, err := os.MkdirTemp("", "rfaas-bench")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		network, address = "unix", dir+"/socket"
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return err
	}
	defer l.Close()
	ended := make(chan error, 1)
	switch kind {
	case "grpc-unix", "grpc-tcp":
		s := grpc.NewServer(grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage))
		s.RegisterService(&echoService, nil)
		defer s.Stop()
		go func() { ended <- s.Serve(l) }()
	case "http":
		s := &http.Server{Handler: http.HandlerFunc(echoHTTP), ReadHeaderTimeout: 10 * time.Second}
		defer s.Close()
		go func() { ended <- s.Serve(l) }()
	default:
		return fmt.Errorf("%q is not one of grpc-unix, grpc-tcp, http", kind)
	}
	fmt.Fprintln(stdout, l.Addr())
	go func() {
		_, err := io.Copy(io.Discard, stdin)
		ended <- err
	}()
	return <-ended
}

func echoHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxMessage))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	_, _ = w.Write(body)
}

const echoMethod = "/rfaas.bench.Echo/Call"

// echoService is a unary call that returns its bytes.
var echoService = grpc.ServiceDesc{
	ServiceName: "rfaas.bench.Echo",
	HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Call", Handler: func(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		var in wrapperspb.BytesValue
		if err := decode(&in); err != nil {
			return nil, err
		}
		return &in, nil
	}}},
}

// server measures gRPC or HTTP with a server process.
type server struct {
	kind    string
	command []string
	verbs   bool

	cmd    *exec.Cmd
	stdin  io.WriteCloser
	conn   *grpc.ClientConn
	client *http.Client
	url    string
}

func (s *server) start(ctx context.Context) error {
	if s.verbs {
		return errVerbs
	}
	if len(s.command) == 0 {
		return errors.New("Config.Self is empty: it names the program that runs the server")
	}
	s.cmd = exec.CommandContext(ctx, s.command[0], append(s.command[1:len(s.command):len(s.command)], s.kind)...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	s.cmd.Stderr = os.Stderr
	var err error
	if s.stdin, err = s.cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := s.cmd.Start(); err != nil {
		s.cmd = nil
		return err
	}
	address, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return fmt.Errorf("the server printed no address: %w", err)
	}
	address = strings.TrimSpace(address)
	switch s.kind {
	case "http":
		s.client, s.url = &http.Client{Transport: &http.Transport{}}, "http://"+address
		return nil
	case "grpc-unix":
		address = "unix:" + address
	}
	s.conn, err = grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)))
	return err
}

func (s *server) stop() {
	if s.conn != nil {
		_ = s.conn.Close()
	}
	if s.client != nil {
		s.client.CloseIdleConnections()
	}
	if s.cmd != nil {
		_ = s.stdin.Close()
		_ = s.cmd.Wait()
	}
}

func (s *server) call(ctx context.Context, in []byte) (n int, err error) {
	if s.conn != nil {
		var out wrapperspb.BytesValue
		err := s.conn.Invoke(ctx, echoMethod, &wrapperspb.BytesValue{Value: in}, &out)
		return len(out.Value), err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, bytes.NewReader(in))
	if err != nil {
		return 0, err
	}
	reply, err := s.client.Do(req)
	if err != nil {
		return 0, err
	}
	defer reply.Body.Close()
	out, err := io.ReadAll(reply.Body)
	return len(out), err
}

// batchMost is the longest time of a batch that has batchLeast samples.
const (
	batchMost  = 2 * time.Second
	batchLeast = 20
)

// batch makes a tenth of n round trips, because they take a hundred times as long as those of systems that poll. It makes fewer on a
// machine so busy that they take seconds.
func (s *server) batch(ctx context.Context, size, n int) (float64, []int64, error) {
	in := make([]byte, size)
	return timed(max(n/10, batchLeast), func() error {
		got, err := s.call(ctx, in)
		if err == nil && got != size {
			err = fmt.Errorf("%d bytes came back as %d", size, got)
		}
		return err
	})
}

func (s *server) how() string {
	return s.kind + ", one call after the other on one connection to a process of its own, in Go on both sides, neither pinned"
}
