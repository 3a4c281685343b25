// Package privilege gives up the rights of root for good. A daemon calls it once it has opened what only root may open, and before it reads the
// first byte that somebody else has sent.
package privilege
