package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

var home = []string{"HOME=/home/a"}

func load(args, environ []string) (Executor, string, error) {
	var out bytes.Buffer
	c, err := LoadExecutor(args, append(environ, home...), &out, "v1")
	return c, out.String(), err
}

func TestDefaultsAreValid(t *testing.T) {
	c, _, err := load(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.Listen != "127.0.0.1:7465" || c.VerbsGIDIndex != -1 || c.VerbsPort != 0 || c.CodeLimit != 256<<20 || c.Grace != 10*time.Second ||
		c.LogLevel != slog.LevelInfo || c.ProviderList() != nil || c.Cores.String() != "auto" || c.SecretFile != "/home/a/.rfaas/secret" {
		t.Errorf("%+v", c)
	}
	m, err := LoadManager(nil, home, io.Discard, "v1")
	if err != nil || m.Listen != "127.0.0.1:7464" || m.Heartbeat != time.Second {
		t.Errorf("%+v, %v", m, err)
	}
}

func TestLayers(t *testing.T) {
	yaml := write(t, "c.yaml", "grace: 1s\nmemory: 1GiB\ncores: 2-3\nlog-level: debug\nmax-workers: 7\nallow-plaintext: true\n")
	toml := write(t, "c.toml", "grace = \"1s\"\nmemory = \"1GiB\"\ncores = \"2-3\"\nlog-level = \"debug\"\nmax-workers = 7\nallow-plaintext = true\n")
	for _, file := range []string{yaml, toml} {
		c, _, err := load([]string{"--config", file, "--grace", "3s"},
			[]string{"RFAAS_EXECUTOR_GRACE=2s", "RFAAS_EXECUTOR_MEMORY=2GiB", "RFAAS_EXECUTORMEMORY=9", "RFAAS_MANAGER_LISTEN=x"})
		if err != nil {
			t.Fatal(err)
		}
		if c.Grace != 3*time.Second || c.Memory != 2<<30 || c.Cores.String() != "2-3" || c.LogLevel != slog.LevelDebug || c.MaxWorkers != 7 || !c.AllowPlaintext {
			t.Errorf("%s: %+v", file, c)
		}
	}
}

func TestWrongSettings(t *testing.T) {
	for name, c := range map[string]struct {
		args, env []string
		text      string
	}{
		"unknown flag":      {[]string{"--graze", "1s"}, nil, "--graze"},
		"argument":          {[]string{"serve"}, nil, `"serve"`},
		"unknown key":       {[]string{"--config", write(t, "c.yaml", "graze: 1s\n")}, nil, `"graze"`},
		"unknown nested":    {[]string{"--config", write(t, "c.toml", "[verbs]\ndevice = \"x\"\n")}, nil, `"verbs.device"`},
		"broken file":       {[]string{"--config", write(t, "c.yaml", "a: [")}, nil, "c.yaml"},
		"absent file":       {[]string{"--config", "/nonexistent.yaml"}, nil, "/nonexistent.yaml"},
		"other file":        {[]string{"--config", "x.ini"}, nil, "x.ini"},
		"list for a text":   {[]string{"--config", write(t, "c.yaml", "cores: [1, 2]\n")}, nil, "cores"},
		"map for a number":  {[]string{"--config", write(t, "c.yaml", "grace: {a: 1}\n")}, nil, "grace"},
		"duration":          {[]string{"--grace", "soon"}, nil, "soon (from --grace)"},
		"no unit":           {[]string{"--grace", "10"}, nil, "10 (from --grace): time: missing unit in duration: want a number with its unit, like 500ms"},
		"env":               {nil, []string{"RFAAS_EXECUTOR_GRACE=soon"}, "RFAAS_EXECUTOR_GRACE"},
		"unknown env":       {nil, []string{"RFAAS_EXECUTOR_GRAZE=1s"}, `RFAAS_EXECUTOR_GRAZE="1s" is not a setting`},
		"env of no program": {nil, []string{"RFAAS_CORES=2"}, `RFAAS_CORES="2": no program reads this name. The setting cores of executor is RFAAS_EXECUTOR_CORES`},
		"no grace":          {[]string{"--grace", "0s"}, nil, "grace: 0s"},
		"environment: all":  {[]string{"--sandbox-environment", "A,*"}, nil, `sandbox-environment: "" is neither the name`},
		"environment: ours": {[]string{"--sandbox-environment", "RFAAS_EXECUTOR_*"}, nil, `"RFAAS_EXECUTOR_": workers cannot have settings of rfaas`},
		"sandbox mode":      {[]string{"--sandbox", "maybe"}, nil, `"maybe" is neither auto, require, on nor off`},
		"providers":         {[]string{"--providers", "shm,ucx"}, nil, `providers: "ucx" is not one of shm, verbs, tcp, ofi`},
		"ofi-provider":      {[]string{"--ofi-provider", "sockets"}, nil, `ofi-provider: "sockets" is not one of tcp, cxi, efa, opx, psm3`},
		"ofi-device":        {[]string{"--ofi-provider", "tcp", "--ofi-device", "node7"}, nil, `ofi-device: "node7" is not an IP address`},
		"ofi-device zone":   {[]string{"--ofi-provider", "tcp", "--ofi-device", "fe80::1%eth0"}, nil, "is not an IP address"},
		"ofi-device spaces": {[]string{"--ofi-provider", "cxi", "--ofi-device", "cxi 0"}, nil, `ofi-device: "cxi 0" is not a name`},
		"ofi, encrypted":    {[]string{"--providers", "ofi", "--data-encryption", "require"}, nil, "data-encryption: require, but provider ofi does not encrypt"},
		"ofi between nodes": {nil, []string{"RFAAS_EXECUTOR_OFI_PROVIDER=tcp", "RFAAS_EXECUTOR_OFI_DEVICE=10.0.0.1"},
			"providers: ofi does not encrypt the data of calls, and data-encryption is on"},
		"ofi over a fabric": {[]string{"--ofi-provider", "cxi"}, nil, "providers: ofi does not encrypt the data of calls, and data-encryption is on"},
		"data everywhere":   {[]string{"--providers", "tcp", "--data-listen", "0.0.0.0:7300"}, nil, "data-listen: 0.0.0.0:7300 is not an address that peers can connect to: set data-advertise"},
		"data without port": {[]string{"--providers", "tcp", "--data-listen", "127.0.0.1"}, nil, "want host:port or host:first-last"},
		"data in the clear": {[]string{"--providers", "tcp", "--data-listen", "10.0.0.1:7200-7299", "--data-encryption", "off"}, nil,
			"data-listen: 10.0.0.1:7200-7299 is not loopback, and data-encryption is off"},
		"data encryption": {nil, []string{"RFAAS_EXECUTOR_DATA_ENCRYPTION=yes"}, `data-encryption: "yes" is not one of off, on, require`},
		"data on loopback": {[]string{"--providers", "tcp", "--listen", "10.0.0.1:7465", "--allow-plaintext"}, nil,
			"data-listen: 127.0.0.1:0 is loopback, but other nodes ask at 10.0.0.1:7465"},
		"sandbox files":  {[]string{"--sandbox-files", "10"}, nil, "sandbox-files: 10 is not in 64..1048576"},
		"call limit":     {[]string{"--call-limit", "1us"}, nil, "call-limit: 1µs"},
		"init limit":     {[]string{"--init-limit", "1us"}, nil, "init-limit: 1µs"},
		"size":           {[]string{"--memory", "lots"}, nil, `"lots"`},
		"cores":          {[]string{"--cores", "3-1"}, nil, "3-1"},
		"provider":       {[]string{"--providers", "shm,pigeon"}, nil, `"pigeon"`},
		"port":           {[]string{"--verbs-port", "256"}, nil, "verbs-port: 256"},
		"mtu":            {[]string{"--verbs-mtu", "1500"}, nil, "1500"},
		"traffic class":  {[]string{"--verbs-traffic-class", "256"}, nil, "256"},
		"number":         {[]string{"--verbs-port", "one"}, nil, "one"},
		"address":        {[]string{"--listen", "here"}, nil, `"here"`},
		"public address": {[]string{"--listen", "0.0.0.0:1"}, nil, "--allow-plaintext"},
		"public manager": {[]string{"--manager", "10.0.0.1:1"}, nil, "manager: "},
		"lease":          {[]string{"--lease-default", "2h", "--lease-max", "1h"}, nil, "2h0m0s"},
		"code":           {[]string{"--code-limit", "2GiB"}, nil, "2GiB"},
		"log":            {[]string{"--log-format", "xml"}, nil, `"xml"`},
		"level":          {[]string{"--log-level", "loud"}, nil, "loud"},
		"two at once":    {[]string{"--log-format", "xml", "--verbs-port", "-1"}, nil, "verbs-port: -1 is not in 0..255\nlog-format"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := load(c.args, c.env)
			if !errors.Is(err, ErrUsage) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %v, want %q", err, c.text)
			}
		})
	}
	_, _, err := load([]string{"--config", write(t, "c.yaml", "cores: [1]\ngraze: 1s\ngrace: soon\n"), "--verbs-port", "-1"}, []string{"RFAAS_EXECUTOR_X=1"})
	for _, text := range []string{"cores is [1]", `"graze"`, "soon (from ", "verbs-port: -1", "RFAAS_EXECUTOR_X"} {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("all at once: %v, want %q too", err, text)
		}
	}
	if err != nil && strings.Count(err.Error(), "\n") != 4 {
		t.Errorf("all at once: %v, want five lines", err)
	}
	if _, err := LoadExecutor(nil, nil, io.Discard, ""); err == nil || !strings.Contains(err.Error(), "HOME") {
		t.Errorf("no place for the secret: %v", err)
	}
}

