package wire

import (
	"runtime"
	"sync"
)

// PDEATHSIG is sent when the thread that started a child ends, and the Go runtime ends threads. All children of this process
// are therefore started on one OS thread that never ends. This needs the only global variable here.
var starter = sync.OnceValue(func() chan func() {
	c := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range c {
			f()
		}
	}()
	return c
})

// OnStarterThread runs f on that thread and returns when f has.
func OnStarterThread(f func()) {
	done := make(chan struct{})
	starter() <- func() { defer close(done); f() }
	<-done
}
