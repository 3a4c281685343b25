package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// SecretSize is the length of the secret in an enrolment code, in bytes.
const SecretSize = 16

// maxCodes bounds the enrolment codes of a cluster.
const maxCodes = 10000

// codeKept is how long a used or expired code is remembered, so that its user gets the right error.
const codeKept = 24 * time.Hour

// enrolCode is a line of the cluster's list of codes.
type enrolCode struct {
	Hash  []byte   `json:"hash"`            // SHA-256 of the secret, which the cluster does not keep
	Hosts []string `json:"hosts,omitempty"` // what the certificate may be for; the first one must be its name. Empty: what no other node has
	Ends  int64    `json:"ends"`            // Unix seconds
	Used  int64    `json:"used,omitempty"`  // likewise
}

func (e *enrolCode) check() error {
	if len(e.Hash) != sha256.Size {
		return fmt.Errorf("the hash has %d bytes, want %d", len(e.Hash), sha256.Size)
	}
	return nil
}

// NewEnrolCode returns the secret of a new enrolment code. With the code a node gets one certificate: for these hosts, of which the first one is
// its name, or without hosts for any that no other node has.
func (c *Cluster) NewEnrolCode(hosts []string, valid time.Duration, now time.Time) (secret [SecretSize]byte, err error) {
	if len(hosts) > 0 {
		if _, err := template(hosts, "", valid, now); err != nil {
			return secret, err
		}
	}
	rand.Read(secret[:])
	hash := sha256.Sum256(secret[:])
	return secret, c.changeCodes(now, func(codes []enrolCode) ([]enrolCode, error) {
		if len(codes) >= maxCodes {
			return nil, fmt.Errorf("there are %d enrolment codes already: wait until some have expired", len(codes))
		}
		return append(codes, enrolCode{Hash: hash[:], Hosts: hosts, Ends: now.Add(valid).Unix()}), nil
	})
}

// changeCodes replaces the list of codes by what change returns. Concurrent calls wait for each other.
func (c *Cluster) changeCodes(now time.Time, change func([]enrolCode) ([]enrolCode, error)) error {
	lock, err := c.lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	codes, err := readList(filepath.Join(c.dir, fileCodes), (*enrolCode).check)
	if err != nil {
		return err
	}
	kept := func(e enrolCode) bool { return now.Unix() < e.Ends+int64(codeKept/time.Second) }
	if codes, err = change(slices.DeleteFunc(codes, func(e enrolCode) bool { return !kept(e) })); err != nil {
		return err
	}
	return writeList(c.dir, fileCodes, codes)
}

// Enrol uses up an enrolment code and returns the files of the node that asks. A refused request does not use up the code. Errors of the
// caller are an *Error. own are names and addresses that no node may have.
func (c *Cluster) Enrol(secret []byte, r *NodeRequest, own []string, valid time.Duration, now time.Time) (*NodeReply, error) {
	hash := sha256.Sum256(secret)
	find := func(codes []enrolCode) (found int, err error) {
		found = -1
		for i := range codes {
			if subtle.ConstantTimeCompare(codes[i].Hash, hash[:]) == 1 {
				found = i
			}
		}
		if found < 0 {
			err = refuse(Wrong, "unknown enrolment code (get one with rfaas cluster enrol-code)")
		}
		return found, err
	}
	codes, err := readList(filepath.Join(c.dir, fileCodes), (*enrolCode).check) // first, and without the lock: anybody can ask
	if err == nil {
		_, err = find(codes)
	}
	if err != nil {
		return nil, err
	}
	hosts, keys, err := r.parse()
	if err != nil {
		return nil, err
	}
	if _, err := template(hosts, "", valid, now); err != nil {
		return nil, refuse(Malformed, "%v", err)
	}
	var reply *NodeReply // is sent only if the code is marked as used
	err = c.changeCodes(now, func(codes []enrolCode) ([]enrolCode, error) {
		found, err := find(codes)
		if err != nil {
			return nil, err
		}
		code := &codes[found]
		switch {
		case code.Used != 0:
			return nil, refuse(Replayed, "the enrolment code was already used at %s: get another one; if no node of yours used it, revoke the certificate that it gave "+
				"(rfaas cluster nodes)", stamp(time.Unix(code.Used, 0)))
		case now.Unix() >= code.Ends:
			return nil, refuse(Expired, "the enrolment code expired at %s: get another one", stamp(time.Unix(code.Ends, 0)))
		}
		if err := c.mayHave(hosts, code, own, now); err != nil {
			return nil, err
		}
		if reply, err = c.sign(hosts, keys, valid, now, c.recordLocked); err != nil { // under the lock, so that no other node gets the same name
			return nil, err
		}
		code.Used = now.Unix()
		return codes, nil
	})
	if err != nil {
		return nil, err
	}
	return reply, nil
}

