package main

/*
#include <stdlib.h>

#include "signals.h"
*/
import "C"

import (
	"context"
	"io"
	"os"
	"syscall"
	"time"
	"unsafe"
)

// repeat is how long further SIGTERMs count as the first one, because batch systems send it to every process of a job, and in more
// than one way.
const repeat = time.Second

// signals are what this process is asked to do by SIGTERM, SIGINT and SIGUSR2.
type signals struct {
	first, second       context.Context // end with the first SIGTERM or SIGINT, and with a later one
	endFirst, endSecond context.CancelFunc
	handover            chan os.Signal // receives SIGUSR2
	pipe                *os.File       // see signals.c
	stopped             chan struct{}  // closed when no more signals are read
}

// newSignals returns signals that come by a pipe, which must not block. With ending, the program that this one takes over from has received a
// first SIGTERM or SIGINT.
func newSignals(pipe *os.File, ending bool) *signals {
	s := &signals{handover: make(chan os.Signal, 1), pipe: pipe, stopped: make(chan struct{})}
	s.first, s.endFirst = context.WithCancel(context.Background())
	s.second, s.endSecond = context.WithCancel(context.Background())
	if ending {
		s.endFirst()
	}
	return s
}

// ownPipe is the pipe of this process.
func ownPipe() *os.File { return os.NewFile(uintptr(C.executor_signals), "signals") }

// receive starts to receive the signals that an earlier program has not read, and then those of this process. A SIGINT that comes after both
// contexts have ended calls exit.
func receive(earlier int, ending bool, exit func()) *signals {
	s := newSignals(ownPipe(), ending)
	from := io.Reader(s.pipe)
	if earlier > 0 {
		from = io.MultiReader(os.NewFile(uintptr(earlier), "earlier signals"), s.pipe) // execve has closed the other end
	}
	go s.read(from, exit)
	return s
}

// stop stops reading, and returns the pipe's descriptor. Signals that were read have had their effect then, and the others are in the pipe.
func (s *signals) stop() int {
	_ = s.pipe.SetReadDeadline(time.Unix(1, 0)) // fails only for files that cannot be waited for
	<-s.stopped
	return int(s.pipe.Fd())
}

// read acts on the signals until stop is called.
func (s *signals) read(from io.Reader, exit func()) {
	defer close(s.stopped)
	began := time.Now() // of the end: about when the first signal came
	for {
		var b [1]byte
		if _, err := from.Read(b[:]); err != nil {
			return
		}
		switch sig := syscall.Signal(b[0]); {
		case sig == syscall.SIGUSR2:
			select {
			case s.handover <- sig:
			default: // one is waiting
			}
		case s.first.Err() == nil:
			began = time.Now()
			s.endFirst()
		case s.second.Err() != nil && sig == syscall.SIGINT:
			exit()
		case sig == syscall.SIGINT || time.Since(began) >= repeat:
			s.endSecond()
		}
	}
}

// replace is syscall.Exec, but the new program gets all signals that come meanwhile: by the pipe of this program, or because they are pending.
func replace(path string, args, environ []string) error {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	argv, freeArgs := cStrings(args)
	defer freeArgs()
	envp, freeEnviron := cStrings(environ)
	defer freeEnviron()
	return syscall.Errno(C.executor_replace(name, argv, envp))
}

// cStrings returns a list that ends with a null pointer, and a function that frees it.
func cStrings(list []string) (first **C.char, free func()) {
	first = (**C.char)(C.calloc(C.size_t(len(list)+1), C.size_t(unsafe.Sizeof(*first))))
	to := unsafe.Slice(first, len(list))
	for i, s := range list {
		to[i] = C.CString(s)
	}
	return first, func() {
		for _, s := range to {
			C.free(unsafe.Pointer(s))
		}
		C.free(unsafe.Pointer(first))
	}
}
