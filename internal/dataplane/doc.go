// Package dataplane has the C core of rfaas and its Go wrapper. The C core implements remote memory operations and both sides of a
// channel. The client library (client/c) and the worker (worker) are built on it; the Go wrapper serves the executor, the resource
// manager, the agent and the benchmarks.
//
// A C file may use its own layer and those below:
//
//	dp_channel, dp_submit, dp_call, dp_silence   client side of a channel
//	dp_parts                                     payloads and results larger than the bulk area, client side
//	dp_server, dp_serve, dp_serve_parts          worker side of a channel
//	dp_raw                                       queue pair for control: one operation at a time
//	dp_local                                     functions executed in the process of the client
//	dp_turns                                     threads that share workers
//	dp_layout, dp_bulk                           memory of a channel      dp_wait   spinning and blocking
//	dp_pieces                                    payloads and results in several pieces
//	dp_fabric                                    devices, memory regions, queue pairs and completion queues: one interface
//	dp_shm, dp_tcp, dp_verbs                     its providers: one node, TCP, InfiniBand and RoCE
//	dp_wire                                      the protocol's bytes
//
// C keeps no pointer to Go memory after a call returns.
package dataplane
