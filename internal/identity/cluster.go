package identity

import (
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Files of a cluster's directory. The keys stay there.
const (
	fileCA        = "ca.crt"
	fileCAKey     = "ca.key"
	fileTokenKey  = "token.key"
	fileTokenPub  = "token.pub"
	fileRevoked   = "revoked"
	fileIssued    = "issued"
	fileNodes     = "nodes"
	fileCodes     = "codes"
	fileIssuer    = "issuer" // its address
	fileNode      = "node.crt"
	fileNodeKey   = "node.key"
	filePageCA    = "page-ca.crt" // browsers do not accept Ed25519
	filePageCAKey = "page-ca.key"
	filePage      = "page.crt"
	filePageKey   = "page.key"
)

// Cluster is an operator's directory, with the keys that sign certificates and tokens.
type Cluster struct {
	dir   string
	ca    *x509.Certificate
	caPEM []byte
	caKey crypto.Signer
	token ed25519.PrivateKey

	list     *Revocations
	step     func()        // called before each change of a node's directory; set in tests
	patience time.Duration // lockPatience; tests replace it
}

// serial returns a random certificate number.
func serial() *big.Int {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		panic(err) // crypto/rand does not fail
	}
	return n
}

// InitCluster creates dir with a cluster's keys. The error is fs.ErrExist if there is a cluster already.
func InitCluster(dir, name string, valid time.Duration, now time.Time) error {
	if name == "" || len(name) > 64 {
		return fmt.Errorf("cluster name %.80q has %d bytes, want 1 to 64", name, len(name))
	}
	if valid <= 0 || valid > 100*366*24*time.Hour {
		return fmt.Errorf("validity %v is not in 1ns..100 years", valid)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	pub, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return err
	}
	t := &x509.Certificate{SerialNumber: serial(), Subject: pkix.Name{CommonName: name, Organization: []string{"rfaas cluster"}},
		NotBefore: now.Add(-Leeway), NotAfter: now.Add(valid), IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign}
	der, err := x509.CreateCertificate(rand.Reader, t, t, pub, key)
	if err != nil {
		return err
	}
	tokenPub, tokenKey, err := ed25519.GenerateKey(nil)
	if err != nil {
		return err
	}
	caKeyPEM, err := encodeKey(key)
	if err != nil {
		return err
	}
	tokenKeyPEM, err := encodeKey(tokenKey)
	if err != nil {
		return err
	}
	tokenPubPEM, err := encodePublic(tokenPub)
	if err != nil {
		return err
	}
	revoked, err := (&RevocationList{Serial: 1, Made: now}).Sign(tokenKey)
	if err != nil {
		return err
	}
	lock, err := lockDir(dir, lockPatience)
	if err != nil {
		return err
	}
	defer lock.Close()
	// The key is written first: if there is a cluster already, this fails.
	for _, f := range []struct {
		name string
		b    []byte
		mode os.FileMode
	}{
		{fileCAKey, caKeyPEM, 0o600},
		{fileCA, pem.EncodeToMemory(&pem.Block{Type: pemCert, Bytes: der}), 0o644},
		{fileTokenKey, tokenKeyPEM, 0o600},
		{fileTokenPub, tokenPubPEM, 0o644},
		{fileRevoked, revoked, 0o644},
	} {
		if err := removeStaged(dir, f.name); err != nil {
			return err
		}
		if err := WriteFile(filepath.Join(dir, f.name), f.b, f.mode, true); err != nil {
			return err
		}
	}
	return nil
}

func encodeKey(key crypto.Signer) ([]byte, error) {
	b, err := x509.MarshalPKCS8PrivateKey(key)
	return pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: b}), err
}

func encodePublic(key ed25519.PublicKey) ([]byte, error) {
	b, err := x509.MarshalPKIXPublicKey(key)
	return pem.EncodeToMemory(&pem.Block{Type: pemPub, Bytes: b}), err
}

