// Package hostile attacks a running cluster as its tenants and its network could. The suite is run by make test-hostile, as root.
//
// A real resource manager and a real executor run with identities and with the default sandbox. Each attack is one row of a
// table. The attacker is a function in a worker, a client with the credential of a tenant or of another node, or an outsider
// without a valid credential at a port. An attack fails the suite if it succeeds in something that the threat model
// (docs/THREAT_MODEL.md) excludes. The suite judges effects: access, descriptors, threads, memory, and ratios of processor
// time. It does not compare the text of refusals. After each attack the daemons must be the same processes, and another
// tenant's lease must still answer.
package hostile
