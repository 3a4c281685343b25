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
