package identity

import (
	"context"
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

// NodeFiles is the content of a node's directory, except the revocation list.
type NodeFiles struct {
	Certificate tls.Certificate
	Page        *tls.Certificate // of the HTTPS page, for browsers; may be nil
	CA          *x509.CertPool
	CAEnds      time.Time // when the first certificate of the CA expires
	TokenKeys   []ed25519.PublicKey
}

// Node is a daemon's identity: its certificate, and the keys that it checks others with. It reloads changed files of
// its directory, at most once a second. If they are invalid, the old ones stay in use. The revocation list has no such
// grace. Node is safe for concurrent use.
type Node struct {
	Tokens  *TokenVerifier
	Revoked *Revocations

	dir   string
	log   *slog.Logger
	files reloaded[*NodeFiles]

	mu      sync.Mutex
	changed []func()             // called after a reload
	warned  map[string]time.Time // by certificate: when its expiry was last logged
}

// OpenNode reads a node's directory through open. It returns an error for an unusable file, for a certificate that is
// expired or not valid yet, and for an invalid revocation list. Reloads and certificates that expire soon are logged to
// log, which may be nil.
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

// readPair reads a certificate and its key. If they do not belong together, it reads them again, because both may have been replaced between the reads.
func readPair(cert, key string, open Opener) (pair tls.Certificate, err error) {
	for range 2 {
		var keyPEM, certPEM []byte
		if keyPEM, err = open.read(key, true, maxFile); err == nil {
			certPEM, err = open.read(cert, false, maxFile)
		}
		if err != nil {
			return pair, err
		}
		if pair, err = tls.X509KeyPair(certPEM, keyPEM); err == nil {
			return pair, nil
		}
	}
	return pair, fmt.Errorf("certificate %s and key %s: %w", cert, key, err)
}

// firstEnd returns when the first of some certificates expires; zero: b has no certificate.
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
		return fmt.Errorf("%s: valid from %s to %s, but it is %s", path, stamp(c.NotBefore), stamp(c.NotAfter), stamp(now))
	}
	return nil
}

// Files returns the content of the directory, as it is now or last was valid.
func (n *Node) Files(now time.Time) *NodeFiles {
	f, _, _ := n.files.get(now) // OpenNode made sure that there is one
	return f
}

// OnReload registers f, which is called in its own goroutine whenever the files were reloaded.
func (n *Node) OnReload(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changed = append(n.changed, f)
}

// told is called after each attempt to reload the files, under their lock.
func (n *Node) told(f *NodeFiles, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil {
		const what = "cannot be read"
		if text := err.Error(); n.warned[what+text].IsZero() {
			n.warned[what+text] = time.Unix(1, 0) // logged once, until a reload succeeds
			n.log.Error("cannot reload the identity; the old files stay in use", "dir", n.dir, "error", err)
		}
		return
	}
	clear(n.warned)
	n.log.Info("reloaded the identity", "dir", n.dir, "expires", stamp(f.Certificate.Leaf.NotAfter))
	for _, tell := range n.changed {
		go tell()
	}
}

// Hosts returns an identity with the names and addresses that the node's certificate is for.
func (n *Node) Hosts(now time.Time) *Identity { return NodeIdentity(n.Files(now).Certificate.Leaf) }

// Ends returns when the certificates expire: "node", "ca" and, if there is one, "page".
func (n *Node) Ends(now time.Time) map[string]time.Time {
	f := n.Files(now)
	all := map[string]time.Time{"node": f.Certificate.Leaf.NotAfter, "ca": f.CAEnds}
	if f.Page != nil {
		all["page"] = f.Page.Leaf.NotAfter
	}
	return all
}

// Trouble returns why the node cannot authenticate itself or check others, or nil.
func (n *Node) Trouble(now time.Time) error {
	for _, name := range []string{"node", "ca"} {
		if ends := n.Ends(now)[name]; now.After(ends) {
			return fmt.Errorf("the %s certificate in %s expired at %s: renew it with rfaas cluster renew", name, n.dir, stamp(ends))
		}
	}
	return n.CheckRevoked(n.Files(now).Certificate.Leaf, now) // also fails if the list is invalid
}

// warnFrom is how long before its expiry a certificate is first warned of, and warnEvery how often.
const (
	warnFrom  = 30 * 24 * time.Hour
	warnEvery = 24 * time.Hour
)

