package zygote

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// The C side writes the same message by its structs, and says its constants.
const goldenProgram = `
#include <stdio.h>
#include <string.h>
#include "worker/message.h"
#include "worker/page.h"
#include "worker/sandbox.h"
static void dump(const void *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        printf("%02x", ((const unsigned char *)p)[i]);
    printf("\n");
}
int main(void) {
    struct { dp_msg_head head; dp_msg_spawn body; } m;
    memset(&m, 0, sizeof m);
    m.head = (dp_msg_head){DP_MSG_MAGIC, DP_WIRE_VERSION, DP_MSG_SPAWN, 0x01020304, sizeof m.body};
    m.body.provider = DP_PROVIDER_VERBS;
    m.body.wait_mode = DP_WAIT_WARM;
    m.body.port = 3;
    m.body.encrypt = 2;
    m.body.gid_index = -1;
    m.body.pkey_index = 0x1112;
    m.body.traffic_class = 106;
    m.body.service_level = 7;
    m.body.mtu = 4096;
    m.body.max_depth = 1000;
    m.body.max_eager = 0x12340;
    m.body.max_bulk = 0x1020304;
    m.body.memory_limit = 0x1122334455667788;
    m.body.n_functions = 2;
    m.body.blob_len = 5;
    m.body.uid = 0x00010203;
    m.body.gid = 0x00040506;
    m.body.processes = 77;
    m.body.channel_depth = 4;
    m.body.channel_eager = 0x10040;
    m.body.channel_bulk = 0x21222340;
    m.body.cpus[0] = 1 << 1;
    m.body.cpus[1] = 1 << 2;
    m.body.cpus[127] = 1 << 7;
    strcpy(m.body.device, "mlx5_0");
    memcpy(m.body.blob, "\1\2\3\4\5", 5);
    memcpy(m.body.bundle, "0123456789abcdef", DP_BUNDLE_ID);
    dump(&m, sizeof m);
    int constants[] = {DP_MSG_SPAWN, DP_MSG_SPAWNED, DP_MSG_SPAWN_FAILED, DP_MSG_LOADED, DP_MSG_FAILED,
        DP_MSG_STOP, DP_MSG_HELLO, DP_MSG_STARTED, DP_MSG_FINISH, DP_MSG_PREPARE, DP_MSG_PREPARED, DP_MSG_SUSPEND, DP_MSG_SUSPENDED, DP_MSG_RESUME, DP_MSG_INSPECT, DP_MSG_SYMBOLS,
        DP_MSG_INSPECTED, DP_MSG_SOCKET, DP_MSG_TABLE, DP_MSG_TABLED, DP_MSG_RESUMED, DP_TABLE_NAME - 1, DP_TABLES_MAX, DP_ELF_NAME_MAX, DP_ELF_NAMES_MAX, DP_ELF_FUNCTIONS_MAX, DP_ELF_OFFSETS_MAX, DP_ELF_LINE_MAX, DP_PREPARE_FDS, DP_LEASE_FDS,
        DP_SANDBOX_UID, DP_SANDBOX_PIDS,
        DP_SANDBOX_FILES, DP_SANDBOX_IPC, DP_SANDBOX_NET, DP_SANDBOX_PRIVS, DP_SANDBOX_SECCOMP, DP_SANDBOX_LANDLOCK, DP_SANDBOX_PATHS_MAX,
        DP_DEATH_BY_ITSELF, DP_MSG_MAX, DP_WIRE_VERSION, DP_CPUS_MAX, DP_FUNCTIONS_MAX, DP_NAMES_MAX,
        DP_CHANNEL_BLOB_MAX, DP_DEPTH_MAX, DP_EAGER_MAX, DP_SPAWN_FDS, DP_WAIT_ADAPTIVE, DP_WAIT_HOT, DP_WAIT_WARM, DP_INVALID,
        DP_BAD_BLOB, DP_BAD_LIBRARY, DP_WORKER_DIED, DP_FATAL, DP_EXIT_STOPPED, DP_EXIT_FAILED, DP_EXIT_CLIENT_GONE,
        DP_EXIT_PROTOCOL, DP_EXIT_FABRIC, DP_EXIT_ORPHAN, (int)(DP_BULK_MAX >> 10), DP_TIME_LIMIT, DP_MEMORY_LIMIT, DP_PROTOCOL,
        DP_PAGE_SIZE, offsetof(dp_worker_page, death), offsetof(dp_worker_death, text), sizeof((dp_worker_death *)0)->text,
        DP_DEATH_NOTED, DP_DEATH_TRACED, DP_DEATH_STACK_OVERFLOW, offsetof(dp_worker_page, phase), offsetof(dp_worker_page, client_gone), DP_PHASE_LEASED, DP_PHASE_LOADING, DP_PHASE_LOADED, offsetof(dp_worker_page, stats.calls), offsetof(dp_worker_page, stats.refused),
        offsetof(dp_worker_page, stats.failed), offsetof(dp_worker_page, stats.bytes_in),
        offsetof(dp_worker_page, stats.bytes_out), offsetof(dp_worker_death, text_len), offsetof(dp_worker_death, flags)};
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        printf("%d ", constants[i]);
    printf("\n");
    dp_msg_inspect inspect = {.memory_limit = 16 << 20, .cpu_seconds = 2, .n_offsets = 2, .offsets = {0x1122334455667788, 3}};
    dump(&inspect, offsetof(dp_msg_inspect, offsets) + 2 * sizeof *inspect.offsets);
    dp_msg_table table = {.size = 0x1122334455667788, .address = 0x200000001000, .name = "cross sections"};
    dump(&table, sizeof table);
    return 0;
}
`

