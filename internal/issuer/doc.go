// Package issuer contains the service that gives certificates to nodes and tokens to users, and its clients. The service has the cluster's keys, so it
// runs as a separate process under a separate user: `rfaas cluster serve`. Package internal/identity makes what the keys sign.
//
// The service answers requests in JSON over HTTPS, one a connection (server.go, protocol.go). Its address contains the hash of the cluster's
// certificate, so a client needs nothing else to know that it talks to the right service (address.go). A node without a certificate sends an
// enrolment code, a node with a certificate authenticates with it, and a user authenticates with a MUNGE credential (munge.go).
package issuer
