package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/cli/command"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/agenttest"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
)

func TestMain(m *testing.M) {
	if os.Getenv("CLI_TEST_RUN") != "" { // be the program: TestBench
		os.Exit(Run(context.Background(), Env{Version: "test", Getenv: os.Getenv, Stdout: os.Stdout, Stderr: os.Stderr}, os.Args[1:]))
	}
	os.Exit(agenttest.Run("../..", func() int { return leakcheck.Run(m, nil, leakcheck.Objects(dataplane.Live)) }))
}

// stub is an executor and a manager with fixed answers.
type stub struct {
	control.UnimplementedExecutorServer
	control.UnimplementedManagerServer
	got   bytes.Buffer
	ahead atomic.Int64 // of the manager's clock, in ms
	data  atomic.Value // string: address of the data port; not set: none
	empty atomic.Int64 // calls of List that find nobody, before the others
	asked atomic.Int64 // calls of List
	only  []string     // if set, the addresses of the living executors that List returns

	secret string // its file
}

func (s *stub) info() *control.InfoReply {
	data, _ := s.data.Load().(string)
	node, _ := control.NodeID()
	return &control.InfoReply{DataAddress: data, Incarnation: []byte("this executor"), NodeId: node}
}

func (s *stub) Info(context.Context, *control.InfoRequest) (*control.InfoReply, error) {
	return s.info(), nil
}

func (s *stub) Upload(st grpc.ClientStreamingServer[control.UploadChunk, control.UploadReply]) error {
	for {
		c, err := st.Recv()
		if err != nil {
			break
		}
		if string(c.GetData()) == "bad" {
			return control.Errorf(control.ClassInvalid, "not an ELF file")
		}
		s.got.Write(c.GetData())
	}
	return st.SendAndClose(&control.UploadReply{Functions: []string{"alpha", "beta"}})
}

func (*stub) Leases(context.Context, *control.LeasesRequest) (*control.LeasesReply, error) {
	return &control.LeasesReply{Leases: []*control.LeaseEntry{{LeaseId: 1<<63 + 1, Tenant: "alice", State: "active", Workers: 2, WorkersWanted: 4,
		Cpus: []uint32{2, 3, 10, 11}, MemoryBytes: 2 << 30, AgeMs: 61_000, LeftMs: 3_539_400}}}, nil
}

func (s *stub) Revoke(_ context.Context, r *control.RevokeRequest) (*control.RevokeReply, error) {
	if r.GetLeaseId() == 7 {
		return nil, control.Errorf(control.ClassLease, "lease 7: unknown lease")
	}
	fmt.Fprintf(&s.got, "revoke %d %s", r.GetLeaseId(), r.GetReason())
	return &control.RevokeReply{}, nil
}

func (s *stub) Drain(_ context.Context, r *control.DrainRequest) (*control.DrainReply, error) {
	fmt.Fprintf(&s.got, "drain %d %s", r.GetGraceMs(), r.GetReason())
	return &control.DrainReply{}, nil
}

func (s *stub) List(context.Context, *control.ListRequest) (*control.ListReply, error) {
	s.asked.Add(1)
	if s.empty.Add(-1) >= 0 {
		return &control.ListReply{}, nil
	}
	if s.only != nil {
		r := &control.ListReply{Executors: []*control.ExecutorEntry{{Address: "d:1", Info: &control.InfoReply{Node: "n4"}}}}
		for _, address := range s.only {
			here, _ := control.NodeID()
			r.Executors = append(r.Executors, &control.ExecutorEntry{Address: address, Alive: true, Info: &control.InfoReply{Node: "n1", NodeId: here, Cores: 1}})
		}
		return r, nil
	}
	r := &control.ListReply{NowMs: uint64(time.Now().UnixMilli() + s.ahead.Load()), Executors: []*control.ExecutorEntry{
		{Address: "a:1", Alive: true, AgeMs: 300, Info: &control.InfoReply{Node: "n1", Cores: 4, FreeCores: 4, MemoryBytes: 3 << 30, FreeMemoryBytes: 1 << 30, Providers: []string{"shm", "verbs"}}},
		{Address: "b:1", Alive: true, Info: &control.InfoReply{Node: "n2", Cores: 4, FreeCores: 1, NeighbourSlowdown: 1012, AvailableUntil: uint64(time.Now().Add(time.Minute).Unix())}},
		{Address: "c:1", Alive: true, Info: &control.InfoReply{Node: "n3", Cores: 4, FreeCores: 1, Draining: true}},
		{Address: "d:1", Info: &control.InfoReply{Node: "n4"}},
	}}
	if s.data.Load() != nil {
		r.Executors = append(r.Executors, &control.ExecutorEntry{Address: "127.0.0.2:1", Alive: true, Info: s.info()})
	}
	return r, nil
}

