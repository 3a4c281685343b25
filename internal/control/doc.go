// Package control is what clients, executors and the resource manager say to each other outside of invocations:
// the gRPC services of control.proto, how to dial and serve them, and who may.
//
// A caller proves itself with every call, by a token, a shared secret, a certificate or its user id on a unix socket (gate.go). The
// credentials are in a call's headers, and the gate checks them before any byte of a message is kept. What unauthenticated connections
// take together is bounded (strangers.go), and so is what each tenant takes (internal/quota). Between nodes everything goes over TLS
// unless plain text is explicitly allowed.
//
// Errors carry their class (class.go), so that a caller knows what to do next without reading the text.
//
// The generated files come from protoc with protoc-gen-go v1.36.6 and protoc-gen-go-grpc v1.5.1.
package control

//go:generate sh -c "cd ../.. && protoc --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative internal/control/control.proto"

// ProtocolVersion is the version of control.proto. Both sides send theirs; a difference is refused.
const ProtocolVersion = 1

const (
	// MaxMessage is the largest message that a daemon sends, in bytes.
	MaxMessage = 4 << 20
	// MaxRequest is the largest message that a daemon receives, in bytes: a lease of 1024 workers, or a piece of a library.
	MaxRequest = 320 << 10
	// UploadChunkSize is the data that a client should put into one UploadChunk, in bytes.
	UploadChunkSize = 256 << 10
	// RequestIDSize is the length of LeaseRequest.request_id in bytes.
	RequestIDSize = 16
)

const (
	// DefaultExecutorAddress is where an executor listens unless told otherwise.
	DefaultExecutorAddress = "127.0.0.1:7465"
	// DefaultManagerAddress is where the resource manager listens unless told otherwise.
	DefaultManagerAddress = "127.0.0.1:7464"
)
