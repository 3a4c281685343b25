// Package systemd reports the state of a service to systemd.
package systemd

import (
	"fmt"
	"net"
	"os"
)

// Notify sends a state to systemd, as in sd_notify(3) ("READY=1", "STOPPING=1"). Without $NOTIFY_SOCKET it does
// nothing.
func Notify(state string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if path[0] == '@' {
		path = "\x00" + path[1:]
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(state)); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return nil
}