// watchEvery is how often WatchUntil calls Watch.
const watchEvery = time.Minute

// WatchUntil calls Watch every minute until ctx ends. So changed files and expiring certificates are noticed even if no calls arrive.
func (n *Node) WatchUntil(ctx context.Context, now func() time.Time) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		n.Watch(now())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Watch reloads changed files and logs certificates that expire soon. It is called regularly, so that this also happens
// when no calls arrive.
func (n *Node) Watch(now time.Time) {
	var revoked error
	if _, err := n.Revoked.Current(now); err == nil { // it logs its own errors
		revoked = n.CheckRevoked(n.Files(now).Certificate.Leaf, now)
	}
	ends := n.Ends(now)
	n.mu.Lock()
	defer n.mu.Unlock()
	if revoked != nil && now.Sub(n.warned["revoked"]) >= warnEvery {
		n.warned["revoked"] = now
		n.log.Error("the certificate of this daemon is revoked: get another one with rfaas cluster join --again or rfaas cluster node; the daemon needs no restart", "dir", n.dir, "error", revoked)
	}
	for name, at := range ends {
		if now.Add(warnFrom).Before(at) || now.Sub(n.warned[name]) < warnEvery {
			continue
		}
		n.warned[name] = now
		if now.After(at) {
			n.log.Error("a certificate has expired: renew it with rfaas cluster renew; the daemon needs no restart", "certificate", name, "dir", n.dir, "expired", stamp(at))
		} else {
			n.log.Warn("a certificate expires soon: renew it with rfaas cluster renew; the daemon needs no restart", "certificate", name, "dir", n.dir,
				"expires", stamp(at), "left", at.Sub(now).Round(time.Minute))
		}
	}
}

// Identify returns the identity of a certificate that was verified with this node's CA.
func (n *Node) Identify(c *x509.Certificate, now time.Time) *Identity {
	id := NodeIdentity(c)
	_, id.generation, _ = n.files.get(now)
	return id
}

// Standing returns an error if a node that was identified before is no longer accepted: its certificate has expired,
// was revoked, or was not issued by the CA, which has changed.
func (n *Node) Standing(id *Identity, now time.Time) error {
	if now.After(id.Expires) {
		return refuse(Expired, "the certificate of %s expired at %s: renew it with rfaas cluster renew", id.Name, stamp(id.Expires))
	}
	if f, generation, _ := n.files.get(now); generation != id.generation {
		_, err := id.certificate.Verify(x509.VerifyOptions{Roots: f.CA, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		if err != nil {
			return refuse(Wrong, "the certificate of %s: %v", id.Name, err)
		}
	}
	return n.CheckRevoked(id.certificate, now)
}

// Ended is Standing for earlier actions of a node, such as registrations: an invalid revocation list does not end them.
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

// CheckRevoked returns an error if a node's certificate is revoked, or if the revocation list is invalid.
func (n *Node) CheckRevoked(c *x509.Certificate, now time.Time) error {
	return n.Revoked.refuse(RevokedNode, NodeSerial(c), fmt.Sprintf("the certificate %s of node %s", NodeSerial(c), c.Subject.CommonName), now)
}

// NodeSerial returns the serial number of a certificate in the form of revocation lists: 32 hexadecimal digits, or more
// if it is larger.
func NodeSerial(c *x509.Certificate) string {
	text := fmt.Sprintf("%032x", c.SerialNumber)
	if len(text)%2 == 1 {
		text = "0" + text
	}
	return text
}

// NodeIdentity returns the identity of a certificate, which the caller must have verified.
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
		return nil, fmt.Errorf("%s contains no certificate", path)
	}
	return x509.ParseCertificate(block.Bytes)
}

// KeyPair is a certificate and its key in two files, which are reloaded when they change. It is safe for concurrent
// use.
type KeyPair struct{ pair reloaded[*tls.Certificate] }

// OpenKeyPair reads the two files through open. It returns an error for a certificate that is expired or not valid yet.
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
			log.Info("reloaded the certificate", "file", cert, "expires", stamp(pair.Leaf.NotAfter))
		case err.Error() != said:
			said = err.Error()
			log.Error("cannot reload the certificate; the old one stays in use", "file", cert, "error", err)
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

// Certificate returns the pair, as its files are now or last were valid.
func (k *KeyPair) Certificate(now time.Time) *tls.Certificate {
	pair, _, _ := k.pair.get(now)
	return pair
}
