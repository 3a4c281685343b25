package conventions

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// testNames returns the names of all test functions of the repository.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	function := regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz|Example)\w*)\(`)
	err := filepath.WalkDir(filepath.Join("..", ".."), func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "build" || d.Name() == ".git") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		b, err := os.ReadFile(path)
		for _, m := range function.FindAllSubmatch(b, -1) {
			names[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// The tests that the lanes and the benchmarks select by name exist: a pattern that matches nothing would run nothing and succeed. A name
// is that of a test, or ends in .* and is the beginning of one.
func TestSelectedTestsExist(t *testing.T) {
	names := testNames(t)
	selected := regexp.MustCompile(`\b((?:Test|Fuzz|Benchmark)[A-Z]\w*)(\.\*)?`)
	for _, file := range []string{"tests/run", "Makefile", "scripts/bench"} {
		text := source(t, file)
		if n := len(selected.FindAllString(text, -1)); n < 1 {
			t.Errorf("%s names no tests", file)
		}
		for _, m := range selected.FindAllStringSubmatch(text, -1) {
			found := names[m[1]]
			for name := range names {
				found = found || m[2] != "" && strings.HasPrefix(name, m[1])
			}
			if !found {
				t.Errorf("%s names the test %s, which does not exist", file, m[0])
			}
		}
		// A pattern without "Test" would escape the check above.
		for _, m := range regexp.MustCompile(`-(?:test\.)?(?:run|skip) ([A-Za-z]\w*)`).FindAllStringSubmatch(text, -1) {
			if !names[m[1]] {
				t.Errorf("%s selects the test %s, which does not exist: write the whole name", file, m[1])
			}
		}
	}
}

// The lane go runs each test that is shorter or left out under the race detector, and otherwise no test of the packages that the lane race runs.
func TestLongTestsRunWithoutRaceDetector(t *testing.T) {
	makefile := source(t, "Makefile")
	variable := func(name string) []string {
		_, value, _ := strings.Cut(makefile, "\n"+name+" := ")
		value, _, _ = strings.Cut(strings.ReplaceAll(value, "\\\n", " "), "\n")
		return strings.Fields(value)
	}
	tests, packages := variable("GO_LONG"), variable("GO_LONG_PACKAGES")
	left := regexp.MustCompile(`grep -v -E '(/\(client.*\))'`).FindStringSubmatch(makefile)
	if len(tests) == 0 || len(packages) == 0 || left == nil {
		t.Fatal("the Makefile has no GO_LONG, GO_LONG_PACKAGES or RACE_PACKAGES")
	}
	notRaced := regexp.MustCompile(strings.ReplaceAll(left[1], "$$", "$"))
	function := regexp.MustCompile(`(?ms)^func (\w+)\(.*?^}`)
	long := regexp.MustCompile(`testing\.Short\(\)`)
	err := filepath.WalkDir(filepath.Join("..", ".."), func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "build" || d.Name() == ".git") {
			return filepath.SkipDir
		}
		dir := strings.TrimPrefix(filepath.ToSlash(filepath.Dir(path)), "../../")
		if !strings.HasSuffix(path, "_test.go") || dir == "internal/conventions" || notRaced.MatchString("/"+dir) {
			return nil
		}
		b, err := os.ReadFile(path)
		text := string(b)
		whole := strings.HasPrefix(text, "//go:build !race\n")
		helpers := map[string]bool{}
		functions := function.FindAllStringSubmatch(text, -1)
		for _, f := range functions {
			if !strings.HasPrefix(f[1], "Test") && long.MatchString(f[0]) {
				helpers[f[1]+"("] = true
			}
		}
		for _, f := range functions {
			is := whole || long.MatchString(f[0])
			for helper := range helpers {
				is = is || strings.Contains(f[0], helper)
			}
			if is && strings.HasPrefix(f[1], "Test") && !(slices.Contains(tests, f[1]) && slices.Contains(packages, "./"+dir)) {
				t.Errorf("%s: %s is shorter or left out in the lane race: add it to GO_LONG, and %s to GO_LONG_PACKAGES, in the Makefile", path, f[1], dir)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// The workflow of a public runner runs every lane, except those that make what the others need.
func TestWorkflowHasAllLanes(t *testing.T) {
	_, lanes, _ := strings.Cut(source(t, "tests/run"), `LANES="`)
	lanes, _, _ = strings.Cut(lanes, `"`)
	_, matrix, _ := strings.Cut(source(t, ".github/workflows/test.yml"), "lane: [")
	matrix, _, _ = strings.Cut(matrix, "]")
	have := strings.Fields(strings.ReplaceAll(matrix, ",", " "))
	for line := range strings.SplitSeq(lanes, "\n") {
		if lane := strings.Fields(line)[0]; lane != "deps" && lane != "build" && !slices.Contains(have, lane) {
			t.Errorf(".github/workflows/test.yml does not run the lane %s", lane)
		}
	}
}
