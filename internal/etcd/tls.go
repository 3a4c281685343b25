package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
)

// TLS reads the certificates to check etcd with, and this process's certificate for etcd. Empty names: none. Without certificates to check with, it returns
// nil, for plain text.
func TLS(ca, cert, key string) (*tls.Config, error) {
	if ca == "" {
		return nil, nil
	}
	b, err := os.ReadFile(ca)
	if err != nil {
		return nil, fmt.Errorf("etcd-ca: %w", err)
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: x509.NewCertPool()}
	if !cfg.RootCAs.AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("etcd-ca: %s has no certificate in PEM format", ca)
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("etcd-cert, etcd-key: %w", err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}

// Probe connects to every member with TLS. An error means that this process or a member refuses the other's certificate. Members that do not answer are no error.
func (c *Cluster) Probe(ctx context.Context) error {
	if c.cfg.TLS == nil {
		return nil
	}
	errs := make([]error, len(c.cfg.Endpoints))
	var all sync.WaitGroup
	for i, endpoint := range c.cfg.Endpoints {
		all.Go(func() {
			if err := probe(ctx, endpoint, c.cfg.TLS); err != nil {
				errs[i] = fmt.Errorf("etcd at %s: TLS: %w: check etcd-ca, etcd-cert and etcd-key", endpoint, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// probe returns errors of TLS only.
func probe(ctx context.Context, endpoint string, cfg *tls.Config) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	cfg = cfg.Clone()
	cfg.NextProtos = []string{"h2"}
	d := tls.Dialer{Config: cfg}
	conn, err := d.DialContext(ctx, "tcp", endpoint)
	if err == nil {
		defer conn.Close()
		deadline, _ := ctx.Deadline()
		_ = conn.SetReadDeadline(deadline)
		// A server that refuses the client's certificate says so after the handshake. Otherwise it begins HTTP/2.
		_, err = conn.Read(make([]byte, 1))
	}
	var alert tls.AlertError
	var record tls.RecordHeaderError
	var verify *tls.CertificateVerificationError
	var op *net.OpError
	if errors.As(err, &alert) || errors.As(err, &record) || errors.As(err, &verify) || errors.As(err, &op) && op.Op == "remote error" {
		return err
	}
	return nil
}
