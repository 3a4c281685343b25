package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// libraryTravelEnv names the environment variable that, set to "off", excludes needed libraries from bundles.
const libraryTravelEnv = "RFAAS_BUNDLE_LIBRARIES"

// bundle returns the bundle of a lease, nil if it has none. The descriptor of the library came with the request.
func (l *lease) bundle(ctx context.Context, lib *grant.Library, s *protocol.Spec, r *request) (*grant.Table, error) {
	env := l.c.env
	o := grant.BundleOptions{Directory: directoryOf(r.file), LibraryPath: env.values[libraryPathEnv], NoLibraries: env.values[libraryTravelEnv] == "off"}
	for p := range strings.SplitSeq(s.Bundle, ":") {
		if p != "" {
			o.Files = append(o.Files, filepath.Clean(env.path(p)))
		}
	}
	return l.session.control.Bundle(ctx, lib, o)
}

// explainLibrary adds to an error about a library that its dependencies were not sent because of the user's setting.
func (c *client) explainLibrary(err error) error {
	var e *dataplane.Error
	if c.env.values[libraryTravelEnv] == "off" && errors.As(err, &e) && e.Status == dataplane.StatusBadLibrary {
		told := *e
		told.Detail += " (" + libraryTravelEnv + "=off: the libraries that it needs were not sent)"
		return &told
	}
	return err
}

// directoryOf returns the directory of an open file, "" if the file has none, like a memory file or a deleted one.
func directoryOf(f *os.File) string {
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil || !filepath.IsAbs(path) || strings.HasPrefix(path, "/memfd:") || strings.HasSuffix(path, " (deleted)") {
		return ""
	}
	return filepath.Dir(path)
}
