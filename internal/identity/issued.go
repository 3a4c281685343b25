package identity

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// maxIssued bounds the list of issued tokens, in bytes. A token takes some 200 bytes.
const maxIssued = 256 << 20

// record appends a value to one of the cluster's lists, as a line of JSON. It returns after the line is on disk.
func (c *Cluster) record(file string, value any) error {
	lock, err := lockDir(c.dir, c.patience)
	if err != nil {
		return err
	}
	defer lock.Close()
	return c.recordLocked(file, value)
}

// recordLocked is record for a caller that holds the lock of the directory.
func (c *Cluster) recordLocked(file string, value any) error {
	line, err := json.Marshal(value)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(c.dir, file), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
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

// Prune removes tokens and node certificates that expired before a time from the cluster's lists.
func (c *Cluster) Prune(before time.Time) error {
	lock, err := lockDir(c.dir, c.patience)
	if err != nil {
		return err
	}
	defer lock.Close()
	tokens, err := c.Issued()
	if err == nil {
		err = pruneList(c.dir, fileIssued, tokens, func(t Claims) bool { return t.Ends >= before.Unix() })
	}
	nodes, nerr := c.Nodes()
	if nerr == nil {
		nerr = pruneList(c.dir, fileNodes, nodes, func(n NodeRecord) bool { return n.Ends >= before.Unix() })
	}
	return errors.Join(err, nerr)
}

// pruneList removes the values of a list that keep returns false for. The caller holds the lock.
func pruneList[T any](dir, file string, all []T, keep func(T) bool) error {
	before := len(all)
	if all = slices.DeleteFunc(all, func(one T) bool { return !keep(one) }); len(all) == before {
		return nil
	}
	return writeList(dir, file, all)
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
	if err := removeStaged(dir, file); err != nil {
		return err
	}
	return WriteFile(filepath.Join(dir, file), b.Bytes(), 0o600, false)
}