// world is a daemon and the environment of a user.
func world(t *testing.T) (*stub, *control.Port, func(args ...string) (code int, stdout, stderr string)) {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	p, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	s := &stub{secret: secret}
	control.RegisterExecutorServer(p.Server, s)
	control.RegisterManagerServer(p.Server, s)
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(context.Background()) })
	env := map[string]string{"RFAAS_SECRET_FILE": secret, "RFAAS_EXECUTOR": p.Address, "RFAAS_MANAGER": p.Address}
	return s, p, func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		code := Run(t.Context(), Env{Version: "v1", Getenv: func(k string) string { return env[k] }, Stdout: &out, Stderr: &errs}, args)
		return code, out.String(), errs.String()
	}
}

// Plain text is permitted by the environment as by the flag.
func TestAllowPlaintextByEnvironment(t *testing.T) {
	for value, want := range map[string]bool{"": false, "0": false, "1": true, "true": true, "nonsense": false} {
		a := &app{Program: command.Program{Env: command.Env{Getenv: func(k string) string { return map[string]string{"RFAAS_ALLOW_PLAINTEXT": value}[k] }}}}
		if newRoot(a); a.allowPlaintext != want {
			t.Errorf("RFAAS_ALLOW_PLAINTEXT=%q: %v, want %v", value, a.allowPlaintext, want)
		}
	}
}

func TestExitCodes(t *testing.T) {
	_, _, run := world(t)
	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"version"}, 0, "rfaas v1"},
		{[]string{"--help"}, 0, "executors"},
		{[]string{}, 0, "executors"}, // not nil: cobra would take this program's own
		{[]string{"nonsense"}, 2, `"nonsense"`},
		{[]string{"version", "--nonsense"}, 2, "--nonsense"},
		{[]string{"version", "x"}, 2, `"x"`},
		{[]string{"deploy"}, 2, "accepts 1 arg(s), received 0\nusage: rfaas deploy LIBRARY.so [flags]\nrfaas deploy --help tells more\n"},
		{[]string{"slurm", "nonsense"}, 2, "rfaas: unknown command \"nonsense\" for \"rfaas slurm\"\nrfaas slurm --help tells more\n"},
		{[]string{"slurm"}, 0, "rfaas slurm [command]"},
		{[]string{"deploy", "/nonexistent.so"}, 1, "/nonexistent.so"},
		{[]string{"deploy", "/"}, 1, "not a regular file"},
		{[]string{"executors", "--manager", "nowhere"}, 1, `"nowhere"`},
		{[]string{"executors", "--manager", "192.0.2.1:5"}, 1, "--allow-plaintext"},
		{[]string{"executors", "--secret-file", "/nonexistent/secret"}, 1, "start a daemon as this user"},
		{[]string{"executors", "--manager", "unix:/nonexistent/socket"}, 1, "/nonexistent/socket"},
	} {
		code, out, errs := run(c.args...)
		if code != c.code || !strings.Contains(out+errs, c.text) || (code != 0) != (errs != "") || strings.Contains(errs, "rpc error") {
			t.Errorf("%q: code %d, output %q, errors %q; want %d and %q", c.args, code, out, errs, c.code, c.text)
		}
	}
}

func TestExecutors(t *testing.T) {
	_, _, run := world(t)
	code, out, errs := run("executors")
	for _, want := range []string{"ADDRESS", "a:1      n1    idle      4/4         1GiB/3GiB    0       -         shm,verbs  -         300ms ago", "busy", "1.2%", "draining", "silent"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s%s", want, out, errs)
		}
	}
	table := out
	_, out, _ = run("executors", "--json")
	var rows []executorRow
	if err := json.Unmarshal([]byte(out), &rows); err != nil || len(rows) != 4 || rows[0].FreeCores != 4 || rows[3].State != "silent" {
		t.Errorf("%v, %v", rows, err)
	}
	if until := time.Unix(int64(rows[1].Until), 0); time.Until(until) < 50*time.Second || !strings.Contains(table, until.Format(time.TimeOnly)) {
		t.Errorf("available until %v, in\n%s", until, table)
	}
}

