package apigen

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestWrapKeepsParagraphsAndProgramText(t *testing.T) {
	got := wrap("one two three\nfour\n\n    f(a,  b);\n\nfive\n", 9)
	want := []string{"one two", "three", "four", "", "    f(a,  b);", "", "five"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestTroffProtectsItsOwnCharacters(t *testing.T) {
	for text, want := range map[string]string{
		"a-b":           `a\-b`,
		`\n`:            `\en`,
		".SH":           `\&.SH`,
		"'quoted'":      `\&'quoted'`,
		"not .first ok": "not .first ok",
	} {
		if got := troff(text); got != want {
			t.Errorf("troff(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestReplacePartTouchesNothingElse(t *testing.T) {
	whole := "before\n! " + begin + "\nold\nlines\n! " + end + "\nafter\n"
	got, err := replacePart([]byte(whole), []byte("new\n"))
	if want := strings.Replace(whole, "old\nlines\n", "new\n", 1); err != nil || string(got) != want {
		t.Errorf("got %q (%v), want %q", got, err, want)
	}
	again, err := replacePart(got, []byte("new\n"))
	if err != nil || string(again) != string(got) {
		t.Errorf("the second time %q (%v)", again, err)
	}
	if _, err := replacePart([]byte("no marks\n"), nil); err == nil {
		t.Error("a file without marks was accepted")
	}
}

// Mistakes in the description are found before anything is written.
func TestMistakesInTheDescription(t *testing.T) {
	for mistake, want := range map[string]string{
		"  - function: f\n    brief: does it\n    cpp: f\n    errors: [{status: NOPE, when: now}]\n": "unknown status NOPE",
		"  - function: f\n    brief: Does it.\n    cpp: f\n":                                         "no full stop",
		"  - function: f\n    brief: does it\n":                                                      "no counterpart in C++",
		"  - handle: h\n  - handle: h\n":                                                             "described twice",
		"  - {enum: E_, go: Kind, type: int}\n":                                                      "go and godoc",
		"  - {enum: E_, godoc: Kind is a kind., type: int}\n":                                        "go and godoc",
		"  - {doc: a text}\n":                                                                        "without a name",
		"  - function: f\n    breif: does it\n":                                                      "breif",
	} {
		root := t.TempDir()
		file := filepath.Join(root, filepath.FromSlash(Source))
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte("sections:\n- title: T\n  items:\n"+mistake), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(root); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", mistake, err, want)
		}
	}
}

func TestFortranNeedsATypeForEveryField(t *testing.T) {
	if _, err := fortranFields(Item{Struct: "s", Fields: []Variable{{Name: "x", Type: "long double"}}}); err == nil {
		t.Error("a field without a Fortran type was accepted")
	}
}

// The pages about functions contain the comments of the headers. A function without a comment is an error.
func TestPagesAboutFunctions(t *testing.T) {
	root := t.TempDir()
	header := "/* Overview.\n *\n *     code();\n */\n\n/* Bytes of it, in all. Elsewhere 0. */\n" +
		"RFAAS_FUNCTION_EXTRA uint32_t rfaas_size(int a,\n    int b) __attribute__((pure));\n"
	write := func(file, text string) {
		path := filepath.Join(root, filepath.FromSlash(file))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(FunctionCxx, "/* For C++. */\n")
	write(FunctionFortran, "!> For Fortran.\n!>     use it\nmodule it\n!> not this\n")
	write(FunctionHeader, header)
	got, err := readExtras(root)
	if err != nil {
		t.Fatal(err)
	}
	want := extra{"rfaas_size", "bytes of it", "uint32_t rfaas_size(int a, int b)", "Bytes of it, in all. Elsewhere 0."}
	if got.Overview != "Overview.\n\n    code();" || got.Cpp != "For C++." || got.Fortran != "For Fortran.\n    use it" || !slices.Equal(got.Extras, []extra{want}) {
		t.Errorf("got %+v", got)
	}
	write(FunctionHeader, header+"\nRFAAS_FUNCTION_EXTRA void rfaas_bare(void);\n")
	if _, err := readExtras(root); err == nil || !strings.Contains(err.Error(), "1 of 2 functions have a comment") {
		t.Errorf("a function without a comment: %v", err)
	}
}
