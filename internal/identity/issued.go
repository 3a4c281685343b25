package identity

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// maxIssued bounds the list of issued tokens, in bytes. A token takes some 200 bytes.
const maxIssued = 256 << 20

// recordIssued appends a token's claims to the cluster's list, as a line of JSON. It returns after the line is on disk.
func (c *Cluster) recordIssued(claims Claims) error {
	line, err := json.Marshal(claims)
	if err != nil {
		return err
	}
	lock, err := lockDir(c.dir, c.patience)
	if err != nil {
		return err
	}
	defer lock.Close()
	f, err := os.OpenFile(filepath.Join(c.dir, fileIssued), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
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
	path := filepath.Join(c.dir, fileIssued)
	b, err := Opener(nil).read(path, false, maxIssued)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []Claims
	var errs []error
	n := 0
	for line := range bytes.Lines(b) {
		n++
		var one Claims
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		err := json.Unmarshal(line, &one)
		if err == nil {
			err = one.Check()
		}
		if err == nil {
			all = append(all, one)
		} else {
			errs = append(errs, fmt.Errorf("%s: line %d is damaged: %w", path, n, err))
		}
	}
	return all, errors.Join(errs...)
}
