package wire

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// All children of this process are started on one OS thread that never ends, because the kernel sends PDEATHSIG when the thread that
// started a child ends, and the Go runtime ends threads. In a program that hands over by execve it has to be the first thread of the
// process: execve ends all threads, and the one that calls it becomes the first one. This needs the only global variables here.
var (
	tasks   = make(chan func())
	claimed atomic.Bool // some thread takes the tasks
	started sync.Once
)

// BeStarter makes the calling goroutine's thread the one that starts children, until done is closed. The caller has locked the goroutine
// to the thread. It must be called before the first child is started.
func BeStarter(done <-chan struct{}) {
	if !claimed.CompareAndSwap(false, true) {
		panic("another thread starts the children of this process")
	}
	for {
		select {
		case f := <-tasks:
			f()
		case <-done:
			return
		}
	}
}

// takeTasks takes the tasks for ever.
func takeTasks() {
	runtime.LockOSThread()
	for f := range tasks {
		f()
	}
}

// OnStarterThread runs f on the thread that starts children, and returns after f.
func OnStarterThread(f func()) {
	started.Do(func() {
		if claimed.CompareAndSwap(false, true) {
			go takeTasks()
		}
	})
	done := make(chan struct{})
	tasks <- func() { defer close(done); f() }
	<-done
}
