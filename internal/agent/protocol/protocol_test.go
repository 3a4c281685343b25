package protocol

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// kind is one kind of message: an encoder and a decoder that must agree.
type kind struct {
	name   string
	sample []byte // a body
	decode func([]byte) (any, error)
	encode func(any) []byte // nil: the decoder's result is not the whole message
}

func of[T any](name string, sample T, encode func(*T, []byte) []byte, decode func([]byte) (T, error)) kind {
	return kind{name, encode(&sample, nil), func(b []byte) (any, error) { return decode(b) },
		func(x any) []byte { v := x.(T); return encode(&v, nil) }}
}

var blob = bytes.Repeat([]byte{7}, 100)

func kinds() []kind {
	spec := Spec{Workers: 2, WorkersMin: 1, Init: 1, CoresPerWorker: 3, WaitMode: 1, Flags: 1, Depth: 4, Eager: 5, Memory: 6, Bulk: 7, DurationNs: 8, CallLimitNs: 9,
		Executor: "node:1", Library: "lib.so"}
	workers := []Worker{{PID: 10, Start: 1, Blob: blob}, {PID: 11, Start: 3, Blob: []byte{1}}}
	return []kind{
		of("hello", Hello{Connection: 7, Version: "1.2", Directory: "/home/x", Environment: []string{"A=1", "B="}}, (*Hello).Encode, DecodeHello),
		of("welcome", Welcome{Protocol: Version, PID: 12, Version: "1.3"}, (*Welcome).Encode, DecodeWelcome),
		of("report", []byte("{}"), func(t *[]byte, b []byte) []byte { return EncodeReport(b, *t) }, DecodeReport),
		of("session", Session{Session: 1, Flags: 2, Keep: -1, TimeoutNs: 3, Manager: "m:1", Executor: "", Tenant: "t", Provider: "shm",
			Device: "rdma0", Port: 1, GID: 4, PKeyIndex: 2, TrafficClass: 106, ServiceLevel: 3, MTU: 1024, VirtualPairs: 2},
			(*Session).Encode, DecodeSession),
		of("session name", SessionName{1, 2}, (*SessionName).Encode,
			func(b []byte) (SessionName, error) { return DecodeSessionName(OpChanges, b) }),
		of("table", Table{Session: 1, Size: 5 << 30, Address: 4096, Name: "cross sections"}, (*Table).Encode,
			func(b []byte) (Table, error) { return DecodeTable(OpTable, b) }),
		of("table seed", TableSeed{Session: 1, Name: "xs", Seed: "xs:1@a:1"}, (*TableSeed).Encode, DecodeTableSeed),
		of("seed create", SeedCreate{Key: 1, LimitNs: 2, TTLNs: 3, Name: "xs", Function: "prepare", Payload: []byte{0, 1}}, (*SeedCreate).Encode, DecodeSeedCreate),
		of("seed name", SeedName{1, "xs:1@a:1"}, (*SeedName).Encode, func(b []byte) (SeedName, error) { return DecodeSeedName(OpSeedFind, b) }),
		of("seed", Seed{Bytes: 1, Memory: 2, LoadNs: 3, SetupNs: 4, CaptureNs: 5, LeftNs: 6, Version: 7, Children: 8, Name: "xs:7@a:1", Executor: "a:1", Node: "n", Warning: "w", Function: "prepare"},
			(*Seed).Encode, DecodeSeed),
		of("first acquire", Acquire{Key: 1, Session: 2, Cached: 4, WaitNs: 5, First: true, At: "a:1", Provider: "verbs", Spec: spec,
			Offers: [][]byte{blob, {1}}, SeedFunction: "prepare", SeedPayload: []byte{0, 1}, SeedName: "xs:1@a:1", SeedLimitNs: 6}, (*Acquire).Encode, DecodeAcquire),
		of("acquire from", Acquire{Key: 1, Session: 2, From: 3, First: true, Status: -300, Reason: "refused"}, (*Acquire).Encode, DecodeAcquire),
		of("acquire", Acquire{Key: 1, Session: 2}, (*Acquire).Encode, DecodeAcquire),
		of("candidate", Candidate{Handed: true, Claim: Claim{1, 2, 3}, Workers: workers[:1], Functions: []string{"f"}, Executor: "x:1", Node: "n", Provider: "shm"}, (*Candidate).Encode, DecodeCandidate),
		of("grant", Candidate{Granted: true, LeaseID: 1, UntilNs: 2, Library: [32]byte{31: 9}, Executor: "x:1", Node: "n", Provider: "shm",
			Workers: workers, Functions: []string{"f", "g"}}, (*Candidate).Encode, DecodeCandidate),
		of("adopt", Adopt{Key: 1, Session: 2, LeaseID: 3, Cached: 8, UntilNs: 4, Library: [32]byte{5}, At: "x:1", Node: "n", Provider: "shm", Spec: spec,
			PIDs: []uint64{6, 7}}, (*Adopt).Encode, DecodeAdopt),
		of("until", int64(7), func(n *int64, b []byte) []byte { return EncodeUntil(b, *n) }, func(b []byte) (int64, error) { return DecodeUntil(OpRenew, b) }),
		of("replace", Replace{Key: 1, TimeoutNs: 2, Worker: 3, Offer: blob}, (*Replace).Encode, DecodeReplace),
		of("worker", workers[0], func(w *Worker, b []byte) []byte { return EncodeWorker(b, w) }, DecodeWorker),
		of("release", Release{1, true, false, true}, (*Release).Encode, DecodeRelease),
		of("release of a claimant", Release{Key: 1, Keep: true, Own: true}, (*Release).Encode, DecodeRelease),
		of("released", Released{Cached: true, Handed: true, Claim: Claim{1, 254, 1 << 40}, Spare: []uint64{7, 8}, May: true}, (*Released).Encode, DecodeReleased),
		of("released to a claimant", Released{Cached: true, Claim: Claim{0, 3, 4}, Own: &OwnClaim{5, 6}}, (*Released).Encode, DecodeReleased),
		of("attach", Attach{1, blob}, (*Attach).Encode, DecodeAttach),
		of("attached", Attached{1, 2, blob}, (*Attached).Encode, DecodeAttached),
		of("hand", Hand{Key: 1, First: 2, Count: 3, Size: 2, Files: 4, Held: true, Channels: []byte("abcdef")}, (*Hand).Encode, DecodeHand),
		of("lease name", uint64(8), func(k *uint64, b []byte) []byte { return EncodeLeaseName(b, *k) }, func(b []byte) (uint64, error) { return DecodeLeaseName(OpFinish, b) }),
		of("worker name", WorkerName{1, 2}, (*WorkerName).Encode, func(b []byte) (WorkerName, error) { return DecodeWorkerName(OpInspect, b) }),
		of("inspection", Inspection{1, 2, 3, 4, 5, 6, "f", []byte("said")}, (*Inspection).Encode, DecodeInspection),
		of("renewal", Renewal{1, 2}, (*Renewal).Encode, DecodeRenewal),
		of("spread", Spread{Session: 1, Workers: 2, CoresPerWorker: 3, Memory: 4, DurationNs: 5, One: true, Executor: "x:1", Avoid: []string{"y:1", "z:1"}},
			(*Spread).Encode, DecodeSpread),
		of("shares", []Share{{1, "x:1"}, {2, "y:1"}}, func(s *[]Share, b []byte) []byte { return EncodeShares(b, *s) }, DecodeShares),
		of("changes", []Change{{1, "x:1", "n"}, {4, "y:1", "m"}}, func(c *[]Change, b []byte) []byte { return EncodeChanges(b, *c) }, DecodeChanges),
		of("silence", Silence{1, 2, 3, 4}, (*Silence).Encode, DecodeSilence),
		of("event", Event{1, 2, 3, 4, -5, 6, "died", "\non the stack:\n    f"}, (*Event).Encode, DecodeEvent),
		of("failure", "reason", func(s *string, b []byte) []byte { return append(b, Failure(OpOpen, 1, -1, *s)[HeaderSize:]...) },
			func(b []byte) (string, error) { return DecodeFailure(OpOpen, b) }),
	}
}

