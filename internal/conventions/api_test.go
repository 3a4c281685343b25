package conventions

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/apigen"
)

func description(t *testing.T) *apigen.Description {
	t.Helper()
	d, err := apigen.Read("../..")
	if err != nil {
		t.Fatal(err)
	}
	if n := len(d.Functions()); n < 35 {
		t.Fatalf("%s describes %d functions", apigen.Source, n)
	}
	return d
}

// generated returns the contents of a generated file that is not in git.
func generated(t *testing.T, name string) string {
	t.Helper()
	files, err := apigen.Files("../..")
	if err != nil || files[name] == nil {
		t.Fatalf("%s: not generated (%v)", name, err)
	}
	return string(files[name])
}

// The generated files in git are what the generator writes from the description.
func TestGeneratedFilesAreUpToDate(t *testing.T) {
	files, err := apigen.Files("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !strings.HasPrefix(name, apigen.Built+"/") {
			b, err := os.ReadFile(filepath.Join("../..", filepath.FromSlash(name)))
			if err != nil {
				t.Errorf("%v: run make api", err)
			} else if string(b) != string(files[name]) {
				t.Errorf("%s is not what the generator writes: run make api", name)
			}
		}
		if first, _, _ := strings.Cut(string(files[name]), "\n"); !strings.Contains(first, "generated from "+apigen.Source) && !strings.Contains(first, "generated from "+apigen.FunctionHeader) &&
			name != apigen.MPIHeader && name != apigen.Fortran { // these two have a generated part
			t.Errorf("%s does not begin with a notice that it is generated", name)
		}
	}
}

// Every generated number is used by hand-written Go code, so that it replaces a number written there.
func TestGeneratedNumbersAreUsed(t *testing.T) {
	code, err := exec.Command("git", "-C", "../..", "grep", "-h", "-E", `\bapi\.[A-Z]`, "--", "*.go", ":!*_test.go").Output()
	if err != nil {
		t.Fatal(err)
	}
	bindings := source(t, "internal/control/api.go")
	for _, s := range description(t).Sections {
		for _, i := range s.Items {
			switch prefix := i.APIPrefix(); {
			case i.Constant != "" && i.Go != "" && !bytes.Contains(code, []byte("api."+i.Go)):
				t.Errorf("api.%s is generated, and no code uses it", i.Go)
			case prefix != "" && !bytes.Contains(code, []byte("api."+prefix+"Names")):
				t.Errorf("api.%sNames is generated, and no code uses it", prefix)
			case prefix == "Wait" || prefix == "Start": // the control protocol has the same enumerations
				for _, v := range i.Values {
					if name := i.APIPrefix() + apigen.Camel(v.Name); !strings.Contains(bindings, "_"+v.Name+"-api."+name+"]") {
						t.Errorf("internal/control/api.go does not compare %s%s with the control protocol", i.Enum, v.Name)
					}
				}
			}
		}
	}
}

// What the table of languages names in the Go client exists.
func TestGoCounterpartsExist(t *testing.T) {
	declared := map[string]bool{"Status.String": true} // an alias of a type of the data plane
	names, err := filepath.Glob("../../client/*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			collect(d, declared)
		}
	}
	if len(declared) < 50 {
		t.Fatalf("package client declares %d names", len(declared))
	}
	declared["mpilease.Open"] = true // package mpi/mpilease
	for _, f := range description(t).Functions() {
		if f.Go != "" && !declared[f.Go] {
			t.Errorf("%s says that %s is %s in Go, which package client does not declare", apigen.Source, f.Function, f.Go)
		}
	}
}

// What the table of languages names in the package of Python exists there, and a test of the package uses it.
func TestPythonCounterpartsExist(t *testing.T) {
	all := func(pattern string) string {
		names, err := filepath.Glob("../../client/python/" + pattern)
		if err != nil || len(names) == 0 {
			t.Fatalf("no files %s: %v", pattern, err)
		}
		var text strings.Builder
		for _, name := range names {
			b, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			text.Write(b)
		}
		return text.String()
	}
	declared, used := all("rfaas/*.py")+all("rfaas/*.pyi"), all("tests/*.py")
	for _, f := range description(t).Functions() {
		if f.Python == "" || strings.HasPrefix(f.Python, "not needed") {
			continue
		}
		class, member, found := strings.Cut(f.Python, ".")
		last := class
		known := regexp.MustCompile(`(?m)^(class|def) ` + class + `\b`).MatchString(declared)
		if found {
			last = member
			known = known && regexp.MustCompile(`(?m)^    def `+member+`\(|^    `+member+`: |self\.`+member+`\b`).MatchString(declared)
		}
		if !known {
			t.Errorf("%s says that %s is %s in Python, which the package does not have", apigen.Source, f.Function, f.Python)
		}
		if !regexp.MustCompile(`\b` + last + `\b`).MatchString(used) {
			t.Errorf("no test in client/python/tests uses %s (%s)", f.Python, f.Function)
		}
	}
}

// collect notes the names of functions, types, methods and fields, as Type.Method and Type.Field.
func collect(d ast.Decl, declared map[string]bool) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		name := d.Name.Name
		if d.Recv != nil {
			of := d.Recv.List[0].Type
			if star, ok := of.(*ast.StarExpr); ok {
				of = star.X
			}
			if id, ok := of.(*ast.Ident); ok {
				name = id.Name + "." + name
			}
		}
		declared[name] = true
	case *ast.GenDecl:
		for _, s := range d.Specs {
			spec, ok := s.(*ast.TypeSpec)
			if !ok {
				continue
			}
			declared[spec.Name.Name] = true
			if fields, ok := spec.Type.(*ast.StructType); ok {
				for _, f := range fields.Fields.List {
					for _, n := range f.Names {
						declared[spec.Name.Name+"."+n.Name] = true
					}
				}
			}
		}
	}
}
