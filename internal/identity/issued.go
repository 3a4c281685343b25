package identity

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

// maxIssued bounds the list of issued tokens, in bytes. A token takes some 200 bytes.
const maxIssued = 256 << 20

// record appends a value to one of the cluster's lists, as a line of JSON. It returns after the line is on disk.
func (c *Cluster) record(file string, value any) error {
	lock, err := c.lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	return c.recordLocked(file, value)
}

// lock waits for the lock of the cluster's directory. The directory must belong to this user, who would otherwise follow links of another one.
func (c *Cluster) lock() (*os.File, error) {
	lock, err := lockDir(c.dir, c.patience)
	if err != nil {
		return nil, err
	}
	st, err := lock.Stat()
	if err == nil {
		if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) != os.Geteuid() {
			err = fmt.Errorf("the cluster's directory %s belongs to user %d: run the command as that user, not as %d", c.dir, sys.Uid, os.Geteuid())
		}
	}
	if err != nil {
		lock.Close()
		return nil, err
	}
	return lock, nil
}

// recordLocked is record for a caller that holds the lock of the directory.
func (c *Cluster) recordLocked(file string, value any) error {
	line, err := json.Marshal(value)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(c.dir, file), os.O_CREATE|os.O_RDWR|os.O_APPEND|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if st.Size()+int64(len(line))+2 > maxIssued {
		return fmt.Errorf("%s has %d bytes, more than it may have with another line: rfaas cluster serve removes expired entries once a day", f.Name(), st.Size())
	}
	if last := make([]byte, 1); st.Size() > 0 { // an earlier append may have been cut off
		if _, err := f.ReadAt(last, st.Size()-1); err != nil {
			return err
		}
		if last[0] != '\n' {
			line = append([]byte{'\n'}, line...)
		}
	}
	if _, err = f.Write(append(line, '\n')); err == nil {
		err = f.Sync()
	}
	return err
}

// Issued returns the claims of all tokens that this cluster has issued, the oldest first. Tokens that were issued before the cluster kept a list
// are missing. If lines are damaged, it returns the others and an error that names the damaged ones.
func (c *Cluster) Issued() ([]Claims, error) {
	return readList(filepath.Join(c.dir, fileIssued), (*Claims).Check)
}

// NodeRecord is a certificate in the cluster's list of nodes.
type NodeRecord struct {
	Serial string   `json:"serial"` // as NodeSerial writes it
	Hosts  []string `json:"hosts"`  // the first one is the node's name
	Ends   int64    `json:"ends"`   // Unix seconds
}

// Has reports whether the certificate is for a name or an address.
func (r *NodeRecord) Has(host string) bool {
	return slices.ContainsFunc(r.Hosts, func(h string) bool { return sameHost(h, host) })
}

func (r *NodeRecord) check() error {
	if len(r.Hosts) == 0 {
		return errors.New("the node has no name")
	}
	return (&Revocation{Kind: RevokedNode, ID: r.Serial}).check()
}

// Nodes returns the node certificates that this cluster has issued, the oldest first. Those that were issued before the cluster kept a list are
// missing. If lines are damaged, it returns the others and an error that names the damaged ones.
func (c *Cluster) Nodes() ([]NodeRecord, error) {
	return readList(filepath.Join(c.dir, fileNodes), (*NodeRecord).check)
}

// readList reads a list of lines of JSON. A missing file is an empty list.
func readList[T any](path string, check func(*T) error) ([]T, error) {
	b, err := Opener(nil).read(path, false, maxIssued)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []T
	var errs []error
	n := 0
	for line := range bytes.Lines(b) {
		n++
		var one T
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		err := json.Unmarshal(line, &one)
		if err == nil {
			err = check(&one)
		}
		if err == nil {
			all = append(all, one)
		} else {
			errs = append(errs, fmt.Errorf("%s: line %d is damaged: %w", path, n, err))
		}
	}
	return all, errors.Join(errs...)
}

const (
	tokensKept  = 7 * 24 * time.Hour  // expired tokens in the list of tokens
	nodesKept   = 90 * 24 * time.Hour // expired certificates in the list of nodes
	revokedKept = 24 * time.Hour      // expired credentials in the revocation list; above the differences between clocks
)

// Prune removes tokens and node certificates that expired long ago from the cluster's lists, and from the revocation list those that
// expired more than a day ago.
func (c *Cluster) Prune(now time.Time) error {
	unchanged := errors.New("unchanged")
	_, _, err := c.rewrite(maxRevoked, func() (*RevocationList, error) {
		l, err := c.Revocations()
		if err != nil {
			return nil, err
		}
		if !c.dropExpired(l, now) {
			return nil, unchanged
		}
		l.Serial, l.Made = l.Serial+1, now
		return l, nil
	})
	if errors.Is(err, unchanged) {
		err = nil
	}
	lock, lerr := c.lock()
	if lerr != nil {
		return errors.Join(err, lerr)
	}
	defer lock.Close()
	return errors.Join(err, pruneList(c.dir, fileIssued, func(t *Claims) bool { return t.Check() == nil && t.Ends < now.Add(-tokensKept).Unix() }),
		pruneList(c.dir, fileNodes, func(n *NodeRecord) bool { return n.check() == nil && n.Ends < now.Add(-nodesKept).Unix() }))
}

// dropExpired removes entries of listed credentials that expired long ago from a revocation list. It reports whether there were any. Of a
// damaged list, it uses what can be read.
func (c *Cluster) dropExpired(l *RevocationList, now time.Time) bool {
	before := len(l.Entries)
	if before == 0 {
		return false
	}
	ended := map[string]bool{} // "kind id"
	tokens, _ := c.Issued()
	for _, t := range tokens {
		ended[RevokedToken+" "+t.ID] = now.Add(-revokedKept).Unix() > t.Ends
	}
	nodes, _ := c.Nodes()
	for _, n := range nodes {
		ended[RevokedNode+" "+n.Serial] = now.Add(-revokedKept).Unix() > n.Ends
	}
	l.Entries = slices.DeleteFunc(l.Entries, func(e Revocation) bool { return ended[e.Kind+" "+e.ID] })
	return len(l.Entries) < before
}

// pruneList removes the values of a list that expired returns true for. Damaged lines stay. It reads one line at a time, so that it also
// prunes a list that is too long for readList. The caller holds the lock.
func pruneList[T any](dir, file string, expired func(*T) bool) error {
	f, err := Opener(nil).open(filepath.Join(dir, file))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	var kept bytes.Buffer
	pruned := false
	for r := bufio.NewReader(f); ; {
		line, err := r.ReadBytes('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		var one T
		if len(line) > 0 && json.Unmarshal(line, &one) == nil && expired(&one) {
			pruned = true
		} else {
			kept.Write(line)
		}
		if err != nil {
			break
		}
	}
	if !pruned {
		return nil
	}
	return replaceList(dir, file, kept.Bytes())
}

// writeList replaces a list. The caller holds the lock.
func writeList[T any](dir, file string, all []T) error {
	var b bytes.Buffer
	for _, one := range all {
		line, err := json.Marshal(one)
		if err != nil {
			return err
		}
		b.Write(append(line, '\n'))
	}
	return replaceList(dir, file, b.Bytes())
}

func replaceList(dir, file string, b []byte) error {
	if err := removeStaged(dir, file); err != nil {
		return err
	}
	return WriteFile(filepath.Join(dir, file), b, 0o600, false)
}