func TestMessagesComeThrough(t *testing.T) {
	for _, k := range kinds() {
		v, err := k.decode(k.sample)
		if err != nil {
			t.Errorf("%s: %v", k.name, err)
		} else if again := k.encode(v); !bytes.Equal(again, k.sample) {
			t.Errorf("%s: %+v is another message", k.name, v)
		}
	}
}

// A message that was cut, or has bytes behind it, is refused. Where the size is not fixed, another count would be needed.
func TestSizesAreExact(t *testing.T) {
	for _, k := range kinds() {
		for n := range k.sample {
			if v, err := k.decode(k.sample[:n]); !isMalformed(err) {
				t.Fatalf("%s: %d of %d bytes: %+v, %v", k.name, n, len(k.sample), v, err)
			}
		}
		if v, err := k.decode(append(slices.Clone(k.sample), 0)); !isMalformed(err) {
			t.Errorf("%s: a byte more: %+v, %v", k.name, v, err)
		}
	}
}

func isMalformed(err error) bool {
	var e *Error
	return errors.As(err, &e)
}

// Decoding does not alias what was received.
func TestDecodedValuesAreCopies(t *testing.T) {
	for _, k := range kinds() {
		b := slices.Clone(k.sample)
		v, err := k.decode(b)
		if err != nil {
			t.Fatal(err)
		}
		before := fmt.Sprintf("%+v", v)
		for i := range b {
			b[i] = 0xff
		}
		if after := fmt.Sprintf("%+v", v); after != before {
			t.Errorf("%s: %s has become %s", k.name, before, after)
		}
	}
}

