package executor

import "os"

// stackRoom is about what starting a lease takes of a goroutine's stack, in bytes.
const stackRoom = 16 << 10

// deepen has the stack of a fresh goroutine grow at once, while it is nearly empty. Otherwise it does so step by step, and each step
// moves all frames that there are. worker/startup/startup.h has the gain.
//
//go:noinline
func deepen() byte {
	var room [stackRoom]byte
	return room[len(os.Args)&1]
}
