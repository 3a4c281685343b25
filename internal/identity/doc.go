// Package identity authenticates callers. It has tokens and their issuer, certificates of nodes, proofs that a caller owns its
// credential, the list of revoked credentials, and the audit log. It does not know the messages that carry credentials;
// internal/control does.
//
// A token (token.go) is a statement signed by the cluster's key. It names the tenant, user id, role, expiry time and its owner's
// key. It is not a secret. For every connection the owner signs a proof (proof.go), so that a party that has read a token or a
// proof, or a server that has received one, cannot use it anywhere else.
//
// A cluster's own directory (cluster.go) holds the private keys and stays with the operator. Each node gets a directory out of it
// (node.go), and each user a token file (file.go). The list of revoked credentials (revoked.go) is signed by the same key as tokens.
//
// A running daemon reloads the files of its directory when they change (reload.go). It reads all of them through one Opener.
package identity
