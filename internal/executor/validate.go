package executor

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/lease"
)

const (
	// minMemory is the smallest memory limit with which a worker process can run, in bytes.
	minMemory = 16 << 20
	maxTenant = 255
)

// clientIDSize is the length of a client process's id, in bytes.
const clientIDSize = 16

// kindOf returns a hash of what a cached worker must share with a new lease besides its terms: client process, code,
// tables, bundle, runtime and provider. It is zero, which matches nothing, for a client without an id, and for a lease with a seed.
func kindOf(req *control.LeaseRequest) (kind [32]byte) {
	if len(req.GetClientId()) == 0 || req.GetSeed() != nil {
		return kind
	}
	parts := slices.Concat(req.GetClientId(), req.GetCodeSha256(), []byte(req.GetProvider()))
	for _, t := range req.GetTables() {
		parts = binary.LittleEndian.AppendUint64(append(parts, t.GetSha256()...), t.GetAddress())
		parts = append(append(parts, t.GetName()...), 0)
	}
	parts = append(append(parts, 0), req.GetBundle().GetSha256()...)
	return sha256.Sum256(append(append(parts, 0), req.GetRuntime()...))
}

func invalidf(format string, args ...any) error {
	return control.Errorf(control.ClassInvalid, format, args...)
}

// checkVersion returns an error for a peer with another protocol version.
func checkVersion(v uint32) error {
	if v != control.ProtocolVersion {
		return control.CodeErrorf(control.ClassUnsupported, codes.FailedPrecondition,
			"protocol_version %d: this executor speaks %d", v, control.ProtocolVersion)
	}
	return nil
}

// checkSum returns the SHA-256 in a message field.
func checkSum(field string, b []byte) (sum, error) {
	if len(b) != sha256.Size {
		return sum{}, invalidf("%s has %d bytes, want %d", field, len(b), sha256.Size)
	}
	return sum(b), nil
}

// terms checks everything in a request that needs no state, and converts it for the lease table.
func (e *Executor) terms(ctx context.Context, req *control.LeaseRequest) (rid lease.RequestID, t lease.Terms, code sum, err error) {
	fail := func(err error) (lease.RequestID, lease.Terms, sum, error) { return rid, t, code, err }
	if err := checkVersion(req.GetProtocolVersion()); err != nil {
		return fail(err)
	}
	if n := len(req.GetRequestId()); n != control.RequestIDSize {
		return fail(invalidf("request_id has %d bytes, want %d", n, control.RequestIDSize))
	}
	rid = lease.RequestID(req.GetRequestId())
	if code, err = checkSum("code_sha256", req.GetCodeSha256()); err != nil {
		return fail(err)
	}
	if t, err = e.sizes(req); err != nil {
		return fail(err)
	}
	if err := e.checkProvider(req.GetProvider()); err != nil {
		return fail(err)
	}
	if _, ok := control.WaitMode_name[int32(req.GetWaitMode())]; !ok {
		return fail(invalidf("wait_mode %d is unknown", req.GetWaitMode()))
	}
	if n := len(req.GetClientBlobs()); n != t.Workers {
		return fail(invalidf("%d client_blobs for %d workers, want one for each", n, t.Workers))
	}
	for i, b := range req.GetClientBlobs() {
		if err := e.checkBlob(b, req.GetProvider(), req.GetSpare()); err != nil {
			return fail(control.StatusError(statusBadBlob, fmt.Sprintf("client_blobs[%d]: %v", i, err)))
		}
	}
	if t.MemoryPerWorker, err = e.memory(req, &t); err != nil {
		return fail(err)
	}
	if n := len(req.GetTenant()); n > maxTenant || !utf8.ValidString(req.GetTenant()) {
		return fail(invalidf("tenant has %d bytes, want at most %d of UTF-8", n, maxTenant))
	}
	if t.Tenant, err = e.payer(ctx, req.GetTenant()); err != nil {
		return fail(err)
	}
	who := control.Caller(ctx)
	if who.UID != nil {
		t.UID, t.GID = *who.UID, groupOf(*who.UID)
	}
	rid = scoped(rid, who)
	if n := len(req.GetClientId()); n != 0 && n != clientIDSize {
		return fail(invalidf("client_id has %d bytes, want %d or none", n, clientIDSize))
	}
	if req.GetReuse() != 0 && len(req.GetClientId()) == 0 {
		return fail(invalidf("reuse of lease %d without a client_id", req.GetReuse()))
	}
	if err := e.checkRuntime(req.GetRuntime()); err != nil {
		return fail(err)
	}
	if err := checkSpare(req); err != nil {
		return fail(err)
	}
	if err := checkSeed(req); err != nil {
		return fail(err)
	}
	t.Kind, t.KeepsState, t.Spare = kindOf(req), req.GetKeepsState(), req.GetSpare()
	bytes, err := proto.MarshalOptions{Deterministic: true}.Marshal(req)
	if err != nil {
		return fail(invalidf("lease request: %v", err))
	}
	t.Fingerprint = sha256.Sum256(bytes)
	return rid, t, code, nil
}

