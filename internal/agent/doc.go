// Package agent is the control plane of all client processes of one user on one node. A process connects to the agent's
// socket, passes a page of shared memory, and asks for leases; the agent finds executors, renews leases, watches over
// them, and reports what happens. Calls never come here.
//
//	socket ─▶ Agent ─▶ client (one per connection) ─▶ session ─▶ grant.Control ─▶ grant.Pool, shared by all clients
//	                          └─▶ lease: pending, then held, then released or kept
//
// client/c/agent_protocol.h has the messages, package protocol reads them. Everything that a client sends is checked.
// A client of another user is refused; a client that breaks the protocol, or does not read its replies, loses its
// connection and with it its leases, and does not delay the others.
package agent
