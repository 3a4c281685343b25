package identity

import (
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// NodeFiles is what the files of a node's directory hold, all but the revocation list.
type NodeFiles struct {
	Certificate tls.Certificate
	Page        *tls.Certificate // of the HTTPS page, for browsers; nil: there is none
	CA          *x509.CertPool
	CAEnds      time.Time // when the first certificate of the CA expires
	TokenKeys   []ed25519.PublicKey
}

// Node is what a daemon has: its certificate, and what it checks others with. It follows its directory: files that have changed are read
// again, at most once a second, and when they are no good the earlier ones stay in use. The revocation list has no such grace. Safe for concurrent
// use.
type Node struct {
	Tokens  *TokenVerifier
	Revoked *Revocations

	dir   string
	log   *slog.Logger
	files reloaded[*NodeFiles]

	mu      sync.Mutex
	changed []func()             // to be told of a reload
	warned  map[string]time.Time // when it was last said of a certificate that it ends
}

// OpenNode reads a node's directory, through open. What cannot be used, a certificate that is out of its time and a revocation list that cannot be
// believed are errors. log is told of reloads and of certificates that end soon; nil: nobody is.
func OpenNode(dir string, open Opener, log *slog.Logger, now time.Time) (*Node, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	n := &Node{dir: dir, log: log, warned: map[string]time.Time{}}
	n.files = reloaded[*NodeFiles]{open: open, make: func() (*NodeFiles, error) { return readNode(dir, open) }, told: n.told}
	for _, name := range []string{fileNode, fileNodeKey, fileCA, fileTokenPub, filePage, filePageKey} {
		n.files.paths = append(n.files.paths, filepath.Join(dir, name))
	}
	f, _, err := n.files.get(now)
	if err != nil {
		return nil, err
	}
	if err := inTime(filepath.Join(dir, fileNode), f.Certificate.Leaf, now); err != nil {
		return nil, err
	}
	n.Revoked = NewRevocations(filepath.Join(dir, fileRevoked), open, func(now time.Time) []ed25519.PublicKey { return n.Files(now).TokenKeys }, log)
	if _, err := n.Revoked.Current(now); err != nil {
		return nil, err
	}
	n.Tokens = &TokenVerifier{Revoked: n.Revoked, Replays: &Replays{}, Keys: func(now time.Time) ([]ed25519.PublicKey, uint64) {
		f, generation, _ := n.files.get(now)
		return f.TokenKeys, generation
	}}
	return n, nil
}

func readNode(dir string, open Opener) (*NodeFiles, error) {
	path := func(name string) string { return filepath.Join(dir, name) }
	f := &NodeFiles{}
	var err error
	if f.Certificate, err = readPair(path(fileNode), path(fileNodeKey), open); err != nil {
		return nil, err
	}
	ca, err := open.read(path(fileCA), false, maxFile)
	if err != nil {
		return nil, err
	}
	if f.CA, err = Pool(ca); err != nil {
		return nil, fmt.Errorf("%s: %w", path(fileCA), err)
	}
	f.CAEnds = firstEnd(ca)
	if f.TokenKeys, err = readTokenKeys(path(fileTokenPub), open); err != nil {
		return nil, err
	}
	page, err := readPair(path(filePage), path(filePageKey), open)
	switch {
	case err == nil:
		f.Page = &page
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	return f, nil
}

// readPair reads a certificate and its key.
func readPair(cert, key string, open Opener) (tls.Certificate, error) {
	keyPEM, err := open.read(key, true, maxFile)
	if err != nil {
		return tls.Certificate{}, err
	}
	certPEM, err := open.read(cert, false, maxFile)
	if err != nil {
		return tls.Certificate{}, err
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("%s: %w", cert, err)
	}
	return pair, nil
}

// firstEnd is when the first of some certificates expires; zero: there is none.
func firstEnd(b []byte) (ends time.Time) {
	for block, rest := pem.Decode(b); block != nil; block, rest = pem.Decode(rest) {
		if c, err := x509.ParseCertificate(block.Bytes); err == nil && (ends.IsZero() || c.NotAfter.Before(ends)) {
			ends = c.NotAfter
		}
	}
	return ends
}

func inTime(path string, c *x509.Certificate, now time.Time) error {
	if now.After(c.NotAfter) || now.Before(c.NotBefore) {
		return fmt.Errorf("%s: valid from %s to %s, and it is %s", path, stamp(c.NotBefore), stamp(c.NotAfter), stamp(now))
	}
	return nil
}

// Files is what the directory holds now.
func (n *Node) Files(now time.Time) *NodeFiles {
	f, _, _ := n.files.get(now) // OpenNode has seen to it that there is one
	return f
}

// OnReload has f called, from a goroutine of its own, whenever the files have been read again.
func (n *Node) OnReload(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changed = append(n.changed, f)
}

// told is called after each attempt to read the files again, under their lock.
func (n *Node) told(f *NodeFiles, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil {
		const what = "cannot be read"
		if text := err.Error(); n.warned[what+text].IsZero() {
			n.warned[what+text] = time.Unix(1, 0) // once, until it can be
			n.log.Error("the identity cannot be read again; what was read before stays in use", "dir", n.dir, "error", err)
		}
		return
	}
	clear(n.warned)
	n.log.Info("the identity was read again", "dir", n.dir, "expires", stamp(f.Certificate.Leaf.NotAfter))
	for _, tell := range n.changed {
		go tell()
	}
}

// Hosts are the names and addresses that the node's certificate is for.
func (n *Node) Hosts(now time.Time) *Identity { return NodeIdentity(n.Files(now).Certificate.Leaf) }

// Ends says when the certificates expire: "node", "ca" and, if there is one, "page".
func (n *Node) Ends(now time.Time) map[string]time.Time {
	f := n.Files(now)
	all := map[string]time.Time{"node": f.Certificate.Leaf.NotAfter, "ca": f.CAEnds}
	if f.Page != nil {
		all["page"] = f.Page.Leaf.NotAfter
	}
	return all
}

// Trouble is why the node can neither prove itself nor check others; nil: it can.
func (n *Node) Trouble(now time.Time) error {
	for _, name := range []string{"node", "ca"} {
		if ends := n.Ends(now)[name]; now.After(ends) {
			return fmt.Errorf("the %s certificate in %s expired at %s: rfaas cluster node makes another", name, n.dir, stamp(ends))
		}
	}
	return n.CheckRevoked(n.Files(now).Certificate.Leaf, now) // or its list cannot be believed
}

// warnFrom is how long before its end a certificate is warned of, and warnEvery, how often.
const (
	warnFrom  = 30 * 24 * time.Hour
	warnEvery = 24 * time.Hour
)

// Watch reads what has changed, and logs what ends soon. It is called once in a while, so that this happens also when nobody calls.
func (n *Node) Watch(now time.Time) {
	_, _ = n.Revoked.Current(now) // which is logged by itself
	ends := n.Ends(now)
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, at := range ends {
		if now.Add(warnFrom).Before(at) || now.Sub(n.warned[name]) < warnEvery {
			continue
		}
		n.warned[name] = now
		if now.After(at) {
			n.log.Error("a certificate has expired: rfaas cluster node makes another, which is taken without a restart", "certificate", name, "dir", n.dir, "expired", stamp(at))
		} else {
			n.log.Warn("a certificate expires soon: rfaas cluster node makes another, which is taken without a restart", "certificate", name, "dir", n.dir,
				"expires", stamp(at), "left", at.Sub(now).Round(time.Minute))
		}
	}
}

// Identify is who a certificate stands for that this node has verified with its CA.
func (n *Node) Identify(c *x509.Certificate, now time.Time) *Identity {
	id := NodeIdentity(c)
	_, id.generation, _ = n.files.get(now)
	return id
}

// Standing is why a node that was identified before is not taken any more: its certificate has expired or was revoked, or is not of the
// CA, which has changed.
func (n *Node) Standing(id *Identity, now time.Time) error {
	if now.After(id.Expires) {
		return refuse(Expired, "the certificate of %s expired at %s: rfaas cluster node makes another", id.Name, stamp(id.Expires))
	}
	if f, generation, _ := n.files.get(now); generation != id.generation {
		_, err := id.certificate.Verify(x509.VerifyOptions{Roots: f.CA, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		if err != nil {
			return refuse(Wrong, "the certificate of %s: %v", id.Name, err)
		}
	}
	return n.CheckRevoked(id.certificate, now)
}

// Ended is Standing for what a node did before: a list that cannot be believed takes nothing away.
func (n *Node) Ended(id *Identity, now time.Time) error {
	err := n.Standing(id, now)
	var e *Error
	if errors.As(err, &e) && e.Reason == Revoked {
		if _, unknown := n.Revoked.Current(now); unknown != nil {
			return nil
		}
	}
	return err
}

// CheckRevoked is why the certificate of a node is not taken: it is revoked, or nobody can tell.
func (n *Node) CheckRevoked(c *x509.Certificate, now time.Time) error {
	return n.Revoked.refuse(RevokedNode, NodeSerial(c), fmt.Sprintf("the certificate %s of node %s", NodeSerial(c), c.Subject.CommonName), now)
}

// NodeSerial is the serial number of a certificate as revocation lists have it: 32 hexadecimal digits, or more where it is larger.
func NodeSerial(c *x509.Certificate) string {
	text := fmt.Sprintf("%032x", c.SerialNumber)
	if len(text)%2 == 1 {
		text = "0" + text
	}
	return text
}

// NodeIdentity is who a certificate, which must have been verified, stands for.
func NodeIdentity(c *x509.Certificate) *Identity {
	id := &Identity{By: "node", Name: "node " + c.Subject.CommonName, Role: RoleNode, Hosts: slices.Clone(c.DNSNames), Expires: c.NotAfter, certificate: c}
	for _, ip := range c.IPAddresses {
		id.Hosts = append(id.Hosts, ip.String())
	}
	return id
}

// ReadCertificate reads the first certificate of a file, or of a node's directory.
func ReadCertificate(path string) (*x509.Certificate, error) {
	if st, err := Opener(nil).info(path); err == nil && st.IsDir() {
		path = filepath.Join(path, fileNode)
	}
	b, err := Opener(nil).read(path, false, maxFile)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(b)
	if block == nil || block.Type != pemCert {
		return nil, fmt.Errorf("%s holds no certificate", path)
	}
	return x509.ParseCertificate(block.Bytes)
}

// KeyPair is a certificate and its key in two files, which are read again when they change. Safe for concurrent use.
type KeyPair struct{ pair reloaded[*tls.Certificate] }

// OpenKeyPair reads them, through open. A certificate that is out of its time is an error.
func OpenKeyPair(cert, key string, open Opener, log *slog.Logger, now time.Time) (*KeyPair, error) {
	k := &KeyPair{reloaded[*tls.Certificate]{open: open, paths: []string{cert, key}}}
	k.pair.make = func() (*tls.Certificate, error) {
		pair, err := readPair(cert, key, open)
		return &pair, err
	}
	var said string
	k.pair.told = func(pair *tls.Certificate, err error) {
		switch {
		case err == nil:
			said = ""
			log.Info("the certificate was read again", "file", cert, "expires", stamp(pair.Leaf.NotAfter))
		case err.Error() != said:
			said = err.Error()
			log.Error("the certificate cannot be read again; the one that was read before stays in use", "file", cert, "error", err)
		}
	}
	pair, _, err := k.pair.get(now)
	if err == nil {
		err = inTime(cert, pair.Leaf, now)
	}
	if err != nil {
		return nil, err
	}
	return k, nil
}

// Certificate is the pair as its files have it now.
func (k *KeyPair) Certificate(now time.Time) *tls.Certificate {
	pair, _, _ := k.pair.get(now)
	return pair
}
