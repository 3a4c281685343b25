package executor

import (
	"log/slog"
	"time"
)

// noticeBefore is how long before the end of the event stream a worker may have noticed the end of the client. An earlier notice was of
// a connection that broke while the client was alive.
const noticeBefore = 5 * time.Second

// lookEvery is how often the executor checks whether the workers of an absent client are still connected to its process.
const lookEvery = 50 * time.Millisecond

// away records that a lease's event stream has ended. The lease then waits for its client or the client's next agent: for
// agent-grace while a worker is connected to the client's process, else for client-return.
func (e *Executor) away(h *holding, presence uint64) {
	h.mu.Lock()
	h.away = time.Now()
	h.mu.Unlock()
	connected := h.connected()
	if e.table.Away(h.id, presence, connected) && connected {
		go e.watchConnected(h, presence)
	}
}

// watchConnected shortens the wait for an absent client as soon as no worker is connected to its process. It returns then, when the
// client is back, or when the lease has ended.
func (e *Executor) watchConnected(h *holding, presence uint64) {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for first := true; ; first = false {
		select {
		case <-h.gone:
			return
		case <-look.C:
		}
		if !h.isAway(presence) {
			return
		}
		if !h.connected() {
			e.table.Disconnected(h.id) // changes nothing if the client has just come back
			return
		}
		if first { // a release ends the stream too, a moment before the lease
			e.tell(h, slog.LevelInfo, "the client's event stream has ended: waiting for its next agent while a worker is connected to the client", "lease", uint64(h.id), "at-most", e.cfg.Settings.AgentGrace)
		}
	}
}

// isAway reports whether no newer stream has opened and the lease is not ending.
func (h *holding) isAway(presence uint64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.presence == presence && !h.ending
}

// connected reports whether the client's process may be alive: at least one worker is, and no worker has noticed the end of the process.
// An idle worker exits when it notices the end. On verbs, a worker that is running a function cannot notice it.
func (h *holding) connected() (alive bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.seats {
		s := &h.seats[i]
		switch {
		case s.worker == nil:
		case s.dead && h.noticed(s), !s.dead && s.worker.ClientGone():
			return false
		case !s.dead:
			alive = true
		}
	}
	return alive
}

// noticed reports whether the dead worker of a seat ended because the client had, and about when the event stream ended. The caller holds mu.
func (h *holding) noticed(s *seat) bool {
	x := s.worker.Exit()
	return x.Code == exitClientGone && x.Signal == 0 && x.Function == "" && s.died.After(h.away.Add(-noticeBefore))
}
