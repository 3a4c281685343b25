package config

import (
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestRuntimes(t *testing.T) {
	file := filepath.Join(t.TempDir(), "executor.yaml")
	text := "runtimes:\n  py311:\n    python: /usr/bin/python3\n    preload: [numpy, scipy.linalg]\n    paths: [/opt/Site]\n  plain: {python: /usr/bin/python3}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	environ := []string{"RFAAS_SECRET_FILE=/secret"}
	want := Runtimes{"py311": {"/usr/bin/python3", []string{"numpy", "scipy.linalg"}, []string{"/opt/Site"}}, "plain": {Python: "/usr/bin/python3"}}
	c, err := LoadExecutor([]string{"--config", file}, environ, io.Discard, "")
	if err != nil || !reflect.DeepEqual(c.Runtimes, want) {
		t.Errorf("from a file: %v, %v", c.Runtimes, err)
	}
	c, err = LoadExecutor([]string{"--runtimes", `{"plain": {"python": "/usr/bin/python3"}}`}, environ, io.Discard, "")
	if err != nil || c.Runtimes["plain"].Python != "/usr/bin/python3" {
		t.Errorf("from a flag: %v, %v", c.Runtimes, err)
	}
	for text, says := range map[string]string{
		`{"a": {"python": "python3"}}`:                                   "absolute path of an interpreter",
		`{"A b": {"python": "/usr/bin/python3"}}`:                        "lower-case letters",
		`{"a": {"python": "/usr/bin/python3", "preload": ["os; x"]}}`:    "not the name of a module",
		`{"a": {"python": "/usr/bin/python3", "preload": ["mpi4py.x"]}}`: "not part of an MPI program",
		`{"a": {"python": "/usr/bin/python3", "paths": ["/tmp/x"]}}`:     "is in /tmp",
		`{"a": {"python": "/usr/bin/python3", "modules": []}}`:           "unknown field",
		`py311`: "want a map like",
	} {
		if _, err := LoadExecutor([]string{"--runtimes", text}, environ, io.Discard, ""); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", text, err, says)
		}
	}
}
