package control

import (
	"fmt"
	"os"
	"strings"
	"syscall"
)

// NodeID identifies the environment of this process: the kernel's boot id and the inode of the network namespace,
// joined by a slash. If two processes have the same NodeID, they share a kernel and a network namespace, which the shm
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

// CheckLocal returns an error if the resource manager names a loopback address or a unix socket for an executor on
// another node: a client that dialled it would reach a process on its own node, without TLS. nodeID is the executor's,
// self is the NodeID of this process.
func CheckLocal(addr, nodeID, self string) error {
	a, err := ParseAddress(addr)
	if err != nil || !a.Local() || nodeID != "" && nodeID == self {
		return err
	}
	return fmt.Errorf("executor %s is on another node (%q, this one is %q), and its address only works on its own node (set advertise on that node)", addr, nodeID, self)
}
