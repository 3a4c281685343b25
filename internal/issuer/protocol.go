package issuer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// Paths of requests.
const (
	pathEnrol   = "/v1/enrol"
	pathRenew   = "/v1/renew"
	pathRevoked = "/v1/revoked"
	pathToken   = "/v1/token"
	pathRevoke  = "/v1/revoke"
)

// serialQuery names the part of a request for the list of revoked credentials that has the serial number of the caller's list.
const serialQuery = "serial"

// maxRequest bounds a request's body, in bytes.
const maxRequest = 32 << 10

// maxReply bounds a reply, in bytes. A revocation list may have 16 MiB, and JSON writes some characters as six.
const maxReply = 100 << 20

// enrolRequest asks for a certificate with a code.
type enrolRequest struct {
	Secret []byte `json:"secret"`
	identity.NodeRequest
}

// failure is the reply to a refused request.
type failure struct {
	Reason identity.Reason `json:"reason,omitempty"` // empty: the issuer could not answer
	Error  string          `json:"error"`
}

// parse reads one JSON value of at most most bytes, without unknown fields.
func parse(r io.Reader, most int64, into any) error {
	b, err := io.ReadAll(io.LimitReader(r, most+1))
	if err != nil {
		return err
	}
	if int64(len(b)) > most {
		return fmt.Errorf("more than %d bytes", most)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one value")
	}
	return nil
}
