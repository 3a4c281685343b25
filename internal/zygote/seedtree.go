package zygote

import (
	"crypto/sha256"
	"fmt"
	"slices"

	"github.com/rfaas-go/rfaas/internal/leafsum"
)

// The hash of a segment is the root of a tree, so that a page can be checked before the rest of its segment has arrived. A leaf is a page, or several pages if the seed is larger than
// 1 GiB. Up to 8 leaves form a group, and up to 8 groups a segment. The hash of a leaf is the SHA-256 of its bytes. The hash of a group is that of the hashes of its leaves, one after the
// other, and the hash of a segment that of the hashes of its groups.
//
// A proof contains what is needed to check the leaves of a group: the hashes of the segment's groups, and the hashes of the group's leaves.

const (
	groupLeaves = 8
	leavesMost  = groupLeaves * groupLeaves // of a segment
	groupSums   = groupLeaves * sha256.Size
	proofSize   = 2 * groupSums
)

// SeedRun is a run of consecutive leaves. A seed's leaves are numbered in the order of its segments.
type SeedRun struct{ First, Count uint32 }

// SeedPart is a part of the memory of a seed's source: bytes of a segment, or of the proofs if Segment is -1.
type SeedPart struct {
	Segment      int
	Offset, Size uint64
}

// leafSize returns how many bytes a leaf has. The last one of a segment can have fewer.
func (c *SeedCopy) leafSize() uint64 {
	size := uint64(seedPage)
	for _, x := range c.Segments {
		for x.Size > leavesMost*size {
			size *= 2
		}
	}
	return size
}

// count returns the number of leaves of all segments.
func (c *SeedCopy) count() (n uint32) {
	leaf := c.leafSize()
	for _, x := range c.Segments {
		n += uint32(leavesOf(x, leaf))
	}
	return n
}

// leavesOf returns how many leaves a segment has.
func leavesOf(x SeedSegment, leaf uint64) int { return int((x.Size + leaf - 1) / leaf) }

// groupsOf returns the number of groups that a number of leaves needs.
func groupsOf(leaves int) int { return (leaves + groupLeaves - 1) / groupLeaves }

// ProofsSize returns the number of bytes of all proofs.
func (c *SeedCopy) ProofsSize() (n uint64) {
	leaf := c.leafSize()
	for _, x := range c.Segments {
		n += uint64(groupsOf(leavesOf(x, leaf))) * proofSize
	}
	return n
}

// Proofs writes the proofs of all groups, in their order, to b, which must have ProofsSize bytes. c must come from Seed.Contents.
func (c *SeedCopy) Proofs(b []byte) {
	leaf, leaves := c.leafSize(), c.leaves
	for _, x := range c.Segments {
		own := leaves[:leavesOf(x, leaf)*sha256.Size]
		leaves = leaves[len(own):]
		groups := groupHashes(own)
		for group := range slices.Chunk(own, groupSums) {
			clear(b[:proofSize])
			copy(b, groups)
			copy(b[groupSums:], group)
			b = b[proofSize:]
		}
	}
}

// groupHashes returns the hashes of the groups of a segment's leaves.
func groupHashes(leaves []byte) []byte {
	groups := make([]byte, 0, groupSums)
	for group := range slices.Chunk(leaves, groupSums) {
		sum := sha256.Sum256(group)
		groups = append(groups, sum[:]...)
	}
	return groups
}

// appendLeaves appends the hashes of the leaves of some bytes.
func appendLeaves(leaves, b []byte, leaf uint64) []byte { return leafsum.Append(leaves, b, int(leaf)) }

// root returns the hash of a segment.
func root(leaves []byte) [sha256.Size]byte { return sha256.Sum256(groupHashes(leaves)) }

// SumSegments sets the hashes of all segments. data contains the bytes of the segments, one after the other.
func (c *SeedCopy) SumSegments(data []byte) {
	c.leaves = nil
	leaf := c.leafSize()
	for i, x := range c.Segments {
		own := appendLeaves(nil, data[:x.Size], leaf)
		c.Segments[i].Sum = root(own)
		c.leaves, data = append(c.leaves, own...), data[x.Size:]
	}
}

// checkProof checks the proof of a group of a segment, and returns the hashes of the group's leaves.
func checkProof(x SeedSegment, i, group, leaves int, proof []byte) ([]byte, error) {
	groups := proof[:groupsOf(leaves)*sha256.Size]
	own := proof[groupSums:][:min(groupLeaves, leaves-group*groupLeaves)*sha256.Size]
	if sum := sha256.Sum256(own); sha256.Sum256(groups) != x.Sum || [sha256.Size]byte(groups[group*sha256.Size:]) != sum {
		return nil, fmt.Errorf("seed: segment %d was announced as SHA-256 %x, which the hashes of its group %d do not have", i, x.Sum[:], group)
	}
	return own, nil
}
