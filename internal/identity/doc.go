// Package identity says who a caller is: tokens and their issuer, certificates of nodes, proofs that a credential is its
// holder's, the list of revoked tokens, and the audit log of what was refused. It knows nothing of the messages that carry
// all that; internal/control does.
//
// A token (token.go) is a statement, signed by the cluster's key: who pays, as which user, in which role, until when, and
// which key its holder has. It is no secret. With every connection the holder signs a proof (proof.go) for that connection, so
// that whoever reads a token or a proof, or is the server that got them, cannot use them anywhere else.
//
// A cluster's own directory (cluster.go) holds the private keys and stays with the operator; what each node and each user
// gets out of it is one directory and one file.
package identity
