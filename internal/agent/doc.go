// Package agent is the control plane of all client processes of one user on one node. A process connects to the agent's
// socket, passes a page of shared memory, and asks for leases. The agent finds executors, renews leases, follows their
// events and reports them to the process. No call passes through the agent.
//
//	socket ─▶ Agent ─▶ client (one per connection) ─▶ session ─▶ grant.Control ─▶ grant.Pool, shared by all clients
//	                          └─▶ lease: pending, then held, then released or cached
//
// client/c/agent_protocol.h defines the messages, and package protocol decodes them. Everything that a client sends is
// checked. A client of another user is refused. A client that breaks the protocol, or does not read its replies, loses its
// connection and with it its leases. It does not delay the others.
package agent
