package docs

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// block is a fenced block of a document.
type block struct {
	language, text string
	file           string // its name, if the sentence before it ends in that
	line           int
}

// blocks returns the fenced blocks of a document.
func blocks(t *testing.T, name string) (all []block) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", name))
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile(`(?:^|\s)([a-z]+\.(?:c|py|f90|cpp))(?:, which [^.:]*)?:$`)
	before, open := "", false
	for i, line := range strings.Split(string(text), "\n") {
		switch fence, isFence := strings.CutPrefix(line, "```"); {
		case isFence && !open:
			b := block{language: fence, line: i + 1}
			if m := named.FindStringSubmatch(before); m != nil {
				b.file = m[1]
			}
			all, open = append(all, b), true
		case isFence:
			open, before = false, ""
		case open:
			all[len(all)-1].text += line + "\n"
		case strings.TrimSpace(line) != "":
			before = line
		}
	}
	return all
}

// The commands of the tutorial work, and print what the tutorial says. Its files are those of its own blocks, and of docs/programs.md.
func TestTutorial(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("rfaas.pc", "Name: rfaas\nDescription: the tree\nVersion: 0\nCflags: -I"+root+"/include\nLibs: -L"+root+"/lib -lrfaas\n")
	for _, b := range blocks(t, "docs/programs.md") {
		if b.file == "" && strings.Contains(b.text, "rfaas_mpi_lease_open") {
			b.file = "pi.c"
		}
		if b.file != "" {
			write(b.file, b.text)
		}
	}
	environment := append(os.Environ(), "PATH="+root+"/bin:/usr/bin:"+os.Getenv("PATH"), "PKG_CONFIG_PATH="+dir, "LD_LIBRARY_PATH="+root+"/lib",
		"PYTHONPATH="+root+"/lib/python", "RFAAS_LIBRARY="+root+"/lib/librfaas.so.0", "RFAAS_AGENT="+root+"/libexec/rfaas-agent",
		"XDG_RUNTIME_DIR="+dir, "HOME="+dir, "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_rmaps_base_oversubscribe=1")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	all, ran, compared := blocks(t, "docs/tutorial.md"), 0, 0
	for i, b := range all {
		if b.file != "" {
			write(b.file, b.text)
		}
		if b.language != "sh" {
			continue
		}
		cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", b.text)
		cmd.Dir, cmd.Env, cmd.WaitDelay = dir, environment, 10*time.Second
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Run(); err != nil {
			t.Fatalf("docs/tutorial.md:%d: %v\n%s%s%s", b.line, err, b.text, out.String(), errs.String())
		}
		ran++
		if i+1 < len(all) && all[i+1].language == "text" {
			if got := out.String(); got != all[i+1].text {
				t.Errorf("docs/tutorial.md:%d prints\n%sthe document says\n%s%s", b.line, got, all[i+1].text, errs.String())
			}
			compared++
		}
	}
	if ran < 6 || compared < 5 {
		t.Errorf("docs/tutorial.md has %d commands, and says of %d what they print", ran, compared)
	}
}
