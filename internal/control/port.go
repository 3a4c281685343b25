package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/quota"
)

// PortConfig describes the control port of a daemon.
type PortConfig struct {
	Listen         string // host:port or unix:PATH
	AllowPlaintext bool
	SecretFile     string                              // created if it does not exist
	IdentityDir    string                              // of a node: its certificate, and the keys that it trusts; empty: no TLS and no tokens
	OpenIdentity   identity.Opener                     // opens the files of IdentityDir, now and when they change; nil: the file system
	AuditFile      string                              // empty: Log only
	OpenAudit      func(path string) (*os.File, error) // opens it for appending, now and after it was renamed; nil: identity.OpenAuditFile
	Daemon         string                              // its name in audit lines
	AddressFile    string                              // empty: none
	Log            *slog.Logger                        // nil: no log
	Inherited      *Inherited                          // from the program that this one takes over from; nil: none
	Bounds
}

// Inherited is what a port takes over from the program that ran in this process before.
type Inherited struct {
	Socket int    // the listener's descriptor
	Secret Secret // this process may have lost the right to read its file
}

// Bounds limits the resources of a port's callers.
type Bounds struct {
	Streams     int           // simultaneous streams of one connection; 0: 1024
	UnauthBytes int           // memory of all unauthenticated connections together; 0: 64 MiB
	FirstCall   time.Duration // from a connection to its first authenticated call; 0: 10 s
	Tenant      quota.Limits  // Connections is also bounded by a quarter of the process's descriptors
}

// limits returns the limits of a tenant.
func (b *Bounds) limits() quota.Limits {
	l := maps.Clone(b.Tenant)
	if l == nil {
		l = quota.Limits{}
	}
	most := int(max(descriptors()/4, 16))
	l[quota.Connections] = min(cmp.Or(l[quota.Connections], most), most)
	return l
}

// Port is a daemon's control port: bound by OpenPort, served by Serve, ended by Close.
type Port struct {
	Server  *grpc.Server // for the services
	Gate    *Gate
	Address string         // the bound address, with its real port
	Secret  *Secret        // of its SecretFile
	Node    *identity.Node // nil without an identity directory

	listener  *guarded
	audit     *identity.Audit
	file      string
	announced bool // the address file is written
	failed    chan error
	closing   context.CancelFunc
	ending    context.Context // ended by closing
	watched   chan struct{}   // closed when watch has returned; nil: it was not started
}

// OpenPort loads or creates the secret, loads the identity and binds the address. No caller is answered before Serve.
func OpenPort(cfg PortConfig) (*Port, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	var secret Secret
	var err error
	if cfg.Inherited != nil {
		secret = cfg.Inherited.Secret
	} else if secret, err = EnsureSecret(cfg.SecretFile); err != nil {
		return nil, err
	}
	known := &identity.SecretVerifier{Secret: secret[:], Replays: &identity.Replays{}}
	verifiers := []identity.Verifier{known}
	p := &Port{file: cfg.AddressFile, announced: cfg.Inherited != nil, Secret: &secret, failed: make(chan error, 1)}
	transport := &serverTransport{allowPlain: cfg.AllowPlaintext}
	if cfg.IdentityDir != "" {
		if p.Node, err = identity.OpenNode(cfg.IdentityDir, cfg.OpenIdentity, cfg.Log, now()); err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("identity-dir %s is not a complete identity directory: %w (make it with rfaas cluster join or rfaas cluster node)", cfg.IdentityDir, err)
			}
			return nil, fmt.Errorf("identity: %w", err)
		}
		transport.node, transport.tls = p.Node, serverTLS(p.Node)
		known.Replays = p.Node.Tokens.Replays
		verifiers = append([]identity.Verifier{p.Node.Tokens}, verifiers...)
	}
	if p.audit, err = identity.OpenAudit(identity.AuditConfig{Path: cfg.AuditFile, Open: cfg.OpenAudit, Log: cfg.Log, Daemon: cfg.Daemon}); err != nil {
		return nil, fmt.Errorf("audit file: %w", err)
	}
	l, err := cfg.listen(p.Node != nil)
	if err != nil {
		p.audit.Close()
		return nil, err
	}
	p.Gate = NewGate(p.audit, cfg.limits(), verifiers...)
	transport.gate = p.Gate
	closing, end := context.WithCancel(context.Background())
	p.Server, p.Address, p.ending, p.closing = newServer(transport, cmp.Or(cfg.Streams, 1024), closing), ListenerAddress(l), closing, end
	p.listener = &guarded{Listener: l, unauth: &unauthConns{most: mostUnauth(), memory: cmp.Or(cfg.UnauthBytes, 64<<20),
		within: cmp.Or(cfg.FirstCall, 10*time.Second)}}
	return p, nil
}

func (c *PortConfig) listen(tls bool) (net.Listener, error) {
	if c.Inherited != nil {
		return Inherit(c.Inherited.Socket)
	}
	return Listen(c.Listen, c.AllowPlaintext || tls)
}

// Leave stops accepting connections and returns the listener's descriptor (see the function Leave). It writes the queued
// audit lines. Calls in progress continue.
func (p *Port) Leave() (fd int, err error) {
	fd, err = Leave(p.listener.Listener)
	p.audit.Flush()
	return fd, err
}

// watch checks the identity until the port closes.
func (p *Port) watch() {
	defer close(p.watched)
	if p.Node != nil {
		p.Node.WatchUntil(p.ending, now)
	}
}

// Serve starts to answer callers and then writes the address file, which tells scripts that the daemon is ready. It
// does not block. Failed receives an error if the server ends by itself.
func (p *Port) Serve() error {
	p.watched = make(chan struct{})
	go p.watch()
	go func() {
		if err := p.Server.Serve(p.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			p.failed <- err
		}
	}()
	return p.Announce()
}

// Announce writes the address file before Serve, for a daemon that will have lost the right to write it by then.
// Clients that connect in the meantime wait.
func (p *Port) Announce() error {
	if p.file == "" || p.announced {
		return nil
	}
	p.announced = true
	return writeAddressFile(p.file, p.Address)
}

// Failed returns a channel that receives the reason if the server ends before Close.
func (p *Port) Failed() <-chan error { return p.failed }

// Close ends the contexts that Closing returned, lets running calls finish until ctx ends, aborts the others, and
// removes the address file.
func (p *Port) Close(ctx context.Context) {
	p.closing()
	stop := context.AfterFunc(ctx, p.Server.Stop)
	defer stop()
	p.Server.GracefulStop()
	p.listener.Close() // if it was never served
	if p.watched != nil {
		<-p.watched
	}
	p.audit.Close()
	if p.file != "" {
		os.Remove(p.file)
	}
}

// writeAddressFile writes the address atomically, so that a reader never sees an incomplete file.
func writeAddressFile(path, addr string) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("address file: %w", err)
	}
	_, err = tmp.WriteString(addr + "\n")
	if err == nil {
		err = tmp.Chmod(0o644) // not by name, which could lead to another file by now
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
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

// CloseTimeout is how long an ending daemon waits for its last answers to be sent.
const CloseTimeout = time.Second
