package conventions

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/apigen"
)

// Every function and constant of the description can be used from C++ and from Fortran, and a test of each language uses it.
func TestLanguagesHaveTheWholeAPI(t *testing.T) {
	comments := regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	cxx := comments.ReplaceAllString(source(t, apigen.Cxx)+source(t, apigen.CxxMPI)+generated(t, apigen.Enums), "")
	fortran := joined(source(t, apigen.Fortran) + source(t, apigen.MPIModule))
	raw := joined(generated(t, apigen.FortranC) + source(t, apigen.MPIModule))
	cxxTests, fortranTests := tests(t, ".cpp"), tests(t, ".f90")
	d := description(t)
	for _, f := range d.Functions() {
		name := f.Function
		if !strings.Contains(cxx, name+"(") {
			t.Errorf("C++ does not call %s", name)
		}
		_, last, ok := strings.Cut(f.Cpp, "::")
		if !ok {
			last = f.Cpp
		}
		if word := regexp.MustCompile(`\b` + last + `\b`); !word.MatchString(cxx) {
			t.Errorf("%s says that %s is %s in C++, which the headers do not have", apigen.Source, name, f.Cpp)
		} else if !word.MatchString(cxxTests) {
			t.Errorf("no C++ program of tests/capi/testdata uses %s (%s)", f.Cpp, name)
		}
		if !strings.Contains(raw, "bind(c, name='"+name+"'") && !strings.Contains(raw, "bind(c, name='"+name+"_fortran'") {
			t.Errorf("Fortran does not bind %s", name)
		}
		if !regexp.MustCompile(`(?m)^ *public ::.*\b` + name + `\b`).MatchString(fortran) {
			t.Errorf("Fortran does not offer %s", name)
		}
		if !regexp.MustCompile(`\b` + name + `\(`).MatchString(fortranTests) {
			t.Errorf("no Fortran program of tests/capi/testdata calls %s", name)
		}
	}
	for _, s := range d.Sections {
		for _, i := range s.Items {
			if i.Constant != "" && i.CppType != "" && !strings.Contains(cxx, " = "+i.Constant+";") {
				t.Errorf("C++ has no constant for %s", i.Constant)
			}
			if i.Constant != "" && !strings.Contains(raw+fortran, " :: "+i.Constant+" =") {
				t.Errorf("Fortran has no parameter %s", i.Constant)
			}
			for _, v := range i.Values {
				if !strings.Contains(cxx, " = "+i.Enum+v.Name+",") {
					t.Errorf("C++ has no enumerator for %s", i.Enum+v.Name)
				}
				if !strings.Contains(raw, " :: "+i.Enum+v.Name+" =") {
					t.Errorf("Fortran has no parameter %s", i.Enum+v.Name)
				}
			}
		}
	}
}

// joined returns Fortran with every statement on a line of its own.
func joined(text string) string {
	return regexp.MustCompile(`&\n\s*`).ReplaceAllString(text, "")
}

// tests returns the programs of tests/capi/testdata with this ending.
func tests(t *testing.T, ending string) string {
	t.Helper()
	var all strings.Builder
	names, err := filepath.Glob("../../tests/capi/testdata/*" + ending)
	if err != nil || len(names) == 0 {
		t.Fatalf("no programs %s: %v", ending, err)
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(b)
	}
	return all.String()
}
