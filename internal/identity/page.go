package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// Browsers do not accept Ed25519, neither in a certificate nor in its issuer's. So the HTTPS page has a certificate
// with an ECDSA key, issued by a CA with an ECDSA key. That CA is for the page alone: nodes and clients do not trust
// it.

// pageCA reads the CA of the pages' certificates, and creates it if the cluster has none.
func (c *Cluster) pageCA(now time.Time) (*x509.Certificate, crypto.Signer, error) {
	path, keyPath := filepath.Join(c.dir, filePageCA), filepath.Join(c.dir, filePageCAKey)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := c.makePageCA(path, keyPath, now); err != nil {
			return nil, nil, err
		}
		b, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, nil, err
	}
	key, err := ReadPrivate(keyPath)
	if err != nil {
		return nil, nil, err
	}
	pair, err := tls.X509KeyPair(b, key)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	signer, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, nil, fmt.Errorf("%s: the key cannot sign", keyPath)
	}
	return pair.Leaf, signer, nil
}

func (c *Cluster) makePageCA(path, keyPath string, now time.Time) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	t := &x509.Certificate{SerialNumber: serial(), Subject: pkix.Name{CommonName: c.ca.Subject.CommonName + " pages", Organization: []string{"rfaas cluster"}},
		NotBefore: now.Add(-Leeway), NotAfter: c.ca.NotAfter, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return err
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return err
	}
	if err := WriteFile(keyPath, keyPEM, 0o600, true); err != nil { // of two concurrent calls, one fails here
		return err
	}
	return WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: pemCert, Bytes: der}), 0o644, true)
}

// issuePage returns the certificate of a node's HTTPS page in PEM for a key, with the hosts and the validity of the node's own certificate.
func (c *Cluster) issuePage(node *x509.Certificate, key crypto.PublicKey, now time.Time) ([]byte, error) {
	ca, caKey, err := c.pageCA(now)
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{SerialNumber: serial(), Subject: pkix.Name{CommonName: node.Subject.CommonName, Organization: []string{"rfaas page"}},
		NotBefore: node.NotBefore, NotAfter: node.NotAfter, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, DNSNames: node.DNSNames, IPAddresses: node.IPAddresses}
	der, err := x509.CreateCertificate(rand.Reader, t, ca, key, caKey)
	return pem.EncodeToMemory(&pem.Block{Type: pemCert, Bytes: der}), err
}
