package faults

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Every test that README.md names exists.
func TestTableOfFaults(t *testing.T) {
	b, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(b), "## Faults of the first rFaaS")
	rows := regexp.MustCompile(`(?m)^\| (\d+) \| (.*) \| (.*) \|$`).FindAllStringSubmatch(table, -1)
	if len(rows) != 21 {
		t.Fatalf("the table has %d faults, want 21", len(rows))
	}
	named := regexp.MustCompile(`([a-z0-9_/]+\.(?:go|c)):([\w/-]+)`)
	for i, row := range rows {
		if want := i + 1; row[1] != strconv.Itoa(want) {
			t.Errorf("fault %s stands in row %d", row[1], want)
		}
		tests := named.FindAllStringSubmatch(row[3], -1)
		if len(tests) == 0 && !strings.HasPrefix(row[3], "comes with") {
			t.Errorf("fault %s has no test: %s", row[1], row[3])
		}
		for _, m := range tests {
			if err := namedTest(m[1], m[2]); err != "" {
				t.Errorf("fault %s: %s", row[1], err)
			}
		}
	}
}

// namedTest returns what is wrong with the name of a test; "" if it exists.
func namedTest(file, name string) string {
	b, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return err.Error()
	}
	definition := `(?m)^func ` + name + `\(`
	if strings.HasSuffix(file, ".c") {
		definition = `CASE\(.*"` + name + `["@]`
	}
	if !regexp.MustCompile(definition).Match(b) {
		return file + " has no test " + name
	}
	return ""
}

// Every end-to-end test of the client, every program of the C API's tests and every MPI example runs across two machines, or
// README.md says why not.
func TestEndToEndAcrossMachines(t *testing.T) {
	read := func(path string) string {
		b, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	all := func(pattern, text string) (list []string) {
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			list = append(list, m[1])
		}
		return list
	}
	paths := func(globs ...string) (list []string) {
		for _, g := range globs {
			found, err := filepath.Glob(filepath.Join(root, g))
			if err != nil || len(found) == 0 {
				t.Fatalf("%s: %v, %v", g, found, err)
			}
			list = append(list, found...)
		}
		return list
	}
	crosses := map[string]bool{}
	for _, names := range all(`TWOVM_(?:HERE|THERE)\+?='\|?([\w|]+)'`, read("tests/run")) {
		for name := range strings.SplitSeq(names, "|") {
			crosses[name] = true
		}
	}
	programs := read("tests/faults/twovm_test.go")
	for _, name := range all(`"(?:build/twovm/)?(\w+_test)"`, programs) {
		crosses[name] = true
	}
	for _, name := range all(`"build/examples/(\w+)"`, programs) {
		crosses[name] = true
	}
	_, table, _ := strings.Cut(read("tests/faults/README.md"), "What stays on one machine")
	table, _, _ = strings.Cut(table, "\n## ")
	stays := map[string]bool{}
	for _, row := range all(`(?m)^\| ([^|]+) \|`, table) {
		for _, name := range all(`(Test\w+|\w+_test|\w+\.py|examples/mpi/\w+)\b`, row) {
			stays[strings.TrimSuffix(filepath.Base(name), ".py")] = true
		}
	}

	there := map[string]bool{}
	for _, path := range paths("client/*_test.go") {
		for _, name := range all(`(?m)^func (Test\w+)\(t `, read(strings.TrimPrefix(path, root+"/"))) {
			there[name] = name != "TestClientProcess" // belongs to TestClientKilled
		}
	}
	for _, path := range paths("tests/capi/testdata/*_test.*", "examples/mpi/*") {
		there[strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))] = true
	}
	for name, counts := range there {
		if counts && crosses[name] == stays[name] {
			t.Errorf("%s runs across machines: %v; README.md says that it stays on one: %v", name, crosses[name], stays[name])
		}
	}
	for name := range crosses {
		if !there[name] {
			t.Errorf("there is no %s to run across machines", name)
		}
	}
	for name := range stays {
		if !there[name] {
			t.Errorf("README.md says why %s stays on one machine: there is none", name)
		}
	}
	raced := all(`\b(Test\w+)`, strings.Join(all(`(?m)^RACE_CLIENT := ((?:.*\\\n)*.*)`, read("Makefile")), " "))
	if len(raced) == 0 {
		t.Error("the Makefile has no RACE_CLIENT")
	}
	for _, name := range raced {
		if !there[name] {
			t.Errorf("the Makefile names %s for the race detector: the client has no such test", name)
		}
	}
}

// The tests that the lane softroce leaves out because something else covers them on verbs are those of README.md's table, which says what.
func TestLeftOutOnVerbs(t *testing.T) {
	read := func(path string) string {
		b, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	test := regexp.MustCompile(`\bTest\w+`)
	script := map[string]bool{}
	for _, line := range regexp.MustCompile(`(?m)^(?:CLIENT|CAPI)_NOT_VERBS\+?='.*'`).FindAllString(read("tests/run"), -1) {
		for _, name := range test.FindAllString(line, -1) {
			script[name] = true
		}
	}
	_, table, _ := strings.Cut(read("tests/faults/README.md"), "## Only on other providers")
	table, _, _ = strings.Cut(table, "\n## ")
	documented := map[string]bool{}
	for _, row := range regexp.MustCompile(`(?m)^\| ([^|]+) \|`).FindAllStringSubmatch(table, -1) {
		for _, name := range test.FindAllString(row[1], -1) {
			documented[name] = true
		}
	}
	if len(script) == 0 || !maps.Equal(script, documented) {
		t.Errorf("tests/run leaves out on verbs: %v\nREADME.md says: %v", slices.Sorted(maps.Keys(script)), slices.Sorted(maps.Keys(documented)))
	}
}
