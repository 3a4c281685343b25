package conventions

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A path of a source file, a function or method, and a bold path as docs/architecture.md writes them.
var (
	pageFile     = regexp.MustCompile(`[a-z0-9_/]+\.(?:[ch]|go)\b`)
	pageFunction = regexp.MustCompile("`((?:[A-Za-z]+\\.)?[A-Za-z][A-Za-z0-9_]+)`")
	pageStep     = regexp.MustCompile(`(?m)^\d+\. \*\*(\S+)\*\*:`)
)

// defines reports whether a source defines a function or a method, as the page names it: `f`, or `T.f` in Go.
func defines(path, text, name string) bool {
	if strings.HasSuffix(path, ".go") {
		receiver, method, found := strings.Cut(name, ".")
		if !found {
			return regexp.MustCompile(`(?m)^func (?:\([^)]*\) )?` + name + `\(`).MatchString(text)
		}
		return regexp.MustCompile(`(?m)^func \(\w+ \*?` + receiver + `\) ` + method + `\(`).MatchString(text)
	}
	return regexp.MustCompile(`(?m)^[a-z_].*\b` + name + `\([^;]*(?:\{.*)?$`).MatchString(text)
}

// docs/architecture.md names files and functions that exist. The walk from rfaas_lease_open to the worker takes twelve files, and its
// steps name no other. A function named in a step is in the file of a step, or in a file that the list below the steps names.
func TestArchitecturePage(t *testing.T) {
	page := source(t, "docs/architecture.md")
	for _, file := range pageFile.FindAllString(page, -1) {
		if strings.Contains(file, "/") {
			source(t, file)
		}
	}
	_, walk, _ := strings.Cut(page, "## From rfaas_lease_open")
	walk, _, _ = strings.Cut(walk, "\n## ")
	steps, notes, found := strings.Cut(walk, "\nThe way back: ")
	if !found {
		t.Fatal("the walk has no way back")
	}
	var files []string
	for _, m := range pageStep.FindAllStringSubmatch(steps, -1) {
		files = append(files, m[1])
	}
	if len(files) != 12 {
		t.Errorf("the walk has %d steps with a file, want 12: %v", len(files), files)
	}
	for _, file := range pageFile.FindAllString(steps, -1) {
		if !slices.Contains(files, file) {
			t.Errorf("a step names %s, which is not the file of a step", file)
		}
	}
	files = append(files, pageFile.FindAllString(notes, -1)...)
	text := map[string]string{}
	for _, file := range files {
		text[file] = source(t, file)
	}
	for _, m := range pageFunction.FindAllStringSubmatch(walk, -1) {
		if !slices.ContainsFunc(files, func(file string) bool { return defines(file, text[file], m[1]) }) {
			t.Errorf("the walk names the function %s, which none of its files has", m[1])
		}
	}
	_, rest, _ := strings.Cut(page, "\n## A call\n")
	functions := pageFunction.FindAllStringSubmatch(rest, -1)
	if len(functions) < 10 {
		t.Errorf("the page names %d functions after the walk", len(functions))
	}
	for _, m := range functions {
		if name := m[1]; strings.Contains(name, "_") && !definedAnywhere(t, name) && !strings.HasSuffix(name, "_ns") {
			t.Errorf("the page names the function %s, which no source has", name)
		}
	}
	// Each step ends in the next: its file calls a function of the next file, or sends it a message.
	for i, call := range walkCalls {
		if !strings.Contains(text[files[i]], call) {
			t.Errorf("%s has no %q, with which step %d goes on", files[i], call, i+2)
		}
	}
}

// walkCalls has for each step but the last what its file goes on with.
var walkCalls = []string{"rfaas_api_acquire_step(", "rfaas_agent_send(", "send_message(", "c.acquire(", "p.Look(", "func (c *shared) first(", "s.stream.Send(",
	"z.Zygote.Spawn(", "z.send(", "wire.SendWithin(z.conn", "dp_worker_live("}

// definedAnywhere reports whether a function is defined in a directory of the client library, the data plane, the worker or internal/grant.
func definedAnywhere(t *testing.T, name string) bool {
	t.Helper()
	for _, dir := range []string{"client/c", "internal/dataplane", "worker", "internal/grant"} {
		paths, err := filepath.Glob(filepath.Join("..", "..", filepath.FromSlash(dir), "*.[cgh]*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if defines(path, string(b), name) {
				return true
			}
		}
	}
	return false
}