// mayHave returns an *Error if a code does not allow a certificate for hosts.
func (c *Cluster) mayHave(hosts []string, code *enrolCode, own []string, now time.Time) error {
	has := func(all []string, h string) bool {
		return slices.ContainsFunc(all, func(o string) bool { return sameHost(o, h) })
	}
	if len(code.Hosts) > 0 {
		if !sameHost(hosts[0], code.Hosts[0]) {
			return refuse(Forbidden, "the enrolment code is for the node %q, not for %q", code.Hosts[0], hosts[0])
		}
		for _, h := range hosts {
			if !has(code.Hosts, h) {
				return refuse(Forbidden, "the enrolment code is for %s, not for %q", strings.Join(code.Hosts, ", "), h)
			}
		}
		return nil
	}
	nodes, err := c.Nodes()
	if err != nil {
		return err
	}
	revoked, err := c.revocations()
	if err != nil {
		return err
	}
	if len(hosts) > maxChosen {
		return refuse(Forbidden, "%d names and addresses, but a node may choose at most %d itself: get a code with rfaas cluster enrol-code --node", len(hosts), maxChosen)
	}
	for _, h := range hosts {
		if !mayChoose(h) {
			return refuse(Forbidden, "a node may not choose %q itself: get a code with rfaas cluster enrol-code --node", h)
		}
		taken := has(own, h) || slices.ContainsFunc(nodes, func(n NodeRecord) bool {
			return n.Has(h) && now.Unix() < n.Ends && !revoked.has[RevokedNode+" "+n.Serial]
		})
		if taken {
			return refuse(Forbidden, "another node has a certificate for %q: get a code with rfaas cluster enrol-code --node, or revoke that certificate", h)
		}
	}
	return nil
}

// maxChosen bounds the names and addresses that a node chooses itself.
const maxChosen = 16