func TestFlagsThatEndTheProgram(t *testing.T) {
	for flag, text := range map[string]string{"--help": "RFAAS_EXECUTOR_LISTEN", "--version": "executor v1", "--check-config": "good",
		"--print-config": "grace: \"5s\""} {
		_, out, err := load([]string{flag, "--grace", "5s"}, nil)
		if !errors.Is(err, ErrDone) || !strings.Contains(out, text) {
			t.Errorf("%s: %v, output %q", flag, err, out)
		}
	}
	if _, _, err := load([]string{"--check-config", "--grace", "-1s"}, nil); !errors.Is(err, ErrUsage) {
		t.Errorf("--check-config with a wrong setting: %v", err)
	}
}

// What settings name must be good where they are checked; nothing is made.
func TestCheckedDirectories(t *testing.T) {
	dir := t.TempDir()
	file, state := write(t, "file", ""), filepath.Join(dir, "a", "b")
	astray, ahead := filepath.Join(dir, "astray"), filepath.Join(dir, "ahead")
	if err := errors.Join(os.Symlink(filepath.Join(dir, "no", "where"), astray), os.Symlink("audit", ahead)); err != nil {
		t.Fatal(err)
	}
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	const readOnly = "/proc/sys/kernel/ostype" // for root, too
	for name, c := range map[string]struct {
		args []string
		text []string
	}{
		"to be made":  {[]string{"--state-dir", state, "--audit-file", filepath.Join(dir, "audit")}, nil},
		"no identity": {[]string{"--identity-dir", dir}, []string{"identity-dir: open " + dir + "/node.key: no such file"}},
		"all at once": {[]string{"--state-dir", file, "--audit-file", file + "/x/audit", "--identity-dir", "/nonexistent"},
			[]string{"identity-dir: open /nonexistent/node.key", "state-dir: use " + file + ": not a directory", "audit-file: "}},
		"audit to be made behind a link": {[]string{"--audit-file", ahead}, nil},
		"audit there":                    {[]string{"--audit-file", file}, nil},
		"audit to a device":              {[]string{"--audit-file", "/dev/null"}, nil},
		"audit is a directory":           {[]string{"--audit-file", dir}, []string{"audit-file: open " + dir + ": is a directory"}},
		"audit cannot be written":        {[]string{"--audit-file", readOnly}, []string{"audit-file: write " + readOnly + ": permission denied"}},
		"audit in a state to be made":    {[]string{"--state-dir", state, "--audit-file", filepath.Join(state, "audit")}, nil},
		"audit where none can be made":   {[]string{"--audit-file", "/proc/sys/no/audit"}, []string{"audit-file: /proc/sys/no: write /proc/sys: "}},
		"audit below a link astray":      {[]string{"--audit-file", filepath.Join(astray, "audit")}, []string{"audit-file: ", "use " + astray + ": dangling"}},
		"audit behind a link astray":     {[]string{"--audit-file", astray}, []string{"audit-file: stat " + filepath.Join(dir, "no") + ": no such file"}},
		"state behind a link astray":     {[]string{"--state-dir", astray}, []string{"state-dir: use " + astray + ": dangling symbolic link"}},
		"state below a link astray":      {[]string{"--state-dir", filepath.Join(astray, "x")}, []string{"state-dir: ", "use " + astray + ": dangling"}},
		"all, with what no node accepts": {[]string{"--user", "nobody-of-that-name", "--bundle-dir", "/nonexistent", "--grace", "-1s"},
			[]string{"nobody-of-that-name", "bundle-dir: stat /nonexistent: no such file", "grace: "}},
		"worker":                     {[]string{"--worker", file}, []string{"worker: execute " + file + ": permission denied"}},
		"address file":               {[]string{"--address-file", state + "/address"}, []string{"address-file: stat " + state + ": no such file"}},
		"secret that cannot be made": {[]string{"--secret-file", file + "/secret"}, []string{"secret-file: ", "not a directory"}},
		"file that is not a secret":  {[]string{"--secret-file", file}, []string{"secret-file: secret: "}},
		"FIFO as secret":             {[]string{"--secret-file", fifo}, []string{"secret-file: secret: ", "not a regular file"}},
		"secret to be made":          {[]string{"--secret-file", state + "/secret"}, nil},
		"address of another node":    {[]string{"--providers", "tcp", "--data-listen", "192.0.2.1:7000", "--allow-plaintext"}, []string{"data-listen: listen tcp 192.0.2.1:0: "}},
		"below a file":               {[]string{"--state-dir", file + "/x"}, []string{"state-dir: ", "not a directory"}},
	} {
		_, out, err := load(append(c.args, "--check-config"), nil)
		if c.text == nil && (!errors.Is(err, ErrDone) || !strings.Contains(out, "good")) {
			t.Errorf("%s: %v, output %q", name, err, out)
		}
		for _, text := range c.text {
			if !errors.Is(err, ErrUsage) || !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %v, want %q", name, err, text)
			}
		}
	}
	for _, path := range []string{filepath.Dir(state), filepath.Join(dir, "audit"), filepath.Join(dir, "no")} {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v: checking has made it", path, err)
		}
	}
}

