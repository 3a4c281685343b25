package conventions

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/apigen"
)

// The function and the programs that a newcomer copies out of README.md and docs/programs.md must compile.
func TestDocumentedExamplesCompile(t *testing.T) {
	examples := regexp.MustCompile("(?s)```c\n(.*?)```").FindAllStringSubmatch(source(t, "README.md")+source(t, "docs/programs.md"), -1)
	if len(examples) != 3 {
		t.Fatalf("the documents have %d C examples, want the function, the program and the MPI program", len(examples))
	}
	for _, m := range examples {
		compiler := "gcc"
		if strings.Contains(m[1], "MPI_Init") {
			compiler = "mpicc"
		}
		cmd := exec.Command(compiler, "-Wall", "-Werror", "-fsyntax-only", "-I../../client/c", "-I../../client/mpi", "-x", "c", "-")
		cmd.Stdin = strings.NewReader(m[1])
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s%s", compiler, err, out, m[1])
		}
	}
}

// Settings that docs/operations.md names exist.
func TestDocumentedSettingsExist(t *testing.T) {
	text := source(t, "docs/operations.md")
	known := source(t, "internal/config/executor.go") + source(t, "internal/config/manager.go") +
		`{"help", {"print-config", {"check-config", {"config",`
	agent := source(t, "internal/agent/settings.go")
	// Flags of the rfaas program, systemctl, runuser and etcd stand on lines that call it.
	daemons := regexp.MustCompile("(?m)^ *(?:rfaas|systemctl|runuser|etcd) .*$|`rfaas [^`]*`").ReplaceAllString(text, "")
	names := regexp.MustCompile("--([a-z][a-z-]+)").FindAllStringSubmatch(daemons, -1)
	_, table, _ := strings.Cut(text, "| setting | default |")
	table, _, _ = strings.Cut(table, "\n\n")
	for _, row := range strings.Split(table, "\n")[2:] {
		for name := range strings.SplitSeq(strings.Split(row, "|")[1], ",") {
			names = append(names, []string{"", strings.TrimSpace(name)})
		}
	}
	if len(names) < 15 {
		t.Fatalf("docs/operations.md names %d settings", len(names))
	}
	for _, n := range names {
		if !strings.Contains(known, `{"`+n[1]+`",`) && !strings.Contains(agent, `, "`+n[1]+`", `) {
			t.Errorf("docs/operations.md names the setting %q, which neither internal/config nor internal/agent has", n[1])
		}
	}
}

