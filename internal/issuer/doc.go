// Package issuer is the service that gives certificates to nodes and tokens to users, and its clients. It has the cluster's keys, so it is a
// process of its own, with a user of its own: `rfaas cluster serve`. internal/identity has what the keys sign.
//
// The service answers requests in JSON over HTTPS, one a connection (server.go, protocol.go). Its address contains the hash of the cluster's
// certificate, so a client needs nothing else to know that it talks to the right service (address.go). A node without a certificate sends an
// enrolment code, a node with one authenticates itself by it, and a user by a credential of MUNGE (munge.go).
package issuer