// The manager's data address is checked as an executor's is.
func TestManagerDataAddress(t *testing.T) {
	for name, c := range map[string]struct{ args, want string }{
		"loopback":      {"--providers shm,tcp --data-listen 127.0.0.1:7300-7399", ""},
		"not offered":   {"--data-listen 10.0.0.1:7300", ""},
		"trusted":       {"--providers tcp --data-listen 10.0.0.1:7300 --allow-plaintext", ""},
		"encrypted":     {"--providers tcp --data-listen 10.0.0.1:7300", ""},
		"required":      {"--providers tcp --data-listen 10.0.0.1:7300 --data-encryption require", ""},
		"in the clear":  {"--providers tcp --data-listen 10.0.0.1:7300 --data-encryption off", "data-listen: 10.0.0.1:7300 is not loopback, and data-encryption is off"},
		"off, trusted":  {"--providers tcp --data-listen 10.0.0.1:7300 --data-encryption off --allow-plaintext", ""},
		"no word":       {"--data-encryption yes", `data-encryption: "yes" is not one of off, on, require`},
		"without port":  {"--data-listen 127.0.0.1", "want host:port or host:first-last"},
		"only loopback": {"--providers tcp --listen 10.0.0.1:7464 --allow-plaintext", "data-listen: 127.0.0.1:0 is loopback, but other nodes ask at 10.0.0.1:7464"},
	} {
		_, err := LoadManager(strings.Fields(c.args), []string{"HOME=" + t.TempDir()}, io.Discard, "v1")
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// What a service has of an environment (PATH and the unit's own variables, no HOME) and an empty settings file are enough, no setting
// of its unit takes the RDMA device away, as those do that imply DeviceAllow= for other devices, and the secret that it makes is there
// for the next start.
func TestServicesNeedNoMore(t *testing.T) {
	for unit, check := range map[string]func(args, environ []string) error{
		"systemd/rfaas-executor": func(args, environ []string) error {
			_, err := LoadExecutor(args, environ, io.Discard, "")
			return err
		},
		"systemd/rfaas-resource-manager": func(args, environ []string) error {
			_, err := LoadManager(args, environ, io.Discard, "")
			return err
		},
		"slurm/rfaas-slurm-node": func(_, environ []string) error {
			_, err := LoadExecutor([]string{"--listen", "0.0.0.0:7465", "--grace", "1s"}, environ, io.Discard, "")
			return err
		},
	} {
		text, err := os.ReadFile("../../scripts/" + unit + ".service")
		if err != nil {
			t.Fatal(err)
		}
		environ := []string{"PATH=/usr/bin:/bin"}
		for line := range strings.Lines(string(text)) {
			if v, ok := strings.CutPrefix(strings.TrimSpace(line), "Environment="); ok {
				environ = append(environ, v)
			}
			name, _, _ := strings.Cut(strings.TrimSpace(line), "=")
			if slices.Contains([]string{"ProtectClock", "PrivateDevices", "DeviceAllow", "DevicePolicy"}, name) {
				t.Errorf("%s: %s closes /dev/infiniband", unit, strings.TrimSpace(line))
			}
		}
		keep := "RuntimeDirectoryPreserve=yes"
		if unit == "slurm/rfaas-slurm-node" { // which leaves no secret behind on a node of Slurm's when it is stopped
			keep = "RuntimeDirectoryPreserve=restart"
		}
		if !slices.Contains(strings.Split(string(text), "\n"), keep) {
			t.Errorf("%s: want %s, or each restart makes another secret, or the secret outlives the service", unit, keep)
		}
		if err := check([]string{"--config", write(t, "empty.yaml", ""), "--state-dir", t.TempDir()}, environ); err != nil {
			t.Errorf("%s: %v", unit, err)
		}
	}
}

// What --print-config writes is a settings file that means the same.
func TestPrintedConfigReadsBack(t *testing.T) {
	_, first, err := load([]string{"--print-config", "--cores", "1-2", "--memory", "3GiB", "--allow-plaintext", "--log-level", "warn"}, nil)
	if !errors.Is(err, ErrDone) {
		t.Fatal(err)
	}
	_, second, err := load([]string{"--print-config", "--config", write(t, "c.yaml", first)}, nil)
	if !errors.Is(err, ErrDone) || first != second {
		t.Errorf("%v\n%s\n%s", err, first, second)
	}
}

func TestBytes(t *testing.T) {
	for in, want := range map[string]Bytes{"": 0, "auto": 0, "17": 17, "64KiB": 64 << 10, "64 kib": 64 << 10, "1.5GB": 15e8, "2T": 2 << 40, "3b": 3} {
		var b Bytes
		if err := b.UnmarshalText([]byte(in)); err != nil || b != want {
			t.Errorf("%q: %d, %v", in, b, err)
		}
		var back Bytes
		if err := back.UnmarshalText([]byte(b.String())); err != nil || back != b {
			t.Errorf("%d is written as %q", b, b.String())
		}
	}
	for _, in := range []string{"-1", "1Q", "GiB", "1e400GB", "17e18KiB", "nanB", "-1KiB"} {
		var b Bytes
		if err := b.UnmarshalText([]byte(in)); err == nil {
			t.Errorf("%q is %d", in, b)
		}
	}
}

func TestCores(t *testing.T) {
	for in, want := range map[string]string{"auto": "{[] 0}", "": "{[] 0}", "2": "{[] 2}", "2-3": "{[2 3] 0}", "5,0": "{[0 5] 0}",
		"3,2-3,": "{[2 3] 0}", "0-0": "{[0] 0}"} {
		var c Cores
		if err := c.UnmarshalText([]byte(in)); err != nil || fmt.Sprintf("{%v %d}", c.List, c.Count) != want {
			t.Errorf("%q: %v, %v", in, c, err)
		}
		var back Cores
		if err := back.UnmarshalText([]byte(c.String())); err != nil || back.String() != c.String() {
			t.Errorf("%q is written as %q", in, c.String())
		}
	}
	for _, in := range []string{"0", "-1", "1025", "a", "1-", "-", ",", "2-1", "0-1024", "1--2"} {
		if err := new(Cores).UnmarshalText([]byte(in)); err == nil {
			t.Errorf("%q is accepted", in)
		}
	}
}

func TestAdvertisedAddress(t *testing.T) {
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range [][3]string{{"", "127.0.0.1:5", "127.0.0.1:5"}, {"node:1", "0.0.0.0:5", "node:1"}, {"", "[::]:5", name + ":5"}, {"", "unix:/x", "unix:/x"}} {
		if got := AdvertisedAddress(c[0], c[1]); got != c[2] {
			t.Errorf("%q, %q: %q, want %q", c[0], c[1], got, c[2])
		}
	}
}

// Settings of etcd that contradict each other, or that would send the ledger in plain text, are refused.
func TestEtcdSettings(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--etcd-endpoints 127.0.0.1:2379", ""},
		{"--etcd-endpoints 127.0.0.1:2379,localhost:2380 --etcd-prefix /a/b", ""},
		{"--etcd-endpoints e1:2379", "etcd-ca"},
		{"--etcd-endpoints e1:2379 --allow-plaintext", ""},
		{"--etcd-endpoints e1:2379 --etcd-ca /ca", ""},
		{"--etcd-endpoints e1:2379 --etcd-ca /ca --etcd-cert /c", "etcd-key"},
		{"--etcd-endpoints 127.0.0.1:2379 --etcd-cert /c --etcd-key /k", "etcd-ca"},
		{"--etcd-endpoints http://e1:2379", "host:port"},
		{"--etcd-endpoints 127.0.0.1:2379,", "host:port"},
		{"--etcd-endpoints 127.0.0.1:2379 --etcd-prefix rfaas", "etcd-prefix"},
	} {
		_, err := LoadManager(strings.Split(c.args, " "), []string{"HOME=/nonexistent"}, io.Discard, "test")
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.args, err, c.want)
		}
	}
	for address, good := range map[string]bool{"127.0.0.1:1,127.0.0.1:2": true, "a:1,b:2": false, "127.0.0.1:1,unix:/run/x": false} {
		if _, err := LoadExecutor([]string{"--manager", address}, []string{"HOME=/nonexistent"}, io.Discard, "test"); (err == nil) != good {
			t.Errorf("--manager %s: %v", address, err)
		}
	}
}
