package wire

import (
	"runtime"
	"sync"
)

// starter is the OS thread on which all children of this process are started. It never ends, because the kernel sends PDEATHSIG
// when the thread that started a child ends, and the Go runtime ends threads. This needs the only global variable here.
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

// OnStarterThread runs f on the thread that starts children, and returns after f.
func OnStarterThread(f func()) {
	done := make(chan struct{})
	starter() <- func() { defer close(done); f() }
	<-done
}
