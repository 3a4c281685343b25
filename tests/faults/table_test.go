package faults

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// The tests that README.md names exist.
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

// namedTest says what is wrong with the name of a test, "" if it exists.
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
