package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/sandbox"
)

// tree makes files below a new directory.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, text := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestCheckGIDs(t *testing.T) {
	const zero, local, mapped = "0000:0000:0000:0000:0000:0000:0000:0000", "fe80:0000:0000:0000:5054:00ff:fe77:0002", "0000:0000:0000:0000:0000:ffff:0a4d:0002"
	port := "mlx5_0/ports/1/"
	for name, c := range map[string]struct {
		files       map[string]string
		state, text string
	}{
		"no device": {nil, "ok", "not needed"},
		"port down": {map[string]string{port + "state": "1: DOWN", port + "gids/0": mapped}, "note", "no active port"},
		"RoCE": {map[string]string{port + "state": "4: ACTIVE", port + "link_layer": "Ethernet", port + "gids/0": local, port + "gid_attrs/types/0": "RoCE v2",
			port + "gids/1": mapped, port + "gid_attrs/types/1": "RoCE v2", port + "gids/2": zero}, "ok", "RoCE v2, index 1"},
		"RoCE without an address": {map[string]string{port + "state": "4: ACTIVE", port + "link_layer": "Ethernet", port + "gids/0": local,
			port + "gid_attrs/types/0": "RoCE v2", port + "gids/1": zero}, "problem", "mlx5_0 port 1"},
		"RoCE v1 only": {map[string]string{port + "state": "4: ACTIVE", port + "link_layer": "Ethernet", port + "gids/0": mapped,
			port + "gid_attrs/types/0": "IB/RoCE v1"}, "problem", "mlx5_0 port 1"},
		"InfiniBand": {map[string]string{port + "state": "4: ACTIVE", port + "link_layer": "InfiniBand", port + "gids/0": local}, "ok", "InfiniBand fe80"},
	} {
		if f := checkGIDs(tree(t, c.files)); f.State != c.state || !strings.Contains(f.Detail, c.text) || f.State == "problem" && f.Mend == "" {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// An RDMA adapter whose driver is not loaded is named.
func TestAdaptersWithoutDriver(t *testing.T) {
	for name, c := range map[string]struct{ class, vendor, file, want string }{
		"InfiniBand":             {"0x020700", "0x15b3", "numa_node", "0000:3b:00.0 (15b3:1017)"},
		"Omni-Path":              {"0x020800", "0x8086", "numa_node", "0000:3b:00.0 (8086:1017)"},
		"Mellanox Ethernet":      {"0x020000", "0x15b3", "net/eth0", "0000:3b:00.0 (15b3:1017)"},
		"with its driver":        {"0x020700", "0x15b3", "infiniband/mlx5_0/state", ""},
		"an Ethernet adapter":    {"0x020000", "0x8086", "net/eth0", ""},
		"a bridge of Mellanox's": {"0x060400", "0x15b3", "numa_node", ""},
	} {
		pci := tree(t, map[string]string{"0000:3b:00.0/class": c.class, "0000:3b:00.0/vendor": c.vendor, "0000:3b:00.0/device": "0x1017", "0000:3b:00.0/" + c.file: "1"})
		if got := strings.Join(adaptersWithoutDriver(pci), ","); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	if f := checkDevices(nil, []string{"0000:3b:00.0 (15b3:1017)"}); f.State != "note" || !strings.Contains(f.Detail, "0000:3b") || !strings.Contains(f.Mend, "modprobe") {
		t.Errorf("%+v", f)
	}
	if f := checkDevices(nil, nil); f.State != "ok" {
		t.Errorf("%+v", f)
	}
}

// doctor reports what the spawner of an executor finds in the same place.
func TestCheckGroups(t *testing.T) {
	groups, err := sandbox.OpenGroups(sandbox.GroupsConfig{})
	var missing []string
	if err == nil {
		missing = groups.Missing()
		if err := groups.Close(); err != nil {
			t.Fatal(err)
		}
	}
	f := checkGroups()
	for _, m := range missing {
		if !strings.Contains(f.Detail, m) {
			t.Errorf("doctor does not say that %s: %+v", m, f)
		}
	}
	if want := err == nil && len(missing) == 0; (f.State == "ok") != want {
		t.Errorf("doctor says %+v, an executor has missing %q, error %v", f, missing, err)
	}
	for _, f := range []finding{groupsFinding(nil, errors.New("no hierarchy")), groupsFinding([]string{"rdma: not limited"}, nil)} {
		if f.State != "note" || f.Mend == "" {
			t.Errorf("%+v", f)
		}
	}
	if f := groupsFinding(nil, nil); f.State != "ok" {
		t.Errorf("%+v", f)
	}
}

func TestCheckDeviceFiles(t *testing.T) {
	for devices, want := range map[bool]string{false: "ok", true: "problem"} {
		if f := checkDeviceFiles(t.TempDir(), devices); f.State != want {
			t.Errorf("no files, devices: %v: %+v, want %s", devices, f, want)
		}
	}
	root := tree(t, map[string]string{"uverbs0": ""})
	if f := checkDeviceFiles(root, true); f.State != "ok" {
		t.Errorf("one that can be opened: %+v", f)
	}
	if err := os.Symlink("/nonexistent", filepath.Join(root, "uverbs1")); err != nil {
		t.Fatal(err)
	}
	if f := checkDeviceFiles(root, true); f.State != "problem" || !strings.Contains(f.Detail, "uverbs1") {
		t.Errorf("one that cannot: %+v", f)
	}
}

func TestCheckListen(t *testing.T) {
	_, p, _ := world(t)
	if f := checkListen("127.0.0.1:0"); f.State != "ok" {
		t.Errorf("free: %+v", f)
	}
	if f := checkListen(p.Address); f.State != "note" || !strings.Contains(f.Detail, p.Address) {
		t.Errorf("in use: %+v", f)
	}
	for address, want := range map[string]string{"127.0.0.1:7777": "127.0.0.1:7777", "192.0.2.1:7777": "default", "unix:/run/x": "default", "?": "default"} {
		if got := ownPort(address, "default"); got != want {
			t.Errorf("port of a daemon at %q: %q, want %q", address, got, want)
		}
	}
	if f := checkListen("unix:/nonexistent/socket"); f.State != "problem" {
		t.Errorf("nowhere: %+v", f)
	}
}

func TestCheckClock(t *testing.T) {
	s, _, run := world(t)
	for ahead, want := range map[int64]string{0: "ok", 3600_000: "problem", -3600_000: "problem"} {
		s.ahead.Store(ahead)
		_, out, _ := run("doctor")
		state := ""
		for line := range strings.Lines(out) {
			if f := strings.Fields(line); len(f) > 1 && f[1] == "clock" {
				state = f[0]
			}
		}
		if state != want {
			t.Errorf("a manager %d ms ahead: %q\n%s", ahead, state, out)
		}
	}
}

// All programs that a node needs are looked for, and a missing one is named.
func TestFindPrograms(t *testing.T) {
	dir := t.TempDir()
	names := []string{"bin/executor", "libexec/rfaas-worker", "libexec/rfaas-spawner", "libexec/rfaas-agent"}
	find := func() finding {
		return findPrograms("programs", filepath.Join(dir, "bin/rfaas"), filepath.Join(dir, "bin/../libexec/rfaas-worker"))
	}
	for _, d := range []string{"bin", "libexec"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range names {
		path := filepath.Join(dir, name)
		if got := fmt.Sprintf("%+v", find()); !strings.Contains(got, path+": no such file") {
			t.Errorf("without %s: %s", name, got)
		}
		if err := os.WriteFile(path, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range names {
		if got := fmt.Sprintf("%+v", find()); !strings.Contains(got, filepath.Join(dir, name)) || strings.Contains(got, "no such file") {
			t.Errorf("with all programs: %s", got)
		}
	}
}
