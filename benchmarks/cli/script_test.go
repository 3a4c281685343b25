package cli

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/cli/command"
)

// The commands have every flag that scripts/bench, the Makefile and benchmarks/README.md pass to them.
func TestScriptsPassKnownFlags(t *testing.T) {
	replace := strings.NewReplacer(`"${LATENCY[@]}"`, "bin/rfaas bench latency --json", `"$rfaas"`, "bin/rfaas", `"`, "")
	called := regexp.MustCompile(`bin/rfaas(?: bench|-bench) ([a-z]+)((?: +[^\s#|>;)` + "`" + `]+)*)`)
	for file, atLeast := range map[string]int{"scripts/bench": 20, "Makefile": 2, "benchmarks/README.md": 10} {
		text, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(file)))
		if err != nil {
			t.Fatal(err)
		}
		calls := called.FindAllStringSubmatch(replace.Replace(string(text)), -1)
		if len(calls) < atLeast {
			t.Errorf("%s calls rfaas bench %d times, want at least %d", file, len(calls), atLeast)
		}
		for _, call := range calls {
			root := newRoot(&app{Program: command.Program{Env: command.Env{Getenv: os.Getenv}}})
			c, rest, err := root.Find(append([]string{call[1]}, strings.Fields(call[2])...))
			if err == nil {
				err = c.ParseFlags(rest)
			}
			if err != nil {
				t.Errorf("%s: %s: %v", file, call[0], err)
			}
		}
	}
}