func TestLeases(t *testing.T) {
	_, p, run := world(t)
	code, out, errs := run("leases", "--executor", p.Address)
	if code != 0 || !strings.Contains(out, "9223372036854775809  alice   active  2 of 4   2-3,10-11  2GiB    1m1s  58m59s  -") {
		t.Errorf("code %d, output\n%s%s", code, out, errs)
	}
	code, out, _ = run("leases", "--executor", p.Address, "--json")
	var rows []leaseRow
	if err := json.Unmarshal([]byte(out), &rows); code != 0 || err != nil || len(rows) != 1 || rows[0].ID != "9223372036854775809" {
		t.Errorf("%v, %v", rows, err)
	}
}

// With --all, executors that cannot be asked are named, and the leases of the others are listed or revoked.
func TestLeasesOfAllExecutors(t *testing.T) {
	s, p, run := world(t)
	const unreachable = "127.0.0.1:1"
	for _, c := range []struct {
		only   []string
		args   string
		code   int
		got    string
		out    string
		errors []string
	}{
		{[]string{p.Address}, "leases --all", 0, "", p.Address + "  9223372036854775809  alice", []string{"d:1 is silent"}},
		{[]string{p.Address, unreachable}, "leases --all", 1, "", p.Address + "  9223372036854775809  alice", []string{"d:1 is silent", unreachable}},
		{[]string{p.Address, unreachable}, "leases --all --json", 1, "", `"executor": "` + p.Address, []string{unreachable}},
		{[]string{unreachable}, "leases --all", 1, "", "", []string{unreachable}},
		{[]string{}, "leases --all --json", 0, "", "[]\n", nil},
		{[]string{p.Address}, "leases --tenant bob", 0, "", "no leases\n", nil},
		{[]string{p.Address, unreachable}, "revoke --tenant alice --all", 1, "revoke 9223372036854775809 ", "leases of alice revoked on " + p.Address + ": 1\n",
			[]string{"d:1 is silent: no lease on it was revoked", unreachable}},
		{[]string{p.Address, unreachable}, "revoke 7 --all", 1, "", "", []string{"lease 7: unknown to the executors that answer (1)", unreachable}},
		{[]string{p.Address}, "revoke --tenant bob --all", 1, "", "", []string{"d:1 is silent"}},
	} {
		s.only = c.only
		s.got.Reset()
		code, out, errs := run(strings.Fields(c.args)...)
		if code != c.code || s.got.String() != c.got || !strings.Contains(out, c.out) || c.out == "" && out != "" ||
			slices.ContainsFunc(c.errors, func(e string) bool { return !strings.Contains(errs, e) }) {
			t.Errorf("%s with %v: code %d, asked %q, said\n%s%s", c.args, c.only, code, s.got.String(), out, errs)
		}
	}
}