var goldenSpec = Spec{
	Provider: "verbs", Device: "mlx5_0", Port: 3, GIDIndex: -1, PKeyIndex: 0x1112, TrafficClass: 106, ServiceLevel: 7,
	MTU: 4096, WaitMode: 2, CPUs: []int{1, 10, 1023}, Names: []string{"f", "g"}, ClientBlob: []byte{1, 2, 3, 4, 5},
	MaxDepth: 1000, MaxEager: 0x12340, MaxBulk: 0x1020304, MemoryLimit: 0x1122334455667788,
	Encrypt: 2, Channel: Channel{Depth: 4, Eager: 0x10040, Bulk: 0x21222340},
	Bundle: BundleID([]byte("0123456789abcdef")),
}

// goldenBytes is the beginning of that message as it has always been; the rest is blob and zeros.
const goldenBytes = "5246574b010001000403020130020000" + // head: magic, version, type, id, length
	"02020302ffffffff121100006a000000" + // provider, wait mode, port, encryption; GID index; P_Key index; traffic class
	"0700000000100000e803000040230100" + // service level; MTU; depth; eager
	"04030201000000008877665544332211" + // bulk; memory limit
	"0200000005000000" // functions; blob length

func TestMessagesMatchC(t *testing.T) {
	body, err := spawnBody(&goldenSpec)
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range []uint32{0x00010203, 0x00040506, 77} { // what the spawner fills in
		binary.LittleEndian.PutUint32(body[wire.SpawnUID+4*i:], n)
	}
	got := hex.EncodeToString((&wire.Message{Type: wire.Spawn, ID: 0x01020304, Body: body}).Encode())
	if !strings.HasPrefix(got, goldenBytes) {
		t.Errorf("message\n%s\ndoes not begin\n%s", got, goldenBytes)
	}
	source := writeSource(t, "golden", goldenProgram)
	out, err := exec.Command(compile(t, "golden", source)).Output()
	if err != nil {
		t.Fatal(err)
	}
	c, numbers, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	numbers, inspect, _ := strings.Cut(numbers, "\n")
	inspect, table, _ := strings.Cut(inspect, "\n")
	if got := hex.EncodeToString((&Table{Name: "cross sections", Size: 0x1122334455667788, Address: 0x200000001000}).tableBody()); table != got {
		t.Errorf("TABLE: C  %s\nGo %s", table, got)
	}
	if got := hex.EncodeToString(inspectBody([]uint64{0x1122334455667788, 3})); inspect != got {
		t.Errorf("INSPECT: C  %s\nGo %s", inspect, got)
	}
	if c != got {
		t.Errorf("C  %s\nGo %s", c, got)
	}
	want := []int{int(wire.Spawn), int(wire.Spawned), int(wire.SpawnFailed), int(wire.Loaded), int(wire.Failed),
		int(wire.Stop), int(wire.Hello), int(wire.Started), int(wire.Finish), int(wire.Prepare), int(wire.Prepared), int(wire.Suspend), int(wire.Suspended),
		int(wire.Resume), int(wire.Inspect), int(wire.Symbols), int(wire.Inspected), int(wire.Socket), int(wire.Table), int(wire.Tabled), int(wire.Resumed), TableName, MaxTables, inspectedNameMax, inspectedMax, functionsMax, offsetsMax, symbolLineMax, 3, 2,
		wire.PartUID, wire.PartPIDs, wire.PartFiles, wire.PartIPC, wire.PartNet,
		wire.PartPrivs, wire.PartSeccomp, wire.PartLandlock, maxSandboxPaths, byItself, wire.Max, wire.Version, cpusMax, functionsMax, namesMax, blobMax, depthMax,
		eagerMax, wire.SpawnFDs, 0, 1, 2, int(wire.StatusInvalid), int(wire.StatusBadBlob), int(wire.StatusBadLibrary), int(wire.StatusWorkerDied),
		int(wire.StatusFatal), exitStopped, exitFailed, exitClientGone, exitProtocol, exitFabric, exitOrphan, bulkMax >> 10,
		int(wire.StatusTimeLimit), int(wire.StatusMemoryLimit), int(wire.StatusProtocol), pageSize, pageDeath, deathText, textMax, deathNoted, deathTraced, overflowed, pagePhase, pageGone, phaseLeased, phaseLoading, phaseLoaded, 8, 16, 24, 32, 40, 32, 28}
	if got := strings.Fields(numbers); len(got) != len(want) {
		t.Fatalf("%d constants, want %d", len(got), len(want))
	} else {
		for i, v := range want {
			if got[i] != strconv.Itoa(v) {
				t.Errorf("constant %d: C %s, Go %d", i, got[i], v)
			}
		}
	}
}

