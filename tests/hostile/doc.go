// Package hostile attacks a running cluster as its tenants and its network could. The suite is run by make test-hostile, as root.
//
// A real resource manager and a real executor run with identities and with the sandbox as it is by default. Each attack is one row of a
// table: a function in a worker, a client with the credential of a tenant or of another node, or a stranger at a port. An attack fails
// the suite when it gets what the threat model (docs/THREAT_MODEL.md) refuses. What is judged is the effect: access, descriptors, threads,
// memory, the ratio of processor time. No text of a refusal counts. After each attack the daemons are the same processes, and another
// tenant's lease still answers.
package hostile