// sizes checks the numbers of a request and fills in defaults.
func (e *Executor) sizes(req *control.LeaseRequest) (lease.Terms, error) {
	var t lease.Terms
	capacity := e.table.Capacity()
	if n := req.GetWorkers(); n < 1 || n > uint32(e.maxWorkers) {
		return t, invalidf("workers %d: this executor gives 1 to %d to a lease", n, e.maxWorkers)
	}
	if n := req.GetWorkersMin(); n > req.GetWorkers() {
		return t, invalidf("workers_min %d: want at most workers, which is %d", n, req.GetWorkers())
	}
	t.Workers, t.WorkersMin = int(req.GetWorkers()), int(cmp.Or(req.GetWorkersMin(), req.GetWorkers()))
	t.CoresPerWorker = max(1, int(req.GetCoresPerWorker()))
	if c := req.GetCoresPerWorker(); c > uint32(len(e.cfg.Cores)) || t.Workers*t.CoresPerWorker > capacity.Cores {
		return t, invalidf("workers %d with cores_per_worker %d: this executor lends %d cores", t.Workers, c, capacity.Cores)
	}
	var err error
	if t.Duration, err = e.duration(req.DurationMs, e.cfg.Settings.LeaseDefault); err != nil {
		return t, err
	}
	if t.CallLimit, err = e.callLimit(req.GetCallLimitMs()); err != nil {
		return t, err
	}
	t.Wait, t.InitCall = lease.Wait(req.GetWaitMode()), req.GetInitCall()
	return t, nil
}

// memory returns how much a lease reserves for each worker, in bytes: the memory of its functions and of its channel.
func (e *Executor) memory(req *control.LeaseRequest, t *lease.Terms) (uint64, error) {
	capacity, channel := e.table.Capacity().Memory/uint64(t.Workers), channelsMemory(req.GetClientBlobs())
	m := req.GetMemoryPerWorker()
	if m == 0 {
		return min(max(e.defaultMemory(t.CoresPerWorker), minMemory+channel), capacity), e.fits(minMemory, channel, capacity, t.Workers)
	}
	return m + channel, e.fits(m, channel, capacity, t.Workers)
}

// fits returns an error if a worker cannot have m bytes for its functions besides its channel.
func (e *Executor) fits(m, channel, most uint64, workers int) error {
	if m < minMemory {
		return invalidf("memory_per_worker %d bytes (option memory): ask for at least %v", m, config.Bytes(minMemory))
	}
	if m > most || channel > most-m {
		return invalidf("memory_per_worker %d bytes (option memory) with %d workers, and %d bytes for the channel of each: this executor lends %d bytes "+
			"to each worker with its channel. Ask for less memory, fewer workers, or smaller channels", m, workers, channel, most)
	}
	return nil
}

// defaultMemory returns the memory of a worker with these cores whose request names none, including its channel, in
// bytes.
func (e *Executor) defaultMemory(cores int) uint64 {
	capacity := e.table.Capacity()
	return (capacity.Memory - capacity.SetAside) / uint64(capacity.Cores) * uint64(cores)
}

// callLimit returns how long one call may run if a lease asks for ms milliseconds; 0: no limit.
func (e *Executor) callLimit(ms uint64) (time.Duration, error) {
	own := e.cfg.Settings.CallLimit
	if ms == 0 {
		return own, nil
	}
	if most := cmp.Or(own, e.cfg.Settings.LeaseMax); ms > uint64(most/time.Millisecond) {
		return 0, invalidf("call_limit_ms %d (option call_limit_ns; in Go, CallLimit): this executor permits at most %d ms (%v)", ms, most.Milliseconds(), most)
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// initLimit returns how long an init call may run; 0: no limit. A lease's own call limit does not concern it.
func (e *Executor) initLimit() time.Duration {
	return cmp.Or(e.cfg.Settings.InitLimit, e.cfg.Settings.CallLimit)
}

func (e *Executor) checkProvider(name string) error {
	switch {
	case providerID(name) == 0:
		return invalidf("provider %q is unknown: want shm, verbs, tcp or ofi", name)
	case !slices.Contains(e.cfg.Providers, name):
		return control.CodeErrorf(control.ClassUnsupported, codes.FailedPrecondition,
			"provider %q is not available on this node, which offers %v", name, e.cfg.Providers)
	}
	return nil
}

// checkRuntime refuses a runtime that this executor does not have.
func (e *Executor) checkRuntime(name string) error {
	have := e.cfg.Spawner.Runtimes()
	switch {
	case name == "" || slices.Contains(have, name):
		return nil
	case len(have) == 0:
		return control.CodeErrorf(control.ClassUnsupported, codes.FailedPrecondition, "runtime %.64q: this executor has no runtimes (setting runtimes)", name)
	}
	return control.CodeErrorf(control.ClassUnsupported, codes.FailedPrecondition, "runtime %.64q is not available on this node, which has %s", name, strings.Join(have, ", "))
}

// statusBadBlob is DP_BAD_BLOB of dp_status.h.
const statusBadBlob = -203
