// Package etcdtest starts etcd for tests.
package etcdtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Options change what Start starts.
type Options struct {
	Members int      // 0: one
	TLS     bool     // clients need a certificate of Server.CA
	Args    []string // further ones of etcd
}

// Server is an etcd on loopback.
type Server struct {
	Endpoint      string // of all members, separated by commas
	CA, Cert, Key string // files for clients; empty without TLS

	t       testing.TB
	program string
	members []*member
}

type member struct {
	endpoint string
	args     []string
	cmd      *exec.Cmd
	log      *os.File
}

// Start starts etcd until the end of the test.
func Start(t testing.TB, o Options) *Server {
	t.Helper()
	program, err := exec.LookPath("etcd")
	if err != nil {
		testkit.Lacks(t, "etcd is missing: run make deps")
	}
	dir := t.TempDir()
	s := &Server{t: t, program: program}
	scheme := "http://"
	if o.TLS {
		scheme = "https://"
		s.CA, s.Cert, s.Key = Certificates(t, dir)
		o.Args = append(o.Args, "--cert-file", s.Cert, "--key-file", s.Key, "--client-cert-auth", "--trusted-ca-file", s.CA)
	}
	var endpoints, peers []string
	for i := range max(o.Members, 1) {
		m := &member{endpoint: free(t)}
		name, peer := "m"+strconv.Itoa(i), "http://"+free(t)
		endpoints, peers = append(endpoints, m.endpoint), append(peers, name+"="+peer)
		m.args = append([]string{"--name", name, "--data-dir", filepath.Join(dir, name), "--listen-client-urls", scheme + m.endpoint, "--advertise-client-urls", scheme + m.endpoint,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--unsafe-no-fsync"}, o.Args...)
		if m.log, err = os.Create(filepath.Join(dir, name+".log")); err != nil {
			t.Fatal(err)
		}
		s.members = append(s.members, m)
	}
	s.Endpoint = strings.Join(endpoints, ",")
	t.Cleanup(func() {
		s.Kill()
		for _, m := range s.members {
			m.log.Close()
			if b, err := os.ReadFile(m.log.Name()); err == nil && t.Failed() {
				t.Logf("etcd:\n%s", b[max(0, len(b)-4000):])
			}
		}
	})
	for _, m := range s.members {
		m.args = append(m.args, "--initial-cluster", strings.Join(peers, ","))
	}
	s.Run()
	return s
}

// free returns an address on loopback that no process uses.
func free(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// Run starts all members, also again after Kill, and waits until they accept connections.
func (s *Server) Run() {
	s.t.Helper()
	for _, m := range s.members {
		m.cmd = exec.Command(s.program, m.args...)
		m.cmd.Stdout, m.cmd.Stderr = m.log, m.log
		m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := m.cmd.Start(); err != nil {
			s.t.Fatal(err)
		}
	}
	for _, m := range s.members {
		testkit.Eventually(s.t, fmt.Sprintf("etcd listens at %s", m.endpoint), func() bool {
			c, err := net.DialTimeout("tcp", m.endpoint, time.Second)
			if err == nil {
				c.Close()
			}
			return err == nil
		})
	}
}

// Kill ends all members. What they have acknowledged stays.
func (s *Server) Kill() {
	for i := range s.members {
		s.KillMember(i)
	}
}

// KillMember ends one member.
func (s *Server) KillMember(i int) {
	if m := s.members[i]; m.cmd != nil {
		_ = m.cmd.Process.Kill()
		_ = m.cmd.Wait()
		m.cmd = nil
	}
}

// Certificates makes an authority and a certificate for loopback, for servers and clients, in a directory.
func Certificates(t testing.TB, dir string) (ca, cert, key string) {
	t.Helper()
	caKey, caCert := sign(t, nil, nil)
	ownKey, ownCert := sign(t, caKey, caCert)
	der, err := x509.MarshalPKCS8PrivateKey(ownKey)
	if err != nil {
		t.Fatal(err)
	}
	ca, cert, key = filepath.Join(dir, "ca.crt"), filepath.Join(dir, "etcd.crt"), filepath.Join(dir, "etcd.key")
	for name, block := range map[string]*pem.Block{ca: {Type: "CERTIFICATE", Bytes: caCert.Raw}, cert: {Type: "CERTIFICATE", Bytes: ownCert.Raw}, key: {Type: "PRIVATE KEY", Bytes: der}} {
		if err := os.WriteFile(name, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return ca, cert, key
}

// sign makes a key and its certificate; without an issuer, that of an authority.
func sign(t testing.TB, issuerKey *ecdsa.PrivateKey, issuer *x509.Certificate) (*ecdsa.PrivateKey, *x509.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "etcd of a test"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature}
	if issuer == nil {
		issuerKey, issuer = key, c
		c.KeyUsage, c.IsCA, c.BasicConstraintsValid = x509.KeyUsageCertSign, true, true
	} else {
		c.ExtKeyUsage, c.IPAddresses = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, []net.IP{net.IPv4(127, 0, 0, 1)}
	}
	der, err := x509.CreateCertificate(rand.Reader, c, issuer, &key.PublicKey, issuerKey)
	if err != nil {
		t.Fatal(err)
	}
	made, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return key, made
}
