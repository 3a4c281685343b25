package latency

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/rfaas-go/rfaas/benchmarks/raw"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// ProcessStart is the time from fork and exec of a new peer to the result of its first call, with a channel of the client library's
// sizes: the peer loads its libraries, opens the device, registers memory and connects. A worker's start would take as long if nothing
// were prepared. peer is the path of rfaas-bench-peer.
func ProcessStart(provider string, device dataplane.Options, peer string) (time.Duration, error) {
	cfg := Config{Provider: provider, Device: device, Modes: []dataplane.WaitMode{dataplane.Warm},
		Payloads: []int{8}, Buffers: BuffersCopied, Peer: peer, callsOnly: true}
	if err := cfg.Validate(); err != nil {
		return 0, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := time.Now()
	s, err := openSession(&cfg, dataplane.Warm)
	if err != nil {
		return 0, err
	}
	defer s.close()
	if _, err := s.bench.Calls(raw.FnEmpty, 8, 8, 0, 1, nil); err != nil {
		return 0, s.explain(err)
	}
	return time.Since(began), nil
}

// Fork measures the floor of a worker's start: fork of a process of about a zygote's size. It returns a text with the times. peer is the path of
// rfaas-bench-peer.
func Fork(peer string) (string, error) {
	c := exec.Command(peer, "--fork")
	c.Stderr = os.Stderr
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s --fork: %w", peer, err)
	}
	return strings.TrimSpace(string(out)), nil
}