// The sources contain the messages that the table of docs/operations.md quotes. In the table, ... stands for the parts that vary.
func TestQuotedMessagesExist(t *testing.T) {
	_, table, _ := strings.Cut(source(t, "docs/operations.md"), "| message | what to check |\n|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var sources strings.Builder
	for _, dir := range []string{"client", "cmd", "internal", "worker"} {
		err := filepath.WalkDir(filepath.Join("..", "..", dir), func(path string, d os.DirEntry, err error) error {
			if ext := filepath.Ext(path); err != nil || strings.HasSuffix(path, "_test.go") || ext != ".go" && ext != ".c" {
				return err
			}
			b, err := os.ReadFile(path)
			sources.Write(b)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	rows := strings.Split(strings.TrimSpace(table), "\n")
	if len(rows) < 8 {
		t.Errorf("docs/operations.md has %d messages", len(rows))
	}
	for _, row := range rows {
		for part := range strings.SplitSeq(strings.Split(row, "|")[1], "...") {
			if part = strings.Trim(part, " :,"); part != "" && !strings.Contains(sources.String(), part) {
				t.Errorf("docs/operations.md quotes %q, which no source has", part)
			}
		}
	}
}

// rfaas(3) has every environment variable that the client library and the control plane behind it read.
func TestManualNamesVariables(t *testing.T) {
	manual := generated(t, apigen.Manual+"/rfaas.3")
	_, manual, _ = strings.Cut(manual, ".SH ENVIRONMENT")
	var files []string
	for _, pattern := range []string{"client/c/*.c", "internal/grant/*.go", "internal/identity/*.go", "internal/control/*.go"} {
		found, err := filepath.Glob(filepath.Join("..", "..", pattern))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	read := map[string]bool{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?:getenv\(|Env[A-Za-z]*\s*= )"(RFAAS_[A-Z_]+)"`).FindAllStringSubmatch(string(b), -1) {
			read[m[1]] = true
		}
	}
	for name := range read {
		if !regexp.MustCompile(`\b` + name + `\b`).MatchString(manual) {
			t.Errorf("rfaas(3) does not describe %s", name)
		}
	}
	if len(read) < 8 {
		t.Errorf("the client reads only %v", read)
	}
}

// documents returns the paths of all documents, from the root of the repository.
func documents(t *testing.T) (all []string) {
	t.Helper()
	out, err := exec.Command("git", "-C", "../..", "ls-files", "--cached", "--others", "--exclude-standard", "*.md").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.FieldsSeq(string(out)) {
		if !strings.Contains(name, "/testdata/") && !strings.HasPrefix(name, "internal/cli/manual/") {
			all = append(all, name)
		}
	}
	return all
}

// anchors returns the anchors of a document's headings, as web pages of repositories and the site name them.
func anchors(text string) map[string]bool {
	all := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^#+ (.*)$").FindAllStringSubmatch(text, -1) {
		heading := regexp.MustCompile(`[^\w\- ]`).ReplaceAllString(strings.ToLower(m[1]), "")
		all[strings.ReplaceAll(heading, " ", "-")] = true
	}
	return all
}

// Links from one document to another lead somewhere, and to a heading that exists.
func TestDocumentLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:\s]*)(?:#([^)\s]+))?\)`)
	n := 0
	for _, doc := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(source(t, doc), -1) {
			to := doc
			if m[1] != "" {
				to = filepath.Join(filepath.Dir(doc), m[1])
			}
			if _, err := os.Stat(filepath.Join("..", "..", to)); err != nil {
				t.Errorf("%s links to %s: %v", doc, m[1], err)
			} else if m[2] != "" && !anchors(source(t, to))[m[2]] {
				t.Errorf("%s links to %s#%s: there is no such heading", doc, to, m[2])
			}
			n++
		}
	}
	if n < 80 {
		t.Errorf("the documents have %d links", n)
	}
}

// The navigation of the site has every document that is installed.
func TestSiteHasAllDocuments(t *testing.T) {
	nav := source(t, "packaging/mkdocs.yml")
	for _, doc := range documents(t) {
		if (filepath.Dir(doc) == "." || filepath.Dir(doc) == "docs") && !strings.Contains(nav, ": "+doc+"\n") {
			t.Errorf("packaging/mkdocs.yml does not have %s", doc)
		}
	}
}

// Every test that docs/THREAT_MODEL.md and benchmarks/README.md name exists.
func TestDocumentsNameTests(t *testing.T) {
	var tests, cases strings.Builder
	for dir, all := range map[string]*strings.Builder{"../..": &tests, "../../tests/c": &cases} {
		err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() && d.Name() == "build" {
				if err == nil {
					err = filepath.SkipDir
				}
				return err
			}
			if strings.HasSuffix(path, "_test.go") || all == &cases && strings.HasSuffix(path, ".c") {
				b, err := os.ReadFile(path)
				all.Write(b)
				return err
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for doc, atLeast := range map[string]int{"docs/THREAT_MODEL.md": 40, "benchmarks/README.md": 20} {
		found := regexp.MustCompile("\\b((?:Test|Fuzz)[A-Z][A-Za-z0-9]+)\\b|`([a-z-]+/[a-z0-9-]+)`").FindAllStringSubmatch(source(t, doc), -1)
		for _, m := range found {
			if name := m[1] + m[2]; m[1] == "" && !strings.Contains(cases.String(), `"`+name+`"`) && !strings.Contains(cases.String(), `"`+name+`@`) &&
				!strings.Contains(cases.String(), `, "`+name) || m[2] == "" && !strings.Contains(tests.String(), "func "+name+"(") {
				t.Errorf("%s says that %s shows something: there is no such test", doc, name)
			}
		}
		if len(found) < atLeast {
			t.Errorf("%s names %d tests", doc, len(found))
		}
	}
}

// The newest release of CHANGELOG.md is the one that CITATION.cff and Spack's recipe name. Without a section for changes after it, it is that of the
// API, from which untagged builds get their version.
func TestReleaseIsNamedEverywhere(t *testing.T) {
	changes := source(t, "CHANGELOG.md")
	m := regexp.MustCompile(`(?m)^## (\d+\.\d+)(\.\d+) - \d{4}-\d\d-\d\d$`).FindStringSubmatch(changes)
	if m == nil {
		t.Fatal("CHANGELOG.md has no section of a release, such as: ## 0.4.0 - 2026-11-27")
	}
	release := m[1] + m[2]
	if !strings.Contains(source(t, "CITATION.cff"), "\nversion: "+release+"\n") {
		t.Errorf("CITATION.cff does not have the version %s of CHANGELOG.md", release)
	}
	if !strings.Contains(source(t, "packaging/spack/packages/rfaas/package.py"), fmt.Sprintf("version(%q, tag=%q)", release, "v"+release)) {
		t.Errorf("Spack's recipe does not have the version %s of CHANGELOG.md", release)
	}
	header := regexp.MustCompile(`#define RFAAS_VERSION_M[A-Z]*OR (\d+)`).FindAllStringSubmatch(source(t, "client/c/rfaas.h"), -1)
	if len(header) != 2 {
		t.Fatal("rfaas.h has no version")
	}
	if api := header[0][1] + "." + header[1][1]; api != m[1] && !strings.Contains(changes, "\n## Unreleased\n") {
		t.Errorf("rfaas.h has the version %s, and the newest release of CHANGELOG.md is %s", api, release)
	}
}