func FuzzDecodeMessage(f *testing.F) {
	f.Add((&wire.Message{Type: wire.Failed, ID: 7, Body: []byte{0x38, 0xff, 0xff, 0xff, 'x'}}).Encode())
	f.Add((&wire.Message{Type: wire.Hello, ID: 0, Body: []byte{1, 0, 0, 0, 2, 0, 0, 0}}).Encode())
	f.Add([]byte("RFWK"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := wire.Decode(b)
		if err != nil {
			return
		}
		if !bytes.Equal(m.Encode(), b) {
			t.Errorf("%x does not come back", b)
		}
		e := m.Failure()
		if e.Status >= 0 {
			t.Errorf("failure with status %d", e.Status)
		}
		for _, r := range e.Text {
			if r < ' ' || r == 0x7f || r == utf8.RuneError {
				t.Errorf("the text has %#x: %q", r, e.Text)
			}
		}
		m.U32(0)
		m.U32(1)
	})
}

// rawZygote is a zygote without its supervisor, to be sent anything.
type rawZygote struct {
	t    *testing.T
	conn *net.UnixConn
	cmd  *exec.Cmd
}

func startRaw(t *testing.T) *rawZygote {
	t.Helper()
	ours, theirs, err := wire.SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	child := os.NewFile(uintptr(theirs), "child")
	r := &rawZygote{t, ours, exec.Command(workerPath(t), "zygote")}
	r.cmd.ExtraFiles = []*os.File{child}
	r.cmd.Stderr = os.Stderr
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	wire.OnStarterThread(func() { err = r.cmd.Start() })
	child.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close(); r.cmd.Wait() })
	m := r.recv()
	if m.Type != wire.Hello || m.U32(0) != wire.Version {
		t.Fatalf("greeting %+v", m)
	}
	said, err := exec.Command(workerPath(t), "--version").Output()
	_, version, _ := bytes.Cut(m.Body[12:], []byte{0})
	if want := fmt.Sprintf("rfaas-worker %s, wire version %d\n", version, wire.Version); len(version) == 0 || err != nil || string(said) != want {
		t.Fatalf("it greets with version %q, --version says %q (%v)", version, said, err)
	}
	return r
}

func (r *rawZygote) recv() *wire.Message {
	r.t.Helper()
	r.conn.SetReadDeadline(time.Now().Add(2 * time.Second))
	buf := make([]byte, wire.Max)
	n, err := r.conn.Read(buf)
	if err != nil {
		r.t.Fatal(err)
	}
	m, err := wire.Decode(buf[:n])
	if err != nil {
		r.t.Fatal(err)
	}
	return &m
}

