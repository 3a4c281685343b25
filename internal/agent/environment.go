package agent

import (
	"path/filepath"
	"strings"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// libraryPathEnv has directories in which the client's dynamic linker looks for libraries.
const libraryPathEnv = "LD_LIBRARY_PATH"

// environment is the environment of a client process, as its hello had it. It does not change.
type environment struct {
	directory string // for relative paths
	values    map[string]string
}

func newEnvironment(h *protocol.Hello) *environment {
	e := &environment{h.Directory, make(map[string]string)}
	for _, v := range h.Environment {
		name, value, ok := strings.Cut(v, "=")
		if ok && (strings.HasPrefix(name, "RFAAS_") || name == "HOME" || name == "XDG_RUNTIME_DIR" || name == "USER" || name == "LOGNAME" || name == libraryPathEnv) {
			e.values[name] = value
		}
	}
	return e
}

// get looks up a variable. Paths are absolute.
func (e *environment) get(name string) string {
	v := e.values[name]
	switch name {
	case identity.TokenFileEnv, identity.CAFileEnv, control.SecretFileEnv, "HOME", "XDG_RUNTIME_DIR":
		return e.path(v)
	}
	return e.address(v)
}

// path makes the path of a file absolute.
func (e *environment) path(p string) string {
	if p == "" || filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(e.directory, p)
}

// address makes the path of a unix socket absolute.
func (e *environment) address(a string) string {
	if p, ok := strings.CutPrefix(a, "unix:"); ok && p != "" && p[0] != '@' && !filepath.IsAbs(p) {
		return "unix:" + filepath.Join(e.directory, p)
	}
	return a
}