// Which daemon rfaas leases and revoke ask: flags win over the environment, and there the resource manager wins, as in client programs.
func TestLeasesAddress(t *testing.T) {
	const bad = "127.0.0.1:1"
	for _, c := range []struct {
		env  string // values of RFAAS_MANAGER and RFAAS_EXECUTOR. D: the address of the daemon, which is both
		args string
		code int
		text string
	}{
		{"D -", "leases", 0, "D  9223372036854775809  alice"},
		{"D " + bad, "leases", 0, "D  9223372036854775809  alice"},
		{"- D", "leases", 0, "\n9223372036854775809  alice"},
		{bad + " -", "leases", 1, "resource manager at " + bad},
		{bad + " D", "leases", 1, "resource manager at " + bad},
		{bad + " " + bad, "leases --executor D", 0, "\n9223372036854775809  alice"},
		{bad + " " + bad, "leases --manager D", 0, "D  9223372036854775809  alice"},
		{"- D", "leases --executor D --manager D", 2, "--executor and --manager: want one"},
		{"D -", "revoke 16", 0, ""},
		{"D -", "revoke 7", 1, "lease 7: unknown to the executors that answer (1)"},
		{"D -", "revoke 7", 1, "d:1 is silent: a lease on it cannot be revoked"},
		{bad + " -", "revoke 16", 1, "resource manager at " + bad},
		{"D D", "revoke --tenant alice", 2, "RFAAS_MANAGER and RFAAS_EXECUTOR are both set: give --executor or --all"},
		{"D D", "revoke --tenant alice --all=false", 0, "leases of alice revoked on D: 1"},
		{bad + " D", "revoke --tenant alice --manager D", 1, "leases of alice revoked on D: 1"},
	} {
		s, p, _ := world(t)
		s.only = []string{p.Address}
		here := strings.NewReplacer("D", p.Address, "-", "")
		manager, executor, _ := strings.Cut(c.env, " ")
		env := map[string]string{"RFAAS_SECRET_FILE": s.secret, "RFAAS_MANAGER": here.Replace(manager), "RFAAS_EXECUTOR": here.Replace(executor)}
		var out bytes.Buffer
		code := Run(t.Context(), Env{Version: "v1", Getenv: func(k string) string { return env[k] }, Stdout: &out, Stderr: &out}, strings.Fields(strings.ReplaceAll(c.args, "D", p.Address)))
		if code != c.code || !strings.Contains(out.String(), strings.ReplaceAll(c.text, "D", p.Address)) {
			t.Errorf("%s with %s: code %d, want %d and %q:\n%s", c.args, c.env, code, c.code, c.text, &out)
		}
	}
}

func TestRevokeAndDrain(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		got  string // what the executor was asked
		text string // what was printed
	}{
		{[]string{"revoke", "9223372036854775809", "--reason", "needed"}, 0, "revoke 9223372036854775809 needed", ""},
		{[]string{"revoke", "0x10"}, 0, "revoke 16 ", ""},
		{[]string{"revoke", "7"}, 1, "", "lease 7: unknown lease"},
		{[]string{"revoke", "0"}, 2, "", `"0" is not a lease`},
		{[]string{"revoke", "x"}, 2, "", `"x" is not a lease`},
		{[]string{"revoke"}, 2, "", "which leases? give LEASE (rfaas leases lists them) or --tenant"},
		{[]string{"revoke", "16", "--tenant", "alice"}, 2, "", "both the lease 16 and --tenant"},
		{[]string{"revoke", "--tenant", ""}, 2, "", "--tenant is empty"},
		{[]string{"revoke", "--tenant", "alice", "--all", "--executor", "a:1"}, 2, "", "--executor and --all: want one"},
		{[]string{"revoke", "--tenant", "alice", "--reason", "mines"}, 0, "revoke 9223372036854775809 mines", "leases of alice revoked on "},
		{[]string{"revoke", "--tenant", "bob"}, 0, "", "bob has no leases"},
		{[]string{"drain"}, 0, "drain 0 ", ""},
		{[]string{"drain", "--grace", "1m", "--reason", "maintenance"}, 0, "drain 60000 maintenance", ""},
		{[]string{"drain", "--grace", "-1s"}, 2, "", "-1s is negative"},
	} {
		s, p, run := world(t)
		if c.args[0] == "revoke" && !slices.Contains(c.args, "--executor") {
			c.args = append(c.args, "--executor", p.Address)
		}
		code, out, errs := run(c.args...)
		if code != c.code || s.got.String() != c.got || !strings.Contains(out+errs, c.text) || c.text == "" && out+errs != "" {
			t.Errorf("%q: code %d, asked %q, said %q%q; want %d, %q, %q", c.args, code, s.got.String(), out, errs, c.code, c.got, c.text)
		}
	}
}

