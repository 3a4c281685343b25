package agent

import (
	"fmt"
	"net"
	"os"
)

// stranger is a process of another user.
func stranger() int {
	conn, err := net.Dial("unix", os.Getenv("RFAAS_TEST_SOCKET"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	n, err := conn.Read(make([]byte, 1))
	fmt.Println(n, err)
	return 0
}
