package zygote

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// pooledZygote keeps n workers waiting for shm leases.
func pooledZygote(t *testing.T, n int) *Zygote {
	t.Helper()
	z := startZygote(t)
	if err := z.KeepPool(n, Spec{Provider: "shm", GIDIndex: -1}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "workers wait", func() bool { return z.Waiting() == n })
	return z
}

// A lease takes a worker that waits, which then is what any other worker is; another one takes its place.
func TestPooled(t *testing.T) {
	z := pooledZygote(t, 2)
	c := startClient(t)
	w := lease(t, z, c, func(s *Spec) { s.CPUs = []int{1} })
	if !w.Steps().Pooled || w.Steps().Fork <= 0 || w.Steps().Connect <= 0 || w.Steps().Code <= 0 {
		t.Errorf("steps %+v, want those of a pooled start", w.Steps())
	}
	if got := w.mustCall(t, fnEcho, []byte("hello")); string(got) != "hello" {
		t.Errorf("echo: %q", got)
	}
	around := w.mustCall(t, fnSurroundings, nil)
	if around[0] != 2 {
		t.Errorf("CPU mask %#x, want 0x2", around[0])
	}
	if around[24] > 16 {
		t.Errorf("%d open descriptors", around[24])
	}
	eventually(t, "the next ones wait", func() bool { return z.Waiting() == 2 })
	if err := w.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if e := w.Exit(); e.Reason != "stopped" {
		t.Errorf("exit %+v", e)
	}
	// What was asked for with other settings of the device is another kind.
	spec, channel := c.spec(t, sealedFile(t, testLibrary(t)))
	spec.ServiceLevel = 1
	other, err := z.Spawn(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if other.Steps().Pooled {
		t.Error("a worker for another device was taken")
	}
	if err := c.connect(other, channel); err != nil {
		t.Fatal(err)
	}
	other.Kill()
	<-other.Done()
	c.end()
	z.Close()
	if n := children(t, os.Getpid()); n != 0 {
		t.Errorf("%d children after Close", n)
	}
}

// More leases than workers wait are served too, and a start that fails leaves nothing, as without a pool.
func TestPoolRunsOut(t *testing.T) {
	z := pooledZygote(t, 1)
	c := startClient(t)
	warm := 0
	for i := range 6 {
		w := lease(t, z, c, nil)
		if w.Steps().Pooled {
			warm++
		}
		w.mustCall(t, fnEcho, []byte{byte(i)})
		spec, _ := c.spec(t, sealed(t, []byte("\x7fELF but no library")))
		if _, err := z.Spawn(t.Context(), spec); err == nil {
			t.Fatal("nonsense was loaded")
		}
	}
	t.Logf("%d of 6 leases got a worker that waited", warm)
	eventually(t, "the pool is full again", func() bool { return z.Waiting() == 1 })
	eventually(t, "nothing else is left", func() bool { return z.started(t) == 1+6+1 }) // zygote, workers
}

// Workers that die while they wait are replaced, and no lease fails because of it. Workers of a dead zygote still serve.
func TestPooledWorkersDie(t *testing.T) {
	z := pooledZygote(t, 2)
	waiting := func() (list []*Worker) {
		z.pool.mu.Lock()
		defer z.pool.mu.Unlock()
		for _, l := range z.pool.waiting {
			list = append(list, l...)
		}
		return list
	}
	c := startClient(t)
	killed := map[*Worker]bool{}
	for range 5 {
		for _, w := range waiting() {
			killed[w] = true
			unix.Kill(w.PID(), unix.SIGKILL)
		}
		lease(t, z, c, nil).mustCall(t, fnEcho, []byte("x")) // at once: perhaps they are not missed yet
	}
	var before []*Worker
	eventually(t, "others wait", func() bool {
		before = waiting()
		return len(before) == 2 && !killed[before[0]] && !killed[before[1]]
	})
	unix.Kill(current(t, z), unix.SIGKILL)
	w := lease(t, z, c, nil)
	if w.PID() != before[0].PID() || !w.Steps().Pooled {
		t.Errorf("worker %d (%+v), want %d, which had waited", w.PID(), w.Steps(), before[0].PID())
	}
	w.mustCall(t, fnEcho, []byte("y"))
}

func TestKeepPoolRefuses(t *testing.T) {
	z := startZygote(t)
	for _, s := range []Spec{{}, {Provider: "pigeon"}, {Provider: "shm", MTU: -1}, {Provider: "verbs", Device: "a b"}} {
		if err := z.KeepPool(1, s); err == nil {
			t.Errorf("%+v was taken", s)
		}
	}
}

// A worker that waited seals itself before its client has answered: if no answer comes, it still says what was wrong.
func TestPooledWorkerWhosePeerFails(t *testing.T) {
	for name, peer := range map[string]func(net.Conn){
		"is silent": func(net.Conn) {},
		"hangs up":  func(c net.Conn) { c.Close() },
		"talks nonsense": func(c net.Conn) {
			_, _ = c.Write(make([]byte, 312))
		},
	} {
		t.Run(name, func(t *testing.T) {
			z := pooledZygote(t, 1)
			c := startClient(t)
			spec, _ := c.spec(t, sealedFile(t, testLibrary(t)))
			ended := misdirect(t, spec.ClientBlob, peer)
			defer ended()
			_, err := z.Spawn(t.Context(), spec)
			var we *WorkerError
			if !errors.As(err, &we) || !strings.Contains(err.Error(), "exchange with the shm peer") {
				t.Errorf("%v, want what the worker says of its peer", err)
			}
			eventually(t, "the next one waits", func() bool { return z.Waiting() == 1 })
			lease(t, z, c, nil).mustCall(t, fnEcho, []byte("x"))
		})
	}
}

// misdirect changes a client's blob so that its worker meets peer, which takes the first connection. end closes the
// listener and that connection.
func misdirect(t *testing.T, blob []byte, peer func(net.Conn)) (end func()) {
	t.Helper()
	const crcAt, nameAt = 52, 56 + 32 // dp_wire.h, dp_shm_link.c
	for i := range 16 {
		blob[nameAt+i] ^= 0xff
	}
	clear(blob[crcAt : crcAt+4])
	binary.LittleEndian.PutUint32(blob[crcAt:], crc32.Checksum(blob, crc32.MakeTable(crc32.Castagnoli)))
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: fmt.Sprintf("@rfaas-shm-%x", blob[nameAt:nameAt+16]), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	met := make(chan net.Conn, 1)
	go func() {
		defer close(met)
		if c, err := l.Accept(); err == nil {
			peer(c)
			met <- c
		}
	}()
	return func() {
		l.Close()
		c, ok := <-met
		if !ok {
			t.Error("no connection came")
			return
		}
		c.Close()
	}
}

// What a lease may have of memory is the same whether its channel was made ahead, is made for it, or its worker is.
func TestMemoryOfAPooledWorker(t *testing.T) {
	for name, kind := range map[string]*Spec{
		"channel made ahead": {Provider: "shm", GIDIndex: -1, MaxDepth: 4, MaxEager: 4096, MaxBulk: 1 << 20}, // as testdata/client.c offers
		"another was":        {Provider: "shm", GIDIndex: -1, MaxDepth: 4, MaxEager: 4096, MaxBulk: 64 << 10},
		"cold":               nil,
	} {
		t.Run(name, func(t *testing.T) {
			z := startZygote(t)
			if kind != nil {
				if err := z.KeepPool(1, *kind); err != nil {
					t.Fatal(err)
				}
				eventually(t, "a worker waits", func() bool { return z.Waiting() == 1 })
			}
			w := lease(t, z, startClient(t), func(s *Spec) { s.MemoryLimit = 3 << 20 })
			if w.Steps().Pooled != (kind != nil) {
				t.Errorf("steps %+v", w.Steps())
			}
			w.mustCall(t, fnAllocates, u64(5<<19))
			if r, err := w.call(fnAllocates, u64(13<<18)); err != nil || r.status != -400 {
				t.Errorf("beyond the limit: %d %q %v", r.status, r.data, err)
			}
		})
	}
}

// A worker whose client's memory cannot be mapped has its lease by then. It ends and says why.
func TestPooledWorkerWhosePeersMemoryIsWrong(t *testing.T) {
	z := pooledZygote(t, 1)
	c := startClient(t)
	spec, _ := c.spec(t, sealedFile(t, testLibrary(t)))
	ended := misdirect(t, spec.ClientBlob, answerWithPipes)
	defer ended()
	w, err := z.Spawn(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	within(t, "the worker ends", w.Done())
	if x := w.Exit(); x.Code != exitFailed || !strings.Contains(x.Reason, "map the peer's receive ring") {
		t.Errorf("exit %+v, want what could not be mapped", x)
	}
}

// answerWithPipes repeats a worker's hello with descriptors that are not memory.
func answerWithPipes(c net.Conn) {
	u := c.(*net.UnixConn)
	hello, rights := make([]byte, 4096), make([]byte, 256)
	n, rn, _, _, err := u.ReadMsgUnix(hello, rights)
	if err != nil {
		return
	}
	list, err := unix.ParseSocketControlMessage(rights[:rn])
	if err != nil || len(list) != 1 {
		return
	}
	fds, err := unix.ParseUnixRights(&list[0])
	if err != nil {
		return
	}
	for i, fd := range fds {
		unix.Close(fd)
		if fds[i], err = unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
			return
		}
		defer unix.Close(fds[i])
	}
	const toAt, fromAt = 24, 40 // shm_hello
	to, from := [16]byte(hello[toAt:]), [16]byte(hello[fromAt:])
	copy(hello[toAt:], from[:])
	copy(hello[fromAt:], to[:])
	_, _, _ = u.WriteMsgUnix(hello[:n], unix.UnixRights(fds...), nil)
}

// A worker that was prepared with another setting of encryption refuses the lease. The pool never offers it, so the test exchanges kinds.
func TestPooledWorkerOfAnotherEncryption(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	wanted, _ := c.spec(t, sealedFile(t, testLibrary(t)))
	wanted.Provider, wanted.Device = "tcp", "127.0.0.1:1"
	var log bytes.Buffer
	z.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	for _, encrypt := range [][2]int{{0, 3}, {3, 0}} { // off, require
		prepared := wanted
		prepared.Encrypt, wanted.Encrypt = encrypt[0], encrypt[1]
		kind, err := deviceBody(&wanted)
		if err != nil {
			t.Fatal(err)
		}
		body, err := prepareBody(&prepared)
		if err != nil {
			t.Fatal(err)
		}
		w, err := z.spawn(t.Context(), &prepared, body, nil)
		if err != nil {
			t.Fatal(err)
		}
		z.pool.add(string(kind), w)
		log.Reset()
		_, err = z.Spawn(t.Context(), wanted) // then tries a new worker, to which the client's channel on shm does not suit
		if err == nil || !strings.Contains(log.String(), "prepared for provider 3") {
			t.Errorf("prepared with encryption %d, leased with %d: %v; the log: %s", encrypt[0], encrypt[1], err, log.String())
		}
	}
}