// Without addresses, errors name the flag and the variable, and drain does not guess which executor to drain.
func TestDefaultAddresses(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if _, err := control.EnsureSecret(secret); err != nil { // no daemon has it
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		env  string
		code int
		text string
		want bool
	}{
		{[]string{"leases"}, "", 1, "(default address; set --executor or RFAAS_EXECUTOR)", true},
		{[]string{"invoke", "lib.so", "f", "--secret-file", secret}, "", 1, "(default address; set --executor or RFAAS_EXECUTOR)", true},
		{[]string{"executors"}, "", 1, "(default address; set --manager or RFAAS_MANAGER)", true},
		{[]string{"drain", "n1"}, "", 1, "(default address; set --manager or RFAAS_MANAGER)", true},
		{[]string{"leases", "--executor", control.DefaultExecutorAddress}, "", 1, "default address", false},
		{[]string{"leases"}, control.DefaultExecutorAddress, 1, "default address", false},
		{[]string{"drain"}, "", 2, "which executor? give NODE", true},
		{[]string{"drain", "--executor", control.DefaultExecutorAddress}, "", 1, "which executor?", false},
		{[]string{"drain"}, control.DefaultExecutorAddress, 1, "which executor?", false},
	} {
		var out, errs bytes.Buffer
		env := map[string]string{"RFAAS_SECRET_FILE": secret, "RFAAS_EXECUTOR": c.env}
		code := Run(t.Context(), Env{Version: "v1", Getenv: func(k string) string { return env[k] }, Stdout: &out, Stderr: &errs}, c.args)
		if code != c.code || strings.Contains(errs.String(), c.text) != c.want {
			t.Errorf("%q with RFAAS_EXECUTOR=%s: code %d, errors %q; want %d, %q: %v", c.args, c.env, code, &errs, c.code, c.text, c.want)
		}
	}
}

