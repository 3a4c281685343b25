package zygote

import (
	"runtime"
	"sync"
)

// PDEATHSIG follows the thread, not the process: a zygote started from a thread that the Go runtime retires later would
// be killed for no reason. All starts of this process therefore happen on one OS thread that is never given back. It is
// also the parent of the workers, by CLONE_PARENT. One per process, kept for ever: hence the only globals here.
var (
	starterOnce sync.Once
	starter     chan func()
)

// onStarterThread calls fn on that thread and returns when fn did.
func onStarterThread(fn func()) {
	starterOnce.Do(func() {
		starter = make(chan func())
		go func() {
			runtime.LockOSThread()
			for f := range starter {
				f()
			}
		}()
	})
	done := make(chan struct{})
	starter <- func() {
		defer close(done)
		fn()
	}
	<-done
}
