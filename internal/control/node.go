package control

import (
	"fmt"
	"os"
	"strings"
	"syscall"
)

// NodeID identifies where this process runs: the kernel's boot id and the inode of the network name space, joined
// by a slash. Equal on both sides means one kernel and one name space for sockets, which is what the shm
// provider needs. It says nothing about rights.
func NodeID() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("node identity: %w", err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat("/proc/self/ns/net", &st); err != nil {
		return "", fmt.Errorf("node identity: /proc/self/ns/net: %w", err)
	}
	return fmt.Sprintf("%s/%d", strings.TrimSpace(string(boot)), st.Ino), nil
}

// CheckLocal refuses an address that the resource manager names for an executor of another node, if it is loopback or a unix socket: whoever
// dials it reaches a process of its own node, without TLS. nodeID is the executor's, self is the NodeID of this process.
func CheckLocal(addr, nodeID, self string) error {
	a, err := ParseAddress(addr)
	if err != nil || !a.Local() || nodeID != "" && nodeID == self {
		return err
	}
	return fmt.Errorf("executor %s is of another node (%q, this one is %q): its address reaches only this node (set advertise on its node)", addr, nodeID, self)
}
