package dataplane

import "sync"

// Exposer has the devices over which peers read memory of this process, and the thread that serves those on tcp. They are opened when they are first
// needed. Safe for concurrent use.
type Exposer struct {
	mu     sync.Mutex
	open   map[string]*Device
	server *Server
	users  sync.WaitGroup
	closed bool
}

// Get returns the device of a provider, and the server. The caller calls done after it has closed everything that it made with the device. ErrInvalid: the Exposer is closed.
func (x *Exposer) Get(provider string, o Options) (dev *Device, server *Server, done func(), err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return nil, nil, nil, &Error{Op: "expose memory", Status: StatusInvalid, Detail: "the session is closed"}
	}
	if dev = x.open[provider]; dev == nil {
		if dev, err = Open(provider, o); err != nil {
			return nil, nil, nil, err
		}
		if x.open == nil {
			x.open = map[string]*Device{}
		}
		x.open[provider] = dev
	}
	if provider == TCP && x.server == nil {
		if x.server, err = NewServer(); err != nil {
			return nil, nil, nil, err
		}
	}
	x.users.Add(1)
	return dev, x.server, x.users.Done, nil
}

// Close closes the devices when all users, whose contexts have ended, are done.
func (x *Exposer) Close() {
	x.mu.Lock()
	x.closed = true
	x.mu.Unlock()
	x.users.Wait()
	if x.server != nil {
		x.server.Close()
	}
	for _, dev := range x.open {
		dev.Close()
	}
	x.server, x.open = nil, nil
}
