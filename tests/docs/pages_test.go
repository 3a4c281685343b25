package docs

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// command is a command of a page, as the page has it, without the explanation behind it.
type command struct {
	page, text string
	line       int
}

// firstWord matches the first word of a command. A block that begins with another word has no commands.
var firstWord = regexp.MustCompile(`^(?:[A-Z_]+=\S+ (?:\\\n)?)*(?:ansible-playbook|apt|c\+\+|cc|curl|etcd|executor|export|for|gfortran|make|mpicc|mpirun|pdcp|pdsh|` +
	`resource-manager|rfaas|rfaas-cc|rsync|runuser|sbatch|scripts/\S+|sudo|systemctl|\./\S+)(?:\s|$)`)

// An explanation follows a command after two spaces or a number sign.
var explanation = regexp.MustCompile(`(?m)(?:  +[^ \n].*|\s+# .*)$`)

// commands returns the commands of a page: the lines of indented blocks that begin with a command, and of blocks of the language sh.
func commands(t *testing.T, page string) (all []command) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", page))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(text), "\n")
	fenced, blank, inBlock := false, true, false
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		switch language, isFence := strings.CutPrefix(line, "```"); {
		case isFence:
			fenced = !fenced
			inBlock, blank = fenced && language == "sh", true
			continue
		case fenced && !inBlock:
			continue
		case !fenced && strings.TrimSpace(line) == "":
			blank = true
			continue
		case !fenced && !strings.HasPrefix(line, "    "):
			inBlock, blank = false, false
			continue
		}
		c := strings.TrimSpace(line)
		first := i
		for (strings.HasSuffix(c, "\\") || strings.HasSuffix(c, "&&") || strings.HasSuffix(c, "|") || strings.HasPrefix(c, "for ") && !strings.Contains(c, "done")) && i+1 < len(lines) {
			i++
			c += "\n" + strings.TrimSpace(lines[i])
		}
		if !fenced && blank && !strings.HasPrefix(c, "# ") {
			inBlock = firstWord.MatchString(c)
		}
		blank = false
		if c = explanation.ReplaceAllString(c, ""); inBlock && c != "" && !strings.HasPrefix(c, "# ") {
			all = append(all, command{page: page, text: c, line: first + 1})
		}
	}
	return all
}

// The commands of the pages work. For each command, steps says whether it runs here, as the page has it apart from placeholders, which other test runs
// it, or why no test does. The flags of commands that do not run here are checked too.
func TestCommandsOfPages(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	accounted := map[string]bool{"docs/tutorial.md": true} // TestTutorial
	for _, p := range pages {
		accounted[p.name] = true
	}
	names, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range names {
		name := "docs/" + filepath.Base(path)
		if found := commands(t, name); len(found) > 0 && !accounted[name] {
			t.Errorf("%s has the command %q: the test has no steps for this page", name, found[0].text)
		}
	}
	for _, p := range pages {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			found := commands(t, p.name)
			script, next := "", 0
			for _, c := range found {
				if next == len(p.steps) || p.steps[next].command != c.text {
					t.Fatalf("%s:%d: the next step of the test is not this command: add it to tests/docs/pages_table_test.go, or correct it there:\n%s\nthe step: %+v",
						c.page, c.line, c.text, p.steps[min(next, len(p.steps)-1)])
				}
				s := p.steps[next]
				next++
				switch {
				case s.reason != "":
					checkFlags(t, root, c)
				case s.by != "":
					file, text, _ := strings.Cut(s.by, ": ")
					if b, err := os.ReadFile(filepath.Join(root, file)); err != nil || !strings.Contains(string(b), text) {
						t.Errorf("%s:%d: the test says that %s runs %q by %q, which it does not have (%v)", c.page, c.line, file, c.text, text, err)
					}
					checkFlags(t, root, c)
				default:
					text := c.text
					for i := 0; i+1 < len(s.with); i += 2 {
						if !strings.Contains(text, s.with[i]) {
							t.Errorf("%s:%d: %q does not contain %q", c.page, c.line, c.text, s.with[i])
						}
						text = strings.ReplaceAll(text, s.with[i], s.with[i+1])
					}
					script += s.first + "\n" + fmt.Sprintf("now %s:%d\n", c.page, c.line)
					if s.ready != "" {
						text = fmt.Sprintf("daemon '%s' %s", s.ready, text)
					}
					script += text + s.then + "\n"
				}
			}
			if next < len(p.steps) {
				t.Errorf("%s has no command %q", p.name, p.steps[next].command)
			}
			if t.Failed() || !strings.Contains(script, "\nnow ") {
				return
			}
			testkit.Root(t, "a network and host names of its own")
			run(t, root, p.name, script)
		})
	}
}

