package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
)

// PortConfig says what control port a daemon opens.
type PortConfig struct {
	Listen         string // host:port or unix:PATH
	AllowPlaintext bool
	SecretFile     string // made if there is none
	AddressFile    string // empty: none
}

// Port is a daemon's control port: bound by OpenPort, served by Serve, ended by Close.
type Port struct {
	Server  *grpc.Server // for the services
	Gate    *Gate
	Address string // the bound address, with its real port

	listener net.Listener
	file     string
	failed   chan error
}

// OpenPort loads or makes the secret and binds the address. Nobody is answered before Serve.
func OpenPort(cfg PortConfig) (*Port, error) {
	secret, err := EnsureSecret(cfg.SecretFile)
	if err != nil {
		return nil, err
	}
	l, err := Listen(cfg.Listen, cfg.AllowPlaintext)
	if err != nil {
		return nil, err
	}
	gate := NewGate(secret)
	return &Port{Server: NewServer(gate), Gate: gate, Address: ListenerAddress(l), listener: l,
		file: cfg.AddressFile, failed: make(chan error, 1)}, nil
}

// Serve begins to answer and then writes the address file, which tells scripts that the daemon is ready. Failed
// receives if the server ends by itself.
func (p *Port) Serve() error {
	go func() {
		if err := p.Server.Serve(p.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			p.failed <- err
		}
	}()
	if p.file == "" {
		return nil
	}
	return writeAddressFile(p.file, p.Address)
}

// Failed receives why the server ended before Close.
func (p *Port) Failed() <-chan error { return p.failed }

// Close lets running calls finish until ctx ends, then breaks them, and removes the address file.
func (p *Port) Close(ctx context.Context) {
	stop := context.AfterFunc(ctx, p.Server.Stop)
	defer stop()
	p.Server.GracefulStop()
	p.listener.Close() // if it was never served
	if p.file != "" {
		os.Remove(p.file)
	}
}

// writeAddressFile writes the address under a temporary name first: who sees the file sees all of it.
func writeAddressFile(path, addr string) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("address file: %w", err)
	}
	_, err = tmp.WriteString(addr + "\n")
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Chmod(tmp.Name(), 0o644)
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name())
		return fmt.Errorf("address file: %w", err)
	}
	return nil
}

// CloseTimeout is how long a daemon that ends lets its last answers travel.
const CloseTimeout = time.Second
