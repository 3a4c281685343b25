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
	called := regexp.MustCompile("(?:bin/|`)rfaas(?: bench|-bench) ([a-z]+)((?: +[^\\s#|>;)`]+)*)")
	for file, atLeast := range map[string]int{"scripts/bench": 20, "Makefile": 2, "benchmarks/README.md": 45} {
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

// Every program, target and part that benchmarks/README.md names exists.
func TestReadmeNamesWhatExists(t *testing.T) {
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join("..", "..", name))
		if err != nil {
			t.Error(err)
		}
		return string(b)
	}
	readme, makefile, parts := read("benchmarks/README.md"), read("Makefile"), read("scripts/bench")
	for _, c := range []struct {
		named   string
		in      string
		want    string // with NAME for what was named
		atLeast int
	}{
		{"(?m)(?:`|^ +)make ([a-z][a-z-]+)", makefile, "\nNAME:", 5},
		{`scripts/bench --only ([a-z-]+)`, parts, "\npart_NAME()", 2},
	} {
		found := regexp.MustCompile(c.named).FindAllStringSubmatch(readme, -1)
		if len(found) < c.atLeast {
			t.Errorf("benchmarks/README.md names %d of %s, want at least %d", len(found), c.named, c.atLeast)
		}
		for _, m := range found {
			if !strings.Contains(c.in, strings.ReplaceAll(c.want, "NAME", m[1])) {
				t.Errorf("benchmarks/README.md names %s, which does not exist", m[1])
			}
		}
	}
	for _, m := range regexp.MustCompile(`\b(?:benchmarks|scripts)/[a-z0-9/.]+[a-z0-9]`).FindAllString(readme, -1) {
		if _, err := os.Stat(filepath.Join("..", "..", m)); err != nil {
			t.Errorf("benchmarks/README.md: %v", err)
		}
	}
}