func TestTextsMustEnd(t *testing.T) {
	s := Session{Manager: strings.Repeat("x", 1000)}
	b := s.Encode(nil)
	got, err := DecodeSession(b)
	if err != nil || len(got.Manager) != MaxAddress {
		t.Fatalf("%d bytes of address, %v", len(got.Manager), err)
	}
	b[bytes.IndexByte(b, 'x')+MaxAddress] = 'x'
	if _, err := DecodeSession(b); !isMalformed(err) || !strings.Contains(err.Error(), "manager") {
		t.Errorf("a text without an end: %v", err)
	}
}

// A count is refused before anything is allocated for it.
func TestCountsAreBounded(t *testing.T) {
	a := Acquire{Offers: make([][]byte, MaxWorkers+1)}
	for i := range a.Offers {
		a.Offers[i] = []byte{1}
	}
	if _, err := DecodeAcquire(a.Encode(nil)); !isMalformed(err) || !strings.Contains(err.Error(), fmt.Sprint(MaxWorkers+1)) {
		t.Errorf("%v", err)
	}
	a.Offers = a.Offers[:MaxWorkers]
	if got, err := DecodeAcquire(a.Encode(nil)); err != nil || len(got.Offers) != MaxWorkers {
		t.Errorf("%d offers, %v", len(got.Offers), err)
	}
	for name, size := range map[string]int{"empty": 0, "large": MaxBlob + 1} {
		r := Replace{Offer: []byte{1}}
		b := r.Encode(nil)
		at := bytes.LastIndexByte(b, 1) - 4
		b[at], b[at+1] = byte(size), byte(size>>8)
		if _, err := DecodeReplace(b); !isMalformed(err) {
			t.Errorf("%s blob: %v", name, err)
		}
	}
}

func TestHeader(t *testing.T) {
	b := append(Begin([]byte("before"), OpOpen, 7, -3), 1, 2, 3)
	if !End(b, 6) {
		t.Fatal("too large")
	}
	h, err := DecodeHeader(b[6 : 6+HeaderSize])
	if err != nil || !reflect.DeepEqual(h, Header{HeaderSize + 3, OpOpen, 7, -3}) {
		t.Errorf("%+v, %v", h, err)
	}
	if End(make([]byte, MaxMessage+1), 0) {
		t.Error("a message of more bytes than the most")
	}
	for _, size := range []uint32{0, HeaderSize - 1, MaxMessage + 1, 1<<32 - 1} {
		copy(b[6:], []byte{byte(size), byte(size >> 8), byte(size >> 16), byte(size >> 24)})
		if _, err := DecodeHeader(b[6 : 6+HeaderSize]); !isMalformed(err) {
			t.Errorf("size %d: %v", size, err)
		}
	}
}

// The layout of the page is what the library compiles.
func TestPageLayout(t *testing.T) {
	if LineSize != 64 || OffsetLines%64 != 0 || OffsetLines+MaxLeases*LineSize != PageSize {
		t.Errorf("lines of %d bytes from %d on in %d bytes", LineSize, OffsetLines, PageSize)
	}
	if Line(MaxLeases+5) != 5 || Line(1<<63+MaxLeases-1) != MaxLeases-1 {
		t.Error("the low bits of a key are its line")
	}
}

// Whatever is decoded without an error is the same message when it is encoded, and its size is that of the message.
func FuzzDecode(f *testing.F) {
	all := kinds()
	for i, k := range all {
		f.Add(uint8(i), k.sample)
		f.Add(uint8(i), k.sample[:len(k.sample)/2])
		f.Add(uint8(i), bytes.Repeat([]byte{0xff}, len(k.sample)))
	}
	f.Fuzz(func(t *testing.T, i uint8, b []byte) {
		k := all[int(i)%len(all)]
		v, err := k.decode(b)
		if err != nil {
			if !isMalformed(err) {
				t.Fatalf("%s: %v", k.name, err)
			}
			return
		}
		// Bytes behind the end of a text, and padding, are lost. A second time nothing is.
		again := k.encode(v)
		w, err := k.decode(again)
		if err != nil {
			t.Fatalf("%s: %+v: %v", k.name, v, err)
		}
		if !bytes.Equal(k.encode(w), again) {
			t.Fatalf("%s: %+v has become %+v", k.name, v, w)
		}
	})
}
