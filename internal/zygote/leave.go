package zygote

import (
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/handover"
	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Leave prepares for a program that takes over this process (package handover). The spawner, its zygote and the workers with
// leases continue. Pooled workers are ended. No worker may be starting, suspended or being inspected. Afterwards only Worker.Save
// may be called. An error means that the spawner has ended.
func (z *Zygote) Leave() (*handover.Spawner, error) {
	z.cancel()
	z.tasks.Wait()
	z.pool.end()
	z.dropParts()
	z.leaving.Store(true)
	z.spawner.conn.SetReadDeadline(time.Unix(1, 0))
	<-z.received
	z.verdicts.Lock() // for ever: a later verdict would not be in the state
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.closed {
		return nil, errClosed
	}
	s := &handover.Spawner{Pid: int32(z.spawner.process.Pid), Version: z.cfg.Version, NextWorker: z.nextID.Load(), NextOpen: z.nextOpen,
		Zygote: int32(z.zygotes[0].pid), Devices: int32(z.devices), Parts: z.parts, Missing: z.missing}
	for i := range z.zygotes {
		s.Zygotes = append(s.Zygotes, &handover.Zygote{Runtime: z.zygotes[i].runtime, Pid: int32(z.zygotes[i].pid)})
	}
	z.spawner.lines.end()
	var err error
	if s.Socket, err = descriptor(z.spawner.conn); err == nil {
		s.Output, err = descriptor(z.spawner.output)
	}
	return s, err
}

// descriptor returns the descriptor of a connection or file.
func descriptor(f syscall.Conn) (n int32, err error) {
	err = wire.Control(f, func(fd int) error { n = int32(fd); return nil })
	return n, err
}

// end ends all pooled workers and waits until their processes and resources are gone.
func (p *pool) end() {
	p.mu.Lock()
	var all []*Worker
	for kind, list := range p.waiting {
		all = append(all, list...)
		p.waiting[kind] = nil
	}
	p.mu.Unlock()
	for _, w := range all {
		w.started()
		w.Kill()
	}
	for _, w := range all {
		<-w.done
	}
}

// Adopt continues with the spawner of the program that ran in this process before. Call Restore for each of its workers, then
// Resume. Config.Version and Config.Runtimes are ignored: the spawner keeps them until it is started anew.
func Adopt(cfg Config, s *handover.Spawner) (*Zygote, error) {
	if s.GetPid() < 1 || s.GetSocket() < 3 || s.GetOutput() < 3 {
		return nil, fmt.Errorf("adopt the spawner: process %d, descriptors %d and %d", s.GetPid(), s.GetSocket(), s.GetOutput())
	}
	cfg.Version = s.GetVersion()
	conn, err := wire.Conn(int(s.GetSocket()))
	if err != nil {
		return nil, fmt.Errorf("adopt the spawner: %w", err)
	}
	process, err := os.FindProcess(int(s.GetPid()))
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("adopt the spawner: %w", err)
	}
	c := &connection{process: process, conn: conn, lines: &lineLogger{log: cfg.Log}, reaped: make(chan struct{})}
	if err := unix.SetNonblock(int(s.GetOutput()), true); err != nil {
		conn.Close()
		return nil, fmt.Errorf("adopt the spawner: %w", err)
	}
	c.output = os.NewFile(uintptr(s.GetOutput()), "spawner output")
	c.watch()
	cfg.Runtimes = nil
	z := newZygote(cfg, c)
	z.nextID.Store(s.GetNextWorker())
	z.nextOpen = s.GetNextOpen()
	z.zygotes[0].pid, z.devices, z.parts, z.missing = int(s.GetZygote()), int(s.GetDevices()), s.GetParts(), s.GetMissing()
	for i, p := range s.GetZygotes() { // an earlier version saves only the first one
		if i > 0 {
			z.zygotes = append(z.zygotes, zygoteProcess{runtime: p.GetRuntime()})
		}
		z.zygotes[i].pid = int(p.GetPid())
	}
	return z, nil
}

// Resume starts to handle the messages of an adopted spawner. Close must follow it.
func (z *Zygote) Resume() { z.once.Do(z.begin) }

