// Package identity says who a caller is. It has tokens and their issuer, certificates of nodes, proofs that a credential is its
// holder's, the list of revoked credentials, and the audit log of what was refused. It does not know the messages that carry them;
// internal/control does.
//
// A token (token.go) is a statement that the cluster's key has signed: who pays, as which user, in which role, until when, and
// which key its holder has. It is no secret. With every connection the holder signs a proof (proof.go) for that connection, so
// that nobody who reads a token or a proof, and no server that got one, can use it anywhere else.
//
// A cluster's own directory (cluster.go) holds the private keys and stays with the operator. Each node gets a directory out of it
// (node.go), and each user a file (file.go). The list of revoked credentials (revoked.go) is signed by the same key as tokens.
//
// A daemon follows the files of its directory while it runs (reload.go). It reads all of them through one Opener.
package identity
