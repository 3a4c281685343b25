package manager

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// A TLS handshake like a browser's, without Ed25519 among the accepted signatures. crypto/tls cannot be configured that
// way, so the test changes the bytes that it sends.
func browserHello(t *testing.T, host string) []byte {
	t.Helper()
	ours, theirs := net.Pipe()
	defer ours.Close()
	go func() {
		tls.Client(theirs, &tls.Config{ServerName: host}).Handshake() //nolint:errcheck // the other end does not answer
		theirs.Close()
	}()
	head := make([]byte, 5)
	if _, err := io.ReadFull(ours, head); err != nil {
		t.Fatal(err)
	}
	hello := append(head, make([]byte, binary.BigEndian.Uint16(head[3:]))...)
	if _, err := io.ReadFull(ours, hello[5:]); err != nil {
		t.Fatal(err)
	}
	changed := 0
	b := hello[5+4+2+32:]                // record, handshake, version, random
	b = b[1+int(b[0]):]                  // session
	b = b[2+binary.BigEndian.Uint16(b):] // suites
	b = b[1+int(b[0]):]                  // compression
	for b = b[2:]; len(b) > 0; {         // extensions
		kind, n := binary.BigEndian.Uint16(b), int(binary.BigEndian.Uint16(b[2:]))
		if kind == 13 || kind == 50 { // signature_algorithms, signature_algorithms_cert
			for i := 6; i < 4+n; i += 2 {
				if binary.BigEndian.Uint16(b[i:]) == uint16(tls.Ed25519) {
					binary.BigEndian.PutUint16(b[i:], uint16(tls.ECDSAWithP256AndSHA256))
					changed++
				}
			}
		}
		b = b[4+n:]
	}
	if changed == 0 {
		t.Fatal("crypto/tls offers no Ed25519: this test shows nothing")
	}
	return hello
}

// opens reports whether a server continues the handshake with a browser.
func opens(t *testing.T, address, host string) bool {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := c.Write(browserHello(t, host)); err != nil {
		t.Fatal(err)
	}
	head := make([]byte, 6)
	if _, err := io.ReadFull(c, head); err != nil {
		t.Fatal(err)
	}
	const handshake, alert, serverHello = 22, 21, 2
	switch {
	case head[0] == alert:
		return false
	case head[0] != handshake || head[5] != serverHello:
		t.Fatalf("the server answers %x", head)
	}
	return true
}

// The HTTPS page opens in a browser: neither its certificate nor its issuer's is Ed25519. With an identity directory
// from an earlier version it does not open.
func TestBrowsersOpenThePage(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	newCluster(t, dir, map[string][]string{"n": {"127.0.0.1", "node7"}})
	serve := func(s config.Manager) string {
		t.Helper()
		node, err := identity.OpenNode(in("n"), nil, nil, time.Now())
		ok(err)
		certificate, err := pageCertificate(&s, node, w.log)
		ok(err)
		web, err := w.openHTTP("0.0.0.0:0", in("token"), certificate, false)
		ok(err)
		t.Cleanup(func() { closeHTTP(web) })
		_, port, err := net.SplitHostPort(web.Address)
		ok(err)
		return "127.0.0.1:" + port
	}
	get := func(address string, ca string) (*x509.Certificate, error) {
		b, err := os.ReadFile(ca)
		ok(err)
		roots, err := identity.Pool(b)
		ok(err)
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
		defer tr.CloseIdleConnections()
		r, err := (&http.Client{Timeout: 20 * time.Second, Transport: tr}).Get("https://" + address + "/")
		if err != nil {
			return nil, err
		}
		defer r.Body.Close()
		for _, c := range r.TLS.VerifiedChains[0] {
			if c.PublicKeyAlgorithm != x509.ECDSA || c.SignatureAlgorithm != x509.ECDSAWithSHA256 {
				t.Errorf("%s: %v signed by %v", c.Subject, c.PublicKeyAlgorithm, c.SignatureAlgorithm)
			}
		}
		return r.TLS.VerifiedChains[0][0], nil
	}
	address := serve(config.Manager{HTTPListen: "0.0.0.0:0"})
	if _, err := get(address, in("cluster/page-ca.crt")); err != nil || !opens(t, address, "node7") {
		t.Errorf("the identity's: %v", err)
	}
	// The page's certificate is not accepted as the node's.
	if _, err := get(address, in("cluster/ca.crt")); err == nil {
		t.Error("the page's certificate is of the cluster's CA")
	}
	// The site's own certificate, which may change while it is in use.
	site := func(number int64) {
		t.Helper()
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		ok(err)
		c := &x509.Certificate{SerialNumber: big.NewInt(number), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
		der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
		ok(err)
		pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
		ok(err)
		ok(identity.WriteFile(in("site.key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}), 0o600, false))
		ok(identity.WriteFile(in("site.crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644, false))
	}
	site(1)
	own := serve(config.Manager{HTTPListen: "0.0.0.0:0", HTTPCert: in("site.crt"), HTTPKey: in("site.key")})
	if _, err := get(own, in("site.crt")); err != nil || !opens(t, own, "node7") {
		t.Errorf("the site's: %v", err)
	}
	site(2)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); ; <-tick.C {
		if c, err := get(own, in("site.crt")); err == nil && c.SerialNumber.Int64() == 2 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the site's new certificate is not used")
		}
	}
	// As in an earlier version: only the node's own certificate.
	ok(errors.Join(os.Remove(in("n/page.crt")), os.Remove(in("n/page.key"))))
	var log bytes.Buffer
	w.log = slog.New(slog.NewTextHandler(&log, nil))
	if opens(t, serve(config.Manager{HTTPListen: "0.0.0.0:0"}), "node7") || !strings.Contains(log.String(), "browsers cannot open") {
		t.Errorf("it opens with the node's certificate alone; the log: %s", log.String())
	}
}