func TestZygoteRefusesBadMessages(t *testing.T) {
	r := startRaw(t)
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	fd := int(null.Fd())
	spec := goldenSpec
	spec.Provider, spec.CPUs = "shm", nil
	body, err := spawnBody(&spec)
	if err != nil {
		t.Fatal(err)
	}
	good := (&wire.Message{Type: wire.Spawn, ID: 9, Body: body}).Encode()
	patch := func(at int, b ...byte) []byte {
		m := bytes.Clone(good)
		copy(m[at:], b)
		return m
	}
	word := func(v uint32) []byte { return binary.LittleEndian.AppendUint32(nil, v) }
	const B = wire.HeadSize
	before := openFDs(t, r.cmd.Process.Pid)
	for _, tc := range []struct {
		name string
		msg  []byte
		fds  int
		says string
	}{
		{"one byte", good[:1], 0, "1 bytes"},
		{"part of the head", good[:15], wire.SpawnFDs, "15 bytes"},
		{"head alone", good[:16], wire.SpawnFDs, "0 bytes"},
		{"truncated", good[:len(good)-1], wire.SpawnFDs, "559 bytes"},
		{"one byte too many", append(bytes.Clone(good), 0), wire.SpawnFDs, "561 bytes"},
		{"far too long", append(bytes.Clone(good), make([]byte, 8000)...), wire.SpawnFDs, "4096 bytes"},
		{"magic", patch(0, 'X'), wire.SpawnFDs, "0x4b574658"},
		{"version", patch(4, 2), wire.SpawnFDs, "version 2"},
		{"type", patch(6, 4), wire.SpawnFDs, "type 4"},
		{"announced length", patch(12, 1), wire.SpawnFDs, "513 announced"},
		{"no descriptors", good, 0, "0 descriptors"},
		{"four descriptors", good, 4, "4 descriptors"},
		{"16 descriptors", good, 16, "16 descriptors"},
		{"40 descriptors", good, 40, "16 descriptors"},
		{"provider 0", patch(B+0, 0), wire.SpawnFDs, "provider 0"},
		{"provider 5", patch(B+0, 5), wire.SpawnFDs, "provider 5"},
		{"wait mode", patch(B+1, 9), wire.SpawnFDs, "wait mode 9"},
		{"encryption", patch(B+3, 4), wire.SpawnFDs, "encryption 4"},
		{"GID index", patch(B+4, word(256)...), wire.SpawnFDs, "GID index 256"},
		{"P_Key index", patch(B+8, word(65536)...), wire.SpawnFDs, "P_Key index 65536"},
		{"traffic class", patch(B+12, word(256)...), wire.SpawnFDs, "traffic class 256"},
		{"service level", patch(B+16, word(16)...), wire.SpawnFDs, "service level 16"},
		{"MTU", patch(B+20, word(4097)...), wire.SpawnFDs, "MTU 4097"},
		{"depth", patch(B+24, word(1025)...), wire.SpawnFDs, "depth limit 1025"},
		{"eager", patch(B+28, word(1<<20)...), wire.SpawnFDs, "eager limit 1048576"},
		{"bulk", patch(B+36, word(2)...), wire.SpawnFDs, "bulk limit"},
		{"no functions", patch(B+48, word(0)...), wire.SpawnFDs, "function count 0"},
		{"many functions", patch(B+48, word(65537)...), wire.SpawnFDs, "function count 65537"},
		{"no blob", patch(B+52, word(0)...), wire.SpawnFDs, "blob length 0"},
		{"long blob", patch(B+52, word(257)...), wire.SpawnFDs, "blob length 257"},
		{"seed", patch(B+532, 1), wire.SpawnFDs, "only a prepared worker can take"},
		{"channel depth", patch(B+517, 0xff), wire.SpawnFDs, "channel depth 65284 not in 0..1024"},
		{"channel bulk size", patch(B+525, 0xff), wire.SpawnFDs, "channel bulk size"},
		{"channel eager size", patch(B+531, 0x7f), wire.SpawnFDs, "channel eager size"},
		{"bytes after the blob", patch(B+503, 1), wire.SpawnFDs, "after the end of the client's blob"},
		{"device without end", patch(B+184, bytes.Repeat([]byte{'x'}, 64)...), wire.SpawnFDs, "device name"},
		{"device with a control character", patch(B+184, '\n'), wire.SpawnFDs, "0xa"},
		{"bytes after the device", patch(B+184+20, 'x'), wire.SpawnFDs, "after the end of the device name"},
	} {
		var rights []byte
		if tc.fds > 0 {
			fds := make([]int, tc.fds)
			for i := range fds {
				fds[i] = fd
			}
			rights = unix.UnixRights(fds...)
		}
		if _, _, err := r.conn.WriteMsgUnix(tc.msg, rights, nil); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		m := r.recv()
		if m.Type != wire.SpawnFailed {
			t.Errorf("%s: answer of type %d", tc.name, m.Type)
			continue
		}
		e := m.Failure()
		if !strings.Contains(e.Text, tc.says) {
			t.Errorf("%s: %q does not say %q", tc.name, e.Text, tc.says)
		}
		if len(tc.msg) >= wire.HeadSize && tc.name != "magic" && m.ID != 9 {
			t.Errorf("%s: answer for worker %d", tc.name, m.ID)
		}
	}
	// It answers first and closes then.
	eventually(t, "zygote has closed what it received", func() bool {
		return openFDs(t, r.cmd.Process.Pid) == before
	})
}

func TestProgram(t *testing.T) {
	path := workerPath(t)
	for _, tc := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--version"}, 0, "wire version 1"},
		{[]string{"--help"}, 0, "usage"},
		{nil, 2, "usage"},
		{[]string{"fly"}, 2, `"fly"`},
		{[]string{"zygote"}, 2, "descriptor 3"},
		{[]string{"zygote", "x"}, 2, "usage"},
	} {
		cmd := exec.Command(path, tc.args...)
		out, _ := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != tc.code || !strings.Contains(string(out), tc.says) {
			t.Errorf("%q: exit %d, %q", tc.args, code, out)
		}
	}
}