// Save returns a worker of a lease, after Leave. It stops reading the worker's output.
func (w *Worker) Save() (*handover.Worker, error) {
	w.z.mu.Lock()
	alive := w.z.workers[w.id] == w
	w.z.mu.Unlock()
	s := &handover.Worker{Id: w.id, Pid: int32(w.pid), Blob: w.blob, GroupMemory: w.memory, Pooled: w.steps.Pooled, Cached: w.steps.Cached,
		Steps:   []uint64{uint64(w.steps.Fork), uint64(w.steps.Sandbox), uint64(w.steps.Connect), uint64(w.steps.Code)},
		Stopped: w.stopped.Load(), Killed: w.killed.Load()}
	if b := w.before.Load(); b != nil {
		s.Before = []uint64{b.Calls, b.Refused, b.Failed, b.BytesIn, b.BytesOut}
	}
	if v := w.verdict.Load(); v != nil {
		s.Verdict, s.VerdictText = v.status, v.text
	}
	if !alive {
		<-w.done // its end has been received
		x := &w.exit
		s.OutputTail = w.output.bytes()
		s.Exit = &handover.Exit{Signal: int32(x.Signal), Code: int32(x.Code), Requested: x.Requested, Status: x.Status, Function: x.Function,
			Reason: x.Reason, Backtrace: x.Backtrace, Page: w.page.mem, CpuNs: w.used.Load()}
		return s, nil
	}
	w.output.leave()
	s.OutputTail = w.output.bytes()
	s.Output, s.Page = int32(w.output.pipe), int32(w.page.fd)
	layout, files := w.group.Files()
	s.GroupLayout = layout
	for _, f := range files {
		n, err := descriptor(f)
		if err != nil {
			return nil, err
		}
		s.GroupFiles = append(s.GroupFiles, n)
	}
	var err error
	s.Socket, err = descriptor(w.conn)
	return s, err
}

// leave stops reading. The pipe stays open.
func (o *output) leave() {
	o.ready.SetReadDeadline(time.Unix(1, 0))
	close(o.ending)
	<-o.done
}

// Restore returns a worker that Save has returned, with the spec of its lease. Call it before Resume.
func (z *Zygote) Restore(s *handover.Worker, spec *Spec) (*Worker, error) {
	w := z.newWorker(s.GetId(), s.GetGroupMemory())
	w.pid, w.blob, w.starting, w.began = int(s.GetPid()), s.GetBlob(), false, true
	steps := append(s.GetSteps(), 0, 0, 0, 0)
	w.steps = Steps{Fork: time.Duration(steps[0]), Sandbox: time.Duration(steps[1]), Connect: time.Duration(steps[2]), Code: time.Duration(steps[3]),
		Pooled: s.GetPooled(), Cached: s.GetCached()}
	w.serves.Store(spec)
	if b := s.GetBefore(); len(b) == 5 {
		w.before.Store(&Counters{Calls: b[0], Refused: b[1], Failed: b[2], BytesIn: b[3], BytesOut: b[4]})
		w.limit.before.Store(b[0])
	}
	w.stopped.Store(s.GetStopped())
	w.killed.Store(s.GetKilled())
	if s.GetVerdict() != 0 {
		w.verdict.Store(&verdict{s.GetVerdict(), s.GetVerdictText()})
	}
	if w.id == 0 || w.pid < 1 || z.workers[w.id] != nil {
		return nil, fmt.Errorf("restore worker %d: its id is 0 or used twice, or its process id is %d", w.id, w.pid)
	}
	if x := s.GetExit(); x != nil {
		return w, w.restoreEnded(s, x)
	}
	if err := w.restoreParts(s); err != nil {
		return nil, fmt.Errorf("restore worker %d: %w", w.id, err)
	}
	z.workers[w.id] = w
	go w.watch()
	if w.verdict.Load() != nil || w.killed.Load() { // the command may not have been sent
		w.command(wire.Kill)
	}
	w.startWatchdogs(spec)
	return w, nil
}

// restoreParts takes over the descriptors of a worker that runs.
func (w *Worker) restoreParts(s *handover.Worker) (err error) {
	if w.conn, err = wire.Conn(int(s.GetSocket())); err != nil {
		return err
	}
	if w.page, err = openPage(int(s.GetPage())); err != nil {
		return err
	}
	if w.output, err = openOutput(int(s.GetOutput()), s.GetOutputTail()); err != nil {
		return err
	}
	var files []*os.File
	for _, fd := range s.GetGroupFiles() {
		files = append(files, os.NewFile(uintptr(fd), "control group"))
	}
	w.group, err = sandbox.NewGroup(s.GetGroupLayout(), files, w.memory)
	return err
}

// restoreEnded completes a worker that had ended.
func (w *Worker) restoreEnded(s *handover.Worker, x *handover.Exit) error {
	if len(x.GetPage()) != pageSize {
		return fmt.Errorf("restore worker %d: a page of %d bytes", w.id, len(x.GetPage()))
	}
	w.page, w.output = &page{mem: x.GetPage(), fd: -1}, &output{}
	w.output.write(s.GetOutputTail())
	w.used.Store(x.GetCpuNs())
	w.exit = Exit{Signal: int(x.GetSignal()), Code: int(x.GetCode()), Requested: x.GetRequested(), Status: x.GetStatus(), Function: x.GetFunction(),
		Reason: x.GetReason(), Backtrace: x.GetBacktrace(), OutputTail: s.GetOutputTail(), Counters: w.Counters()}
	w.ended = true
	close(w.gone)
	close(w.done)
	return nil
}