// run executes a script on a machine of its own: a network, a host name, processes, and layers over /etc and /var/lib.
func run(t *testing.T, root, page, script string) {
	dir := t.TempDir()
	for p := dir; p != filepath.Clean(os.TempDir()) && p != "/"; p = filepath.Dir(p) { // not the directories of the machine itself
		if err := os.Chmod(p, 0o755); err != nil {
			break
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--uts", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
		"bash", "-euo", "pipefail", "-c", machine+script+"\nnow the end\n")
	cmd.Dir = dir
	cmd.Env = []string{"ROOT=" + root, "DIR=" + dir, "PATH=" + root + "/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8",
		"PKG_CONFIG_PATH=" + dir, "LD_LIBRARY_PATH=" + root + "/lib", "PYTHONPATH=" + root + "/lib/python", "RFAAS_LIBRARY=" + root + "/lib/librfaas.so.0",
		"RFAAS_AGENT=" + root + "/libexec/rfaas-agent", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_oob_tcp_if_include=lo"}
	cmd.WaitDelay = 10 * time.Second
	pc := "Name: %s\nDescription: the tree\nVersion: 0\nCflags: -I" + root + "/include\nLibs: -L" + root + "/lib %s -lrfaas\n"
	for name, libraries := range map[string]string{"rfaas": "", "rfaas-fortran": "-lrfaas_fortran"} {
		if err := os.WriteFile(filepath.Join(dir, name+".pc"), fmt.Appendf(nil, pc, name, libraries), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, page := range []string{"docs/tutorial.md", "docs/programs.md", "README.md"} {
		for _, b := range blocks(t, page) {
			name := b.file
			switch {
			case name == "" && strings.Contains(b.text, "rfaas_mpi_lease_open"):
				name = "pi.c"
			case name == "" && b.language == "python" && page == "README.md":
				name = fmt.Sprintf("python-%d.py", b.line)
			}
			if name != "" {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(b.text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", page, err, out)
	}
}

// If the layers cannot be mounted, the script ends before it changes /etc and /var/lib, which are then those of the machine.
func TestMachineWithoutLayers(t *testing.T) {
	testkit.Root(t, "mounts")
	const before = `
mount -t tmpfs etc /etc
mount -t tmpfs lib /var/lib
touch /etc/hosts
mkdir /etc/rfaas /var/lib/rfaas
mount() { [[ $* != *overlay* ]] && command mount "$@"; }
trap 'find /etc /var/lib -type d; cat /etc/hosts' EXIT
`
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--uts", "--net", "bash", "-euo", "pipefail", "-c", before+machine)
	cmd.Env = []string{"DIR=" + t.TempDir(), "PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	out, err := cmd.Output()
	if want := "/etc\n/etc/rfaas\n/var/lib\n/var/lib/rfaas\n"; err == nil || string(out) != want {
		t.Errorf("%v: what is left:\n%s", err, out)
	}
}

// checkFlags fails the test unless the programs have the commands and flags that the text names.
func checkFlags(t *testing.T, root string, c command) {
	for _, m := range regexp.MustCompile(`(?:^|[\s'])(rfaas|executor|resource-manager)((?: [a-z][a-z-]*)*)((?: [^\n|']*)?)`).FindAllStringSubmatch(c.text, -1) {
		words := strings.Fields(m[2])
		if m[1] != "rfaas" {
			words = nil
		}
		for len(words) > 0 {
			if exec.Command(filepath.Join(root, "bin", m[1]), append(words, "--help")...).Run() == nil {
				break
			}
			words = words[:len(words)-1]
		}
		help, err := exec.Command(filepath.Join(root, "bin", m[1]), append(words, "--help")...).CombinedOutput()
		if err != nil {
			t.Errorf("%s:%d: %v: %s", c.page, c.line, err, help)
		}
		for _, flag := range regexp.MustCompile(`--[a-z][a-z-]+`).FindAllString(m[2]+m[3], -1) {
			if !strings.Contains(string(help), flag) {
				t.Errorf("%s:%d: %s %s has no flag %s", c.page, c.line, m[1], strings.Join(words, " "), flag)
			}
		}
	}
}
