package faults

import (
	"bytes"
	"encoding/binary"
)

// The function that workers execute, as in testdata/work.h.

const workHead = 16 // tag u64, want u32, pause in us u32

const golden = 0x9e3779b97f4a7c15

func workMix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func workHash(p []byte) uint64 {
	h := uint64(len(p))
	h *= golden
	for ; len(p) >= 8; p = p[8:] {
		h = (h ^ binary.LittleEndian.Uint64(p)) * golden
		h ^= h >> 29
	}
	var last [8]byte
	copy(last[:], p)
	return workMix(h ^ binary.LittleEndian.Uint64(last[:]))
}

func workFill(out []byte, hash uint64) {
	var word [8]byte
	for i := uint64(1); len(out) > 0; i++ {
		binary.LittleEndian.PutUint64(word[:], workMix(hash+i*golden))
		out = out[copy(out, word[:]):]
	}
}

func workIs(data []byte, hash uint64) bool {
	want := make([]byte, len(data))
	workFill(want, hash)
	return bytes.Equal(data, want)
}

// workPayload makes a payload of workHead+extra bytes.
func workPayload(tag uint64, extra int, want, pauseUS uint32) []byte {
	p := make([]byte, workHead+extra)
	binary.LittleEndian.PutUint64(p, tag)
	binary.LittleEndian.PutUint32(p[8:], want)
	binary.LittleEndian.PutUint32(p[12:], pauseUS)
	workFill(p[workHead:], tag)
	return p
}
