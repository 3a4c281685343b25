package testkit

import (
	"os"
	"path/filepath"
	"testing"
)

// FakeMunge puts programs named munge and unmunge on the path. They identify each caller as the user with id 1. internal/issuer tests the real programs.
func FakeMunge(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range map[string]string{
		"munge":   `printf 'MUNGE:%s:' "$(base64 -w0)"`,
		"unmunge": `printf 'UID: 1\n\n%s' "$(sed 's/^MUNGE://; s/:$//' | base64 -d)"`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}
