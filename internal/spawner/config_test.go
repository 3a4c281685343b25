package spawner

import (
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

func TestArguments(t *testing.T) {
	want := Config{Worker: "/a b/rfaas-worker", Version: "v1", Mode: sandbox.On, Paths: []string{"/opt", "/--x"}, UIDs: sandbox.Range{First: 5, N: 3}, UIDFile: "/run/u",
		Processes: 512, Files: []string{"/etc/rfaas"}, Append: []string{"/var/log/rfaas"}, UID: 1899999999, GID: 7, Renew: "/usr/bin/executor", Identity: "/etc/i d", Remove: []string{"/run/a", "/run/b"}, Without: 3, OwnGroups: "/x",
		Runtimes: []Runtime{{"py311", "/usr/bin/python3", []string{"numpy", "scipy.linalg"}, []string{"/opt/a b"}}, {Name: "py312", Python: "/opt/python"}}}
	got, err := Parse(want.Arguments(), io.Discard)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v: %+v, want %+v", err, got, want)
	}
	for _, args := range [][]string{{}, {"--worker=/w", "more"}, {"--worker=/w", "--sandbox=perhaps"}, {"--worker=/w", "--uids=0-7"}, {"--worker=/w", "--processes=-1"},
		{"--worker=/w", "--without=512"}, {"--worker=/w", "--executor-uid=4294967295"}, {"--nonsense"}} {
		var said strings.Builder
		if _, err := Parse(args, &said); !errors.Is(err, errUsage) || said.Len() == 0 {
			t.Errorf("%q: %v, and it said %q", args, err, &said)
		}
	}
	if _, err := Parse([]string{"--help"}, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("--help: %v", err)
	}
}

// Workers see the installation of an interpreter, but never the whole root file system.
func TestVisible(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{"bin/python3.11", "python3.11"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755), os.WriteFile(filepath.Join(dir, path), nil, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	for python, want := range map[string][]string{dir + "/bin/python3.11": {"/site", dir}, dir + "/python3.11": {"/site"}, dir + "/missing": {"/site"}} {
		r := Runtime{Python: python, Paths: []string{"/site"}}
		if got := r.visible(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %q, want %q", python, got, want)
		}
	}
}

func TestLacks(t *testing.T) {
	c := Config{Mode: sandbox.On}
	if got := c.lacks(wire.PartAll, ""); !strings.Contains(got, "no range") {
		t.Errorf("without a range of user ids it lacks %q", got)
	}
	c.UIDs.N = 1
	if got := c.lacks(wire.PartAll, ""); got != "" {
		t.Errorf("a complete one lacks %q", got)
	}
	c.Mode = sandbox.Off
	if got := c.lacks(0, "all"); got != "" {
		t.Errorf("none lacks %q", got)
	}
}