func TestDeploy(t *testing.T) {
	s, _, run := world(t)
	lib := filepath.Join(t.TempDir(), "lib.so")
	content := bytes.Repeat([]byte("0123456789abcdef"), 200_000) // several chunks
	if err := os.WriteFile(lib, content, 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errs := run("deploy", lib)
	if code != 0 || !strings.Contains(out, "0  alpha\n") || !strings.Contains(out, "1  beta\n") || !bytes.Equal(s.got.Bytes(), content) {
		t.Errorf("code %d, %s%s; %d bytes came", code, out, errs, s.got.Len())
	}
	_, out, _ = run("deploy", "--json", lib)
	var d deployed
	if err := json.Unmarshal([]byte(out), &d); err != nil || len(d.Functions) != 2 || d.Functions[1] != (deployedFunction{1, "beta"}) || d.Bytes != int64(len(content)) || len(d.SHA256) != 64 {
		t.Errorf("%+v, %v", d, err)
	}
	if err := os.WriteFile(lib, []byte("bad"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := run("deploy", lib); code != 1 || !strings.Contains(errs, "lib.so on 127.0.0.1:") || !strings.Contains(errs, "not an ELF file") {
		t.Errorf("code %d, %s", code, errs)
	}
}

func TestDoctor(t *testing.T) {
	_, p, run := world(t)
	// A test binary has no executor beside it: one problem at least, with the way to mend it.
	code, out, errs := run("doctor")
	for _, want := range []string{"verbs devices", "verbs library", "encryption", "libfabric", "soft-RoCE", "CPUs for sessions", "GIDs", "device files", "control groups", "namespaces", "clock", "ports", "data ports", "locked memory", "cores", "secret", "answers at " + p.Address, "make build"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if code != 1 || !strings.Contains(errs, "found a problem") {
		t.Errorf("code %d, %s", code, errs)
	}
	_, out, _ = run("doctor", "--json", "--executor", "unix:/nonexistent/socket")
	var list []finding
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 21 {
		t.Fatalf("%v, %v", list, err)
	}
	if f := list[17]; f.State != "note" || f.Mend == "" {
		t.Errorf("an executor that is not there: %+v", f)
	}
	wrong := filepath.Join(t.TempDir(), "secret")
	if _, err := control.EnsureSecret(wrong); err != nil {
		t.Fatal(err)
	}
	if _, out, _ := run("doctor", "--secret-file", wrong); !strings.Contains(out, "wrong secret") {
		t.Errorf("another user's secret:\n%s", out)
	}
}

// The doctor does not recommend soft-RoCE on the kernel that it locks up, and warns where it is used there.
func TestSoftRoCEOfLinux61(t *testing.T) {
	class := t.TempDir()
	if f := checkSoftRoCE(class, "6.1.0-40-amd64"); f.State != "ok" {
		t.Errorf("no device: %+v", f)
	}
	if err := os.MkdirAll(filepath.Join(class, "rxe0"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(class, "rxe0", "parent"), []byte("eth0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for release, want := range map[string]string{"6.1.0-40-amd64": "problem", "6.12.48": "note", "6.10.1": "note"} {
		if f := checkSoftRoCE(class, release); f.State != want || !strings.Contains(f.Detail, "rxe0") {
			t.Errorf("Linux %s: %+v, want a %s that names the device", release, f, want)
		}
	}
	if f := checkDevices(nil, nil); f.State != "ok" || f.Mend != "" || !strings.Contains(f.Detail, "tcp") {
		t.Errorf("without a device: %+v", f)
	}
}

func TestCheckSessions(t *testing.T) {
	setting := filepath.Join(t.TempDir(), "sched_autogroup_enabled")
	if f := checkSessions(setting, "6.18.44"); f.State != "ok" {
		t.Errorf("a kernel without the setting: %+v", f)
	}
	for _, c := range []struct{ value, release, state string }{{"1", "6.18.44", "note"}, {"0", "6.18.44", "ok"}, {"1", "6.1.0-40-amd64", "ok"}} {
		if err := os.WriteFile(setting, []byte(c.value+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if f := checkSessions(setting, c.release); f.State != c.state || f.State == "note" && f.Mend == "" {
			t.Errorf("autogroup %s on Linux %s: %+v", c.value, c.release, f)
		}
	}
}

// libibverbs is missed only where there is a device.
func TestCheckVerbsLibrary(t *testing.T) {
	missing := func() error { return errors.New("libibverbs.so.1: no such file") }
	if f := checkCryptoLibrary(func() error { return errors.New("no libcrypto.so.3") }); f.State != "note" ||
		!strings.Contains(f.Detail, "no libcrypto.so.3") || !strings.Contains(f.Mend, "libssl3") {
		t.Errorf("without libcrypto: %+v", f)
	}
	if f := checkCryptoLibrary(dataplane.LoadCrypto); f.State != "ok" {
		t.Errorf("libcrypto of this machine: %+v", f)
	}
	if f := checkVerbsLibrary(false, missing); f.State != "ok" || f.Mend != "" {
		t.Errorf("without a device: %+v", f)
	}
	if f := checkVerbsLibrary(true, missing); f.State != "problem" || !strings.Contains(f.Detail, "libibverbs.so.1") || !strings.Contains(f.Mend, "ibverbs-providers") {
		t.Errorf("without the library: %+v", f)
	}
	if f := checkVerbsLibrary(true, func() error { return nil }); f.State != "ok" {
		t.Errorf("with both: %+v", f)
	}
}

func TestDoctorLibfabric(t *testing.T) {
	for _, c := range []struct{ provider, ofi, device, state, text string }{
		{"", "", "", "ok", "RFAAS_OFI_PROVIDER is not set"},
		{"ofi", "", "", "ok", "ofi tcp"},
		{"auto", "tcp", "127.0.0.1", "ok", "ofi tcp"},
		{"ofi", "tcp", "node7", "problem", `"node7" is not a numeric`},
		{"ofi", "sockets", "", "problem", "not one of tcp, cxi, efa"},
	} {
		env := map[string]string{"RFAAS_PROVIDER": c.provider, "RFAAS_OFI_PROVIDER": c.ofi, "RFAAS_OFI_DEVICE": c.device}
		f := checkOFI(func(name string) string { return env[name] }, dataplane.Open)
		if f.State != c.state || !strings.Contains(f.Detail, c.text) {
			t.Errorf("%+v: %+v", c, f)
		}
	}
}

func TestVerbsDevices(t *testing.T) {
	class := t.TempDir()
	if d := verbsDevices(filepath.Join(class, "absent")); d != nil || checkDevices(d, nil).State != "ok" {
		t.Errorf("no devices: %v", d)
	}
	port := filepath.Join(class, "mlx5_0", "ports", "1")
	if err := os.MkdirAll(port, 0o700); err != nil {
		t.Fatal(err)
	}
	for state, want := range map[string]string{"1: DOWN\n": "problem", "4: ACTIVE\n": "ok"} {
		if err := os.WriteFile(filepath.Join(port, "state"), []byte(state), 0o600); err != nil {
			t.Fatal(err)
		}
		if f := checkDevices(verbsDevices(class), nil); f.State != want || !strings.Contains(f.Detail, "mlx5_0 port 1") {
			t.Errorf("%q: %+v", state, f)
		}
	}
}
