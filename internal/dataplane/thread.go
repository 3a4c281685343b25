package dataplane

import "runtime"

// thread runs functions, one at a time, on one thread of the operating system. Nil runs them on the caller's.
//
// soft-RoCE posts by a system call, which the kernel refuses to a thread with other credentials than the one that opened the device. When
// a process has given up root, its threads have equal credentials, but in separate kernel objects.
type thread struct{ work chan func() }

func startThread() *thread {
	t := &thread{make(chan func())}
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for f := range t.work {
			f()
		}
	}()
	return t
}

// do returns after f.
func (t *thread) do(f func()) {
	if t == nil {
		f()
		return
	}
	done := make(chan struct{})
	t.work <- func() { defer close(done); f() }
	<-done
}

// end must be called last.
func (t *thread) end() {
	if t != nil {
		close(t.work)
	}
}
