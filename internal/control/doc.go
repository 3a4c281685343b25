// Package control has the messages between clients, executors and the resource manager outside of invocations: the gRPC
// services of control.proto, how to dial and serve them, and which callers may use them.
//
// Every call is authenticated by a token, a shared secret, a certificate or the user id of a unix socket's peer (gate.go). The
// credentials are in a call's headers, and the gate checks them before any byte of a message is stored. The resources of
// unauthenticated connections are bounded (unauthenticated.go), and so are those of each tenant (internal/quota). Connections
// between nodes use TLS unless plain text is explicitly allowed.
//
// Errors carry their class (class.go), so that a caller knows what to do next without reading the text.
//
// The generated files come from protoc with protoc-gen-go v1.36.6 and protoc-gen-go-grpc v1.5.1.
package control

//go:generate sh -c "cd ../.. && protoc --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative internal/control/control.proto"

// ProtocolVersion is the version of control.proto. Both sides send their version and refuse a different one.
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
	// DefaultExecutorAddress is the default control address of an executor.
	DefaultExecutorAddress = "127.0.0.1:7465"
	// DefaultManagerAddress is the default control address of the resource manager.
	DefaultManagerAddress = "127.0.0.1:7464"
)