// OpenCluster reads a cluster's keys.
func OpenCluster(dir string) (*Cluster, error) {
	c := &Cluster{dir: dir, patience: lockPatience}
	c.list = NewRevocations(filepath.Join(dir, fileRevoked), nil, func(time.Time) []ed25519.PublicKey {
		keys, _ := readTokenKeys(filepath.Join(dir, fileTokenPub), nil) // without keys, no list is valid
		return keys
	}, slog.New(slog.DiscardHandler))
	var err error
	if c.caPEM, err = os.ReadFile(filepath.Join(dir, fileCA)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("no cluster in %s (%w): create one with rfaas cluster init", dir, fs.ErrNotExist)
		}
		return nil, err
	}
	if c.ca, err = ParseCertificate(c.caPEM); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, fileCA), err)
	}
	key, err := readKey(filepath.Join(dir, fileCAKey))
	if err != nil {
		return nil, err
	}
	c.caKey = key
	if c.token, err = readKey(filepath.Join(dir, fileTokenKey)); err != nil {
		return nil, err
	}
	return c, nil
}

func readKey(path string) (ed25519.PrivateKey, error) {
	b, err := ReadPrivate(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(b)
	if block == nil || block.Type != pemKey {
		return nil, fmt.Errorf("%s contains no private key", path)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if k, ok := key.(ed25519.PrivateKey); err == nil && ok {
		return k, nil
	}
	return nil, fmt.Errorf("%s: not an Ed25519 key", path)
}

// IssueNode writes the directory of a node: its certificate for hosts (names or addresses; the first one is the node's
// name), its key, the keys to check others with, and a certificate for its HTTPS page. Existing files are replaced
// in one step, and keep their owner and mode.
func (c *Cluster) IssueNode(out string, hosts []string, valid time.Duration, now time.Time) error {
	return c.issueNode(out, hosts, valid, now, func(*RevocationList) error { return nil })
}

// issueNode is IssueNode. check runs under the lock of the directory, with the cluster's list. If it returns an error, nothing is written.
func (c *Cluster) issueNode(out string, hosts []string, valid time.Duration, now time.Time, check func(*RevocationList) error) error {
	keys, err := newNodeKeys()
	if err != nil {
		return err
	}
	cert, page, err := c.signNode(keys.node.Public(), keys.page.Public(), hosts, valid, now, c.record)
	if err != nil {
		return err
	}
	return replace(out, c.patience, c.step, func() ([]staged, error) {
		list, err := c.Revocations()
		if err == nil {
			err = check(list)
		}
		if err != nil {
			return nil, err
		}
		made, err := c.nodeFiles(cert, page)
		if err != nil {
			return nil, err
		}
		return keys.files(made)
	})
}

// signNode returns the certificates of a node's key and of its page's key in PEM, and adds the former to the list of nodes first, by record.
func (c *Cluster) signNode(key, pageKey crypto.PublicKey, hosts []string, valid time.Duration, now time.Time,
	record func(file string, value any) error) (cert, page []byte, err error) {
	t, err := template(hosts, "rfaas node", valid, now)
	if err != nil {
		return nil, nil, err
	}
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	if t.NotAfter.After(c.ca.NotAfter) {
		t.NotAfter = c.ca.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, t, c.ca, key, c.caKey)
	if err != nil {
		return nil, nil, err
	}
	if page, err = c.issuePage(t, pageKey, now); err != nil {
		return nil, nil, err
	}
	if err := record(fileNodes, NodeRecord{Serial: NodeSerial(t), Hosts: hostsOf(t), Ends: t.NotAfter.Unix()}); err != nil {
		return nil, nil, fmt.Errorf("list of nodes: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: pemCert, Bytes: der}), page, nil
}

// template returns a certificate to sign for hosts (names or addresses). The first one is its subject.
func template(hosts []string, kind string, valid time.Duration, now time.Time) (*x509.Certificate, error) {
	if len(hosts) == 0 || len(hosts) > maxHosts {
		return nil, fmt.Errorf("%d names and addresses, want 1 to %d", len(hosts), maxHosts)
	}
	t := &x509.Certificate{SerialNumber: serial(), Subject: pkix.Name{Organization: []string{kind}},
		NotBefore: now.Add(-Leeway), NotAfter: now.Add(valid), KeyUsage: x509.KeyUsageDigitalSignature}
	for i, h := range hosts {
		name := strings.TrimSuffix(h, ".")
		if ip := net.ParseIP(h); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
			name = ip.String()
		} else if !isName(name) {
			return nil, fmt.Errorf("host %.260q is neither a name nor an address", h)
		} else {
			t.DNSNames = append(t.DNSNames, name)
		}
		if i == 0 {
			t.Subject.CommonName = name
		}
	}
	return t, nil
}

// maxHosts bounds the names and addresses of a certificate.
const maxHosts = 64

// isName reports whether a text can be the name of a host.
func isName(h string) bool {
	return h != "" && len(h) <= 253 && !strings.ContainsFunc(h, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("/:*#,[]\\\"'", r) })
}

// nodeFiles returns what a node's directory has besides keys.
func (c *Cluster) nodeFiles(cert, page []byte) (*NodeReply, error) {
	r := &NodeReply{Certificate: string(cert), Page: string(page), CA: string(c.caPEM)}
	for name, into := range map[string]*string{fileTokenPub: &r.TokenKeys, fileRevoked: &r.Revoked} {
		b, err := os.ReadFile(filepath.Join(c.dir, name))
		if err != nil {
			return nil, err
		}
		*into = string(b)
	}
	return r, nil
}

// RenewNode issues a new certificate and key for a node's directory, with the same names and addresses, if the present
// certificate expires before now+within. It returns when the directory's certificate expires, and whether it is new. It
// refuses revoked certificates and those of another cluster, and a certificate that is not due but does not belong to
// the key beside it.
func (c *Cluster) RenewNode(dir string, within, valid time.Duration, now time.Time) (ends time.Time, renewed bool, err error) {
	old, err := ReadCertificate(dir)
	if err != nil {
		return ends, false, err
	}
	if err := old.CheckSignatureFrom(c.ca); err != nil {
		return ends, false, fmt.Errorf("the certificate in %s is not of this cluster: %w", dir, err)
	}
	notRevoked := func(list *RevocationList) error {
		if list.Has(RevokedNode, NodeSerial(old)) {
			return fmt.Errorf("the certificate in %s is revoked: if the node is trusted again, issue another one with rfaas cluster node", dir)
		}
		return nil
	}
	list, err := c.Revocations()
	if err == nil {
		err = notRevoked(list)
	}
	if err != nil {
		return ends, false, err
	}
	hosts := hostsOf(old)
	if old.NotAfter.After(now.Add(within)) {
		if err := c.checkLocked(dir); err != nil {
			return ends, false, fmt.Errorf("%w: issue both again with rfaas cluster node --out %s %s", err, dir, strings.Join(hosts, " "))
		}
		return old.NotAfter, false, nil
	}
	if !old.NotAfter.Before(c.ca.NotAfter) {
		return ends, false, fmt.Errorf("the certificate in %s is valid until %s, when the cluster's own certificate ends: make a new cluster", dir, stamp(old.NotAfter))
	}
	if err := c.issueNode(dir, hosts, valid, now, notRevoked); err != nil {
		return ends, false, err
	}
	made, err := ReadCertificate(dir)
	if err != nil {
		return ends, false, err
	}
	return made.NotAfter, true, nil
}

// hostsOf returns the names and addresses of a node's certificate, its subject first.
func hostsOf(c *x509.Certificate) []string {
	first := c.Subject.CommonName
	hosts := slices.Clone(c.DNSNames)
	for _, ip := range c.IPAddresses {
		hosts = append(hosts, ip.String())
	}
	return append([]string{first}, slices.DeleteFunc(hosts, func(h string) bool { return h == first })...)
}

// IssueToken returns a user's credentials, and adds the token to the list of issued tokens first. key is the user's; nil makes a new one.
func (c *Cluster) IssueToken(claims Claims, key ed25519.PrivateKey, now time.Time) (*Credentials, error) {
	if key == nil {
		var err error
		if _, key, err = ed25519.GenerateKey(nil); err != nil {
			return nil, err
		}
	}
	pub, ok := key.Public().(ed25519.PublicKey)
	if !ok {
		return nil, errors.New("the user's key is not an Ed25519 key")
	}
	claims.Key = pub
	token, claims, err := c.SignToken(claims, now)
	if err != nil {
		return nil, err
	}
	return &Credentials{Token: token, Claims: claims, Key: key, CA: c.caPEM}, nil
}

// SignToken signs claims, which name the owner's public key, and adds them to the list of issued tokens first.
func (c *Cluster) SignToken(claims Claims, now time.Time) (string, Claims, error) {
	token, claims, err := Issue(c.token, claims, now)
	if err != nil {
		return "", claims, err
	}
	if err := c.record(fileIssued, claims); err != nil {
		return "", claims, fmt.Errorf("list of issued tokens: %w", err)
	}
	return token, claims, nil
}

// revocations returns the cluster's list, as the file is now. The caller must not change it.
func (c *Cluster) revocations() (*indexed, error) {
	r := &c.list.list
	r.mu.Lock()
	defer r.mu.Unlock()
	r.look(time.Now())
	return r.value, r.err
}

// Revocations returns a copy of the cluster's list.
func (c *Cluster) Revocations() (*RevocationList, error) {
	x, err := c.revocations()
	if err != nil {
		return nil, err
	}
	l := *x.RevocationList
	l.Entries = slices.Clone(l.Entries)
	return &l, nil
}

// OpenRevocations reads the list in the directory of a cluster or of a node.
func OpenRevocations(dir string) (*RevocationList, error) {
	keys, err := readTokenKeys(filepath.Join(dir, fileTokenPub), nil)
	if err != nil {
		return nil, err
	}
	return newRevocations(dir, keys).Current(time.Now())
}

func newRevocations(dir string, keys []ed25519.PublicKey) *Revocations {
	return NewRevocations(filepath.Join(dir, fileRevoked), nil, func(time.Time) []ed25519.PublicKey { return keys }, slog.New(slog.DiscardHandler))
}

// Revoke adds credentials to the cluster's list and returns the list and its path. The list must then be copied to the
// nodes. Entries that are in the list already stay, except those of credentials that expired long ago.
func (c *Cluster) Revoke(now time.Time, entries ...Revocation) (*RevocationList, string, error) {
	return c.revoke(maxRevoked, now, func(*RevocationList) ([]Revocation, error) { return entries, nil })
}

// RevokeNode revokes all listed certificates for a name or an address that are valid, and returns them too. No certificate for it is issued
// meanwhile. If lines of the list of nodes are damaged, it revokes the others and returns an error that names the damaged ones.
func (c *Cluster) RevokeNode(host, note string, now time.Time) (entries []Revocation, l *RevocationList, path string, err error) {
	var damaged error
	l, path, err = c.revoke(maxRevoked, now, func(l *RevocationList) ([]Revocation, error) {
		var nodes []NodeRecord
		nodes, damaged = c.Nodes()
		for _, n := range nodes {
			if n.Has(host) && now.Unix() < n.Ends && !l.Has(RevokedNode, n.Serial) {
				entries = append(entries, Revocation{RevokedNode, n.Serial, note})
			}
		}
		if len(entries) == 0 {
			return nil, fmt.Errorf("no valid certificate of node %q is listed (rfaas cluster nodes --all lists all; revoke one that an earlier version issued by its "+
				"serial number or file)", host)
		}
		return entries, nil
	})
	return entries, l, path, errors.Join(err, damaged)
}

// revoke adds entries, which choose returns under the lock of the directory, to the cluster's list. most bounds the list, in bytes.
func (c *Cluster) revoke(most int, now time.Time, choose func(*RevocationList) ([]Revocation, error)) (*RevocationList, string, error) {
	return c.rewrite(most, func() (*RevocationList, error) {
		l, err := c.Revocations()
		if err != nil {
			return nil, err
		}
		entries, err := choose(l)
		if err != nil {
			return nil, err
		}
		c.dropExpired(l, now)
		l.Serial, l.Made = l.Serial+1, now
		for _, e := range entries {
			if !l.Has(e.Kind, e.ID) {
				l.Entries = append(l.Entries, e)
			}
		}
		return l, nil
	})
}

// NewRevocations writes a list for a cluster that has none, or whose list is unsigned; tokens in such a list stay
// revoked. If there is a signed list, the error is fs.ErrExist.
func (c *Cluster) NewRevocations(serial uint64, now time.Time) (*RevocationList, string, error) {
	return c.rewrite(maxRevoked, func() (*RevocationList, error) {
		path := filepath.Join(c.dir, fileRevoked)
		b, err := Opener(nil).read(path, false, maxRevoked)
		if errors.Is(err, fs.ErrNotExist) {
			b, err = nil, nil
		}
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(string(b), revokedHead) {
			return nil, fmt.Errorf("%s: %w (to start a new list, move this one away and use a higher serial number)", path, fs.ErrExist)
		}
		l := &RevocationList{Serial: serial, Made: now}
		for line := range strings.Lines(string(b)) {
			id, note, _ := strings.Cut(strings.TrimSpace(line), " ")
			if id == "" || strings.HasPrefix(id, "#") {
				continue
			}
			e := Revocation{RevokedToken, id, strings.TrimSpace(note[:min(len(note), maxNote)])}
			if e.check() != nil {
				e.Note = "" // the note was too long, or not printable UTF-8
			}
			l.Entries = append(l.Entries, e)
		}
		return l, nil
	})
}

// rewrite replaces the cluster's list by the result of change, which may have most bytes. Concurrent calls wait for each other.
func (c *Cluster) rewrite(most int, change func() (*RevocationList, error)) (*RevocationList, string, error) {
	lock, err := c.lock()
	if err != nil {
		return nil, "", err
	}
	defer lock.Close()
	l, err := change()
	if err != nil {
		return nil, "", err
	}
	b, err := l.Sign(c.token)
	if err == nil && len(b) > most {
		err = fmt.Errorf("revocation list: %d bytes, want at most %d", len(b), most)
	}
	if err != nil {
		return nil, "", err
	}
	if err := removeStaged(c.dir, fileRevoked); err != nil {
		return nil, "", err
	}
	path := filepath.Join(c.dir, fileRevoked)
	return l, path, WriteFile(path, b, 0o644, false)
}

// OpenVerifier reads the keys and the list to check tokens with from the directory of a cluster or of a node.
func OpenVerifier(dir string) (*TokenVerifier, error) {
	keys, err := readTokenKeys(filepath.Join(dir, fileTokenPub), nil)
	if err != nil {
		return nil, err
	}
	v := &TokenVerifier{Keys: func(time.Time) ([]ed25519.PublicKey, uint64) { return keys, 1 }, Revoked: newRevocations(dir, keys), Replays: &Replays{}}
	_, err = v.Revoked.Current(time.Now())
	return v, err
}

// readTokenKeys reads the public keys of issuers. There are several while the key is being changed.
func readTokenKeys(path string, open Opener) (keys []ed25519.PublicKey, err error) {
	b, err := open.read(path, false, maxFile)
	if err != nil {
		return nil, err
	}
	for rest := b; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		key, err := x509.ParsePKIXPublicKey(block.Bytes)
		k, ok := key.(ed25519.PublicKey)
		if err != nil || !ok {
			return nil, fmt.Errorf("%s: not an Ed25519 public key", path)
		}
		keys = append(keys, k)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("%s contains no public key", path)
	}
	return keys, nil
}

// Check returns the claims of a token, and an error if the token is not accepted now. It needs no proof of ownership.
func (v *TokenVerifier) Check(token string, now time.Time) (Claims, error) {
	keys, _ := v.Keys(now)
	c, err := verifyToken(token, keys)
	if err == nil {
		err = v.standing(&c, now)
	}
	return c, err
}

// Pool reads certificates in PEM.
func Pool(b []byte) (*x509.CertPool, error) {
	p := x509.NewCertPool()
	if !p.AppendCertsFromPEM(b) {
		return nil, errors.New("no certificate found")
	}
	return p, nil
}