var (
	hostForm   = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_][A-Za-z0-9_-]*)*\.?$`)
	numberForm = regexp.MustCompile(`(^|\.)([0-9]+|0[xX][0-9A-Fa-f]*)\.?$`) // some programs take it for an IPv4 address
)

// mayChoose reports whether a node may choose a name or an address itself: an ordinary one, which no host uses for itself alone.
func mayChoose(h string) bool {
	if ip := net.ParseIP(h); ip != nil {
		return ip.IsGlobalUnicast()
	}
	return hostForm.MatchString(h) && !numberForm.MatchString(h) && !strings.Contains(strings.ToLower(h), "localhost")
}

// Renew returns new files for a node that has authenticated itself with its present certificate. They are for the same names and addresses,
// and are valid for at most as long as the present ones were. Errors of the caller are an *Error.
func (c *Cluster) Renew(old *x509.Certificate, r *NodeRequest, valid time.Duration, now time.Time) (*NodeReply, error) {
	_, keys, err := r.parse()
	if err != nil {
		return nil, err
	}
	lock, err := c.lock()
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := c.CheckNode(old, now); err != nil { // under the lock, so that a revocation of all certificates of the node includes the new one, or precedes it
		return nil, err
	}
	return c.sign(hostsOf(old), keys, min(valid, old.NotAfter.Sub(old.NotBefore)-Leeway), now, c.recordLocked)
}

// CheckNode returns an *Error if a certificate is not a valid one of a node of this cluster.
func (c *Cluster) CheckNode(cert *x509.Certificate, now time.Time) error {
	pool := x509.NewCertPool()
	pool.AddCert(c.ca)
	_, err := cert.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	if err != nil || !slices.Contains(cert.Subject.Organization, "rfaas node") {
		return refuse(Wrong, "not a valid certificate of a node of this cluster: %v", err)
	}
	list, err := c.revocations()
	if err == nil && list.has[RevokedNode+" "+NodeSerial(cert)] {
		err = refuse(Revoked, "the certificate %s of node %s: revoked: get another one with rfaas cluster join --again and a new code", NodeSerial(cert), cert.Subject.CommonName)
	}
	return err
}

func (c *Cluster) sign(hosts []string, keys [2]crypto.PublicKey, valid time.Duration, now time.Time, record func(string, any) error) (*NodeReply, error) {
	cert, page, err := c.signNode(keys[0], keys[1], hosts, valid, now, record)
	if err != nil {
		return nil, err
	}
	return c.nodeFiles(cert, page)
}

// sameHost compares names or addresses of hosts.
func sameHost(a, b string) bool {
	return (&Identity{Hosts: []string{a}}).Covers("["+b+"]:0") == nil
}

// CA returns the cluster's certificate.
func (c *Cluster) CA() *x509.Certificate { return c.ca }

// CAPEM returns the cluster's certificate in PEM.
func (c *Cluster) CAPEM() []byte { return slices.Clone(c.caPEM) }

// forOperators is how much of the revocation list users cannot fill, in bytes.
const forOperators = 1 << 20

// RevokeOf revokes a listed token of a user, or all valid ones if id is empty. It returns the ids of the tokens that it has newly revoked.
func (c *Cluster) RevokeOf(uid uint32, id string, now time.Time) ([]string, error) {
	tokens, err := c.Issued()
	if err != nil {
		return nil, err
	}
	list, err := c.Revocations()
	if err != nil {
		return nil, err
	}
	var ids []string
	var entries []Revocation
	known := false
	for _, t := range tokens {
		if t.UID == nil || *t.UID != uid || id != "" && t.ID != id || now.Unix() >= t.Ends {
			continue
		}
		known = true
		if !list.Has(RevokedToken, t.ID) {
			ids = append(ids, t.ID)
			entries = append(entries, Revocation{Kind: RevokedToken, ID: t.ID, Note: "by its owner"})
		}
	}
	if !known {
		return nil, refuse(Forbidden, "no such valid token of this user is listed")
	}
	if len(entries) > 0 {
		_, _, err = c.revoke(maxRevoked-forOperators, now, func(*RevocationList) ([]Revocation, error) { return entries, nil })
	}
	return ids, err
}

// NewerRevocations returns the text of the list of revoked credentials, or nothing if its serial number is not above serial.
func (c *Cluster) NewerRevocations(serial uint64) ([]byte, error) {
	list, err := c.revocations()
	if err != nil || list.Serial <= serial {
		return nil, err
	}
	return []byte(list.text), nil
}

// issuerKind is the organization in the certificate of a cluster's issuer. A node's certificate has another one, so that no node can pass for
// the issuer.
const issuerKind = "rfaas issuer"

// IssuerCertificate returns a certificate and a new key for the cluster's issuer, which is reached at hosts. The cluster's certificate follows it.
func (c *Cluster) IssuerCertificate(hosts []string, valid time.Duration, now time.Time) (*tls.Certificate, error) {
	if _, _, err := c.pageCA(now); err != nil { // makes it now, and not in simultaneous requests
		return nil, err
	}
	t, err := template(hosts, issuerKind, valid, now)
	if err != nil {
		return nil, err
	}
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	pub, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, t, c.ca, pub, c.caKey)
	return &tls.Certificate{Certificate: [][]byte{der, c.ca.Raw}, PrivateKey: key}, err
}

// CheckIssuer returns an error if certificates that a server has sent are not those of the issuer at host in the cluster whose certificate has
// this SHA-256.
func CheckIssuer(certs []*x509.Certificate, host string, fingerprint [sha256.Size]byte, now time.Time) error {
	at := slices.IndexFunc(certs, func(c *x509.Certificate) bool { return sha256.Sum256(c.Raw) == fingerprint })
	if at < 1 {
		return refuse(Wrong, "%s is not the issuer of this cluster: it does not have the certificate that the code or the address names. "+
			"Another server may be listening there, or the cluster has new keys", host)
	}
	pool := x509.NewCertPool()
	pool.AddCert(certs[at])
	_, err := certs[0].Verify(x509.VerifyOptions{DNSName: host, Roots: pool, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	if err == nil && !slices.Contains(certs[0].Subject.Organization, issuerKind) {
		err = errors.New("its certificate is that of a node")
	}
	if err != nil {
		return refuse(Wrong, "%s is not the issuer of this cluster: %v", host, err)
	}
	return nil
}

// NodeRequest is what a node sends to get a certificate.
type NodeRequest struct {
	Node string `json:"node"` // request for a certificate of an Ed25519 key, with the names and addresses, PEM
	Page string `json:"page"` // likewise of an ECDSA key for the HTTPS page; its names are not read
}

// NodeReply is what a node gets: the content of its directory, without keys.
type NodeReply struct {
	Certificate string `json:"certificate"`
	Page        string `json:"page"`
	CA          string `json:"ca"`
	TokenKeys   string `json:"token_keys"`
	Revoked     string `json:"revoked"`
}

const pemRequest = "CERTIFICATE REQUEST"

// parse returns what a request asks for. The error is an *Error.
func (r *NodeRequest) parse() (hosts []string, keys [2]crypto.PublicKey, err error) {
	for i, text := range []string{r.Node, r.Page} {
		block, rest := pem.Decode([]byte(text))
		if block == nil || block.Type != pemRequest || len(rest) > 0 {
			return nil, keys, refuse(Malformed, "the request for a certificate is not one PEM block %q", pemRequest)
		}
		q, err := x509.ParseCertificateRequest(block.Bytes)
		if err == nil {
			err = q.CheckSignature()
		}
		if err != nil {
			return nil, keys, refuse(Malformed, "the request for a certificate: %v", err)
		}
		switch key := q.PublicKey.(type) {
		case ed25519.PublicKey:
			if i != 0 {
				return nil, keys, refuse(Malformed, "the key of the page is an Ed25519 key, want ECDSA P-256")
			}
		case *ecdsa.PublicKey:
			if i != 1 || key.Curve != elliptic.P256() {
				return nil, keys, refuse(Malformed, "the node's key is an ECDSA key, want Ed25519")
			}
		default:
			return nil, keys, refuse(Malformed, "a %T, want Ed25519 for the node and ECDSA P-256 for its page", key)
		}
		keys[i] = q.PublicKey
		if i == 0 {
			hosts = hostsOf(&x509.Certificate{Subject: q.Subject, DNSNames: q.DNSNames, IPAddresses: q.IPAddresses})
		}
	}
	return hosts, keys, nil
}

// nodeKeys are the keys of a node that is being enrolled or renewed.
type nodeKeys struct {
	node ed25519.PrivateKey
	page *ecdsa.PrivateKey
}

func newNodeKeys() (k nodeKeys, err error) {
	if _, k.node, err = ed25519.GenerateKey(nil); err == nil {
		k.page, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	}
	return k, err
}

// request returns the request for certificates of the keys.
func (k *nodeKeys) request(hosts []string) (*NodeRequest, error) {
	t, err := template(hosts, "", 0, time.Time{})
	if err != nil {
		return nil, err
	}
	q := &x509.CertificateRequest{Subject: t.Subject, DNSNames: t.DNSNames, IPAddresses: t.IPAddresses}
	var text [2]string
	for i, key := range []crypto.Signer{k.node, k.page} {
		der, err := x509.CreateCertificateRequest(rand.Reader, q, key)
		if err != nil {
			return nil, err
		}
		text[i] = string(pem.EncodeToMemory(&pem.Block{Type: pemRequest, Bytes: der}))
	}
	return &NodeRequest{Node: text[0], Page: text[1]}, nil
}

// files returns the content of a node's directory.
func (k *nodeKeys) files(r *NodeReply) ([]staged, error) {
	key, err := encodeKey(k.node)
	if err != nil {
		return nil, err
	}
	pageKey, err := encodeKey(k.page)
	if err != nil {
		return nil, err
	}
	return []staged{{name: fileCA, b: []byte(r.CA), mode: 0o644}, {name: fileTokenPub, b: []byte(r.TokenKeys), mode: 0o644},
		{name: fileRevoked, b: []byte(r.Revoked), mode: 0o644}, {name: filePageKey, b: pageKey, mode: 0o600}, {name: filePage, b: []byte(r.Page), mode: 0o644},
		{name: fileNodeKey, b: key, mode: 0o600}, {name: fileNode, b: []byte(r.Certificate), mode: 0o644}}, nil
}

// checkReply returns an error if a reply is not that of the cluster whose certificate has this SHA-256, or is for other hosts or keys.
func (k *nodeKeys) checkReply(r *NodeReply, hosts []string, fingerprint [sha256.Size]byte, now time.Time) error {
	var parsed [3]*x509.Certificate
	for i, text := range []string{r.CA, r.Certificate, r.Page} {
		var err error
		if parsed[i], err = ParseCertificate([]byte(text)); err != nil {
			return fmt.Errorf("the issuer's reply: %w", err)
		}
	}
	ca, cert, page := parsed[0], parsed[1], parsed[2]
	if !k.node.Public().(ed25519.PublicKey).Equal(cert.PublicKey) || !k.page.PublicKey.Equal(page.PublicKey) {
		return errors.New("the issuer's reply has a certificate for another key")
	}
	if sha256.Sum256(ca.Raw) != fingerprint {
		return errors.New("the issuer's reply has the certificate of another cluster")
	}
	if err := cert.CheckSignatureFrom(ca); err != nil {
		return fmt.Errorf("the issuer's reply: %w", err)
	}
	got := hostsOf(cert)
	in := func(a, b []string) bool {
		return !slices.ContainsFunc(a, func(h string) bool { return !slices.ContainsFunc(b, func(o string) bool { return sameHost(o, h) }) })
	}
	if !in(got, hosts) || !in(hosts, got) {
		return fmt.Errorf("the issuer's certificate is for %q, want %q", got, hosts)
	}
	return inTime("the issuer's certificate for this node", cert, now)
}

// JoinNode makes the directory of a node: it makes the keys, sends the request with ask, and writes the files and the issuer's address, which
// RemoteNode returns. The directory must not have a certificate, unless again is set. It returns when the certificate expires.
func JoinNode(dir, issuer string, fingerprint [sha256.Size]byte, hosts []string, again bool, ask func(*NodeRequest) (*NodeReply, error), now time.Time) (ends time.Time, err error) {
	if _, err := os.Lstat(filepath.Join(dir, fileNode)); err == nil && !again {
		return ends, fmt.Errorf("%s has a certificate: %w (--again replaces it)", dir, os.ErrExist)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil { // before the code is used up
		return ends, err
	}
	if tmp, err := stage(filepath.Join(dir, fileNode), nil, 0o600); err != nil { // likewise
		return ends, err
	} else if err := os.Remove(tmp); err != nil {
		return ends, err
	}
	keys, err := newNodeKeys()
	if err != nil {
		return ends, err
	}
	request, err := keys.request(hosts)
	if err != nil {
		return ends, err
	}
	reply, err := ask(request)
	if err == nil {
		err = keys.checkReply(reply, hosts, fingerprint, now)
	}
	if err != nil {
		return ends, err
	}
	err = replace(dir, lockPatience, nil, func() ([]staged, error) {
		files, err := keys.files(reply)
		return append([]staged{{name: fileIssuer, b: []byte(issuer + "\n"), mode: 0o644}}, files...), err
	})
	if err != nil {
		return ends, err
	}
	made, err := ReadCertificate(dir)
	if err != nil {
		return ends, err
	}
	return made.NotAfter, nil
}

// RemoteNode returns the address of the issuer in a node's directory, as JoinNode wrote it. The error is fs.ErrNotExist for a directory that did
// not come from an issuer.
func RemoteNode(dir string, open Opener) (issuer string, err error) {
	b, err := open.read(filepath.Join(dir, fileIssuer), false, 4096)
	return strings.TrimSpace(string(b)), err
}

// NodeHosts returns the names and addresses of a node's directory, and its certificate with the key.
func NodeHosts(dir string) ([]string, tls.Certificate, error) {
	pair, err := readPair(filepath.Join(dir, fileNode), filepath.Join(dir, fileNodeKey), nil)
	if err != nil {
		return nil, pair, err
	}
	return hostsOf(pair.Leaf), pair, nil
}

// ParseCertificate reads the first certificate of a PEM text.
func ParseCertificate(text []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(text)
	if block == nil || block.Type != pemCert {
		return nil, errors.New("no certificate")
	}
	return x509.ParseCertificate(block.Bytes)
}

// UpdateRevocations replaces the list of revoked credentials in a node's directory, if text is a newer one that the cluster has signed.
func UpdateRevocations(dir string, text []byte, now time.Time) error {
	keys, err := readTokenKeys(filepath.Join(dir, fileTokenPub), nil)
	if err != nil {
		return err
	}
	list := newRevocations(dir, keys)
	if newer, err := list.Adopt(text, now); err != nil || !newer {
		return err
	}
	return replace(dir, lockPatience, nil, func() ([]staged, error) {
		return []staged{{name: fileRevoked, b: text, mode: 0o644}}, nil
	})
}
