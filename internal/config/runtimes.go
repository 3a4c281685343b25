package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Runtime is an interpreter that starts before the workers of a lease, which chooses it by its name.
type Runtime struct {
	Python  string   `json:"python"`  // absolute path of the interpreter
	Preload []string `json:"preload"` // names of modules
	Paths   []string `json:"paths"`   // absolute paths of directories with modules
}

// Runtimes are the runtimes by name. In a settings file they are a nested map, elsewhere JSON.
type Runtimes map[string]Runtime

// UnmarshalText parses JSON.
func (r *Runtimes) UnmarshalText(text []byte) error {
	*r = nil
	if len(text) == 0 {
		return nil
	}
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.DisallowUnknownFields()
	if err := d.Decode((*map[string]Runtime)(r)); err != nil {
		return fmt.Errorf(`%w (want a map like {"py311": {"python": "/usr/bin/python3", "preload": ["numpy"], "paths": []}})`, err)
	}
	return nil
}

// Names returns the names in order.
func (r Runtimes) Names() []string { return slices.Sorted(maps.Keys(r)) }

// Limits of runtimes, as in worker/runtime.h.
const (
	maxRuntimes        = 16
	maxRuntimePreload  = 64
	maxRuntimePaths    = 16
	runtimeNameMost    = 63 // bytes, RFAAS_AGENT_RUNTIME less its NUL
	runtimeNamePattern = `^[a-z0-9][a-z0-9_.-]*$`
)

var (
	runtimeName = regexp.MustCompile(runtimeNamePattern)
	moduleName  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$`)
)

func (v *validator) runtimes(all Runtimes) {
	if len(all) > maxRuntimes {
		v.failf("runtimes: %d runtimes, at most %d", len(all), maxRuntimes)
	}
	for _, name := range all.Names() {
		r := all[name]
		fail := func(format string, args ...any) { v.failf("runtimes: %s: "+format, append([]any{name}, args...)...) }
		if !runtimeName.MatchString(name) || len(name) > runtimeNameMost {
			v.failf("runtimes: the name %q is not up to %d lower-case letters, digits and the characters _ . -", name, runtimeNameMost)
		}
		if !filepath.IsAbs(r.Python) || filepath.Clean(r.Python) != r.Python {
			fail("python %q is not the absolute path of an interpreter", r.Python)
		}
		if len(r.Preload) > maxRuntimePreload || len(r.Paths) > maxRuntimePaths {
			fail("%d modules and %d paths, want at most %d and %d", len(r.Preload), len(r.Paths), maxRuntimePreload, maxRuntimePaths)
		}
		for _, m := range r.Preload {
			if top, _, _ := strings.Cut(m, "."); !moduleName.MatchString(m) {
				fail("preload: %q is not the name of a module", m)
			} else if top == "mpi4py" {
				fail("preload: %s: a worker cannot use MPI, because it is not part of an MPI program", m)
			}
		}
		for _, p := range r.Paths {
			if !filepath.IsAbs(p) || filepath.Clean(p) != p || p == "/" || p == "/tmp" || strings.HasPrefix(p, "/tmp/") {
				fail("paths: %q is not an absolute path in its shortest form, or is in /tmp, which is private to each worker", p)
			}
		}
	}
}
