// Package dataplane is the C core of rfaas and its thin Go wrapper: the fabric, and the channel's client and worker side.
// The worker program, which executes functions, is in the folder worker.
//
// The C files are layers, each using only those below it:
//
//	rfaas_api   the C interface's call path (rfaas.h)
//	dp_channel  client side of an invocation      dp_serve   worker side (dp_server makes, dp_serve serves)
//	dp_layout   memory layout and channel blobs   dp_wait    spinning and blocking   dp_wire  headers
//	dp_fabric   devices, regions, queue pairs, completion queues: one interface
//	dp_shm      provider for one host             dp_verbs   provider for InfiniBand and RoCE
//
// It is one package because Go compiles and caches only the C files of a package's own folder, and it is the
// only one that imports "C" besides the C interface's exports and the MPI binding.
//
// Go memory is passed to C for the length of a call only; C keeps no pointer to it.
package dataplane
