package apigen

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"go/format"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
)

// Built is the directory of the generated files that only the build reads. Other generated files are kept in git, for `go build`, pip and readers of the repository.
const Built = "build/generated"

// Where everything is, relative to the root of the repository.
const (
	Source    = "client/api/rfaas.yaml"
	Header    = "client/c/rfaas.h"
	MPIHeader = "client/mpi/rfaas_mpi.h"
	Enums     = Built + "/rfaas_enums.hpp"
	Cxx       = "client/cpp/rfaas.hpp"
	CxxMPI    = "client/mpi/rfaas_mpi.hpp"
	FortranC  = Built + "/rfaas_c.f90"
	Fortran   = "client/fortran/rfaas.f90"
	MPIModule = "client/mpi/rfaas_mpi.f90"
	GoStatus  = "internal/dataplane/status_gen.go"
	GoEnums   = "client/enums_gen.go"
	GoAPI     = "internal/api/api_gen.go"
	PythonC   = "client/python/ext/rfaas_fields.h"
	Python    = "client/python/rfaas/_generated.py"
	Manual    = Built + "/man3"
	Languages = "docs/languages.md"
)

//go:embed all:templates
var templates embed.FS

// notice stands at the top of every generated file.
const notice = "generated from " + Source + " by internal/apigen (make api): do not edit"

// The lines between which a file that is written by hand has a generated part. Their comment characters differ.
const (
	begin = "begin of what is " + notice
	end   = "end of what is generated"
)

// Files returns every generated file of the repository at root with its contents. Files that have a generated part only are read first.
func Files(root string) (map[string][]byte, error) {
	d, err := Read(root)
	if err != nil {
		return nil, err
	}
	t, err := template.New("").Funcs(functions(d)).ParseFS(templates, "templates/*.tmpl")
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{}
	render := func(file, name string, data any) []byte {
		var b bytes.Buffer
		if e := t.ExecuteTemplate(&b, name, data); e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", file, e))
		}
		return b.Bytes()
	}
	for file, name := range map[string]string{Header: "rfaas.h.tmpl", Enums: "rfaas_enums.hpp.tmpl", FortranC: "rfaas_c.f90.tmpl",
		GoStatus: "status_gen.go.tmpl", GoEnums: "enums_gen.go.tmpl", GoAPI: "api_gen.go.tmpl", Languages: "languages.md.tmpl",
		PythonC: "rfaas_fields.h.tmpl", Python: "_generated.py.tmpl"} {
		files[file] = render(file, name, d)
	}
	for line := range bytes.Lines(files[Header]) {
		if len(line) > headerWidth+1 {
			err = errors.Join(err, fmt.Errorf("a line of %s has more than %d characters: %s", Header, headerWidth, line))
		}
	}
	for _, file := range []string{GoStatus, GoEnums, GoAPI} {
		formatted, e := format.Source(files[file])
		err = errors.Join(err, e)
		files[file] = formatted
	}
	for _, f := range d.Functions() {
		file := Manual + "/" + f.Function + ".3"
		files[file] = render(file, "function.3.tmpl", f)
	}
	written, e := readExtras(root)
	if e != nil {
		return nil, errors.Join(err, e)
	}
	for _, x := range written.Extras {
		file := Manual + "/" + x.Name + ".3"
		files[file] = render(file, "extra.3.tmpl", x)
	}
	files[Manual+"/rfaas_function.3"] = render("rfaas_function.3", "rfaas_function.3.tmpl", written)
	files[Manual+"/rfaas.3"] = render("rfaas.3", "rfaas.3.tmpl", d)
	for file, name := range map[string]string{MPIHeader: "rfaas_mpi.h.tmpl", Fortran: "rfaas.f90.tmpl"} {
		whole, e := os.ReadFile(filepath.Join(root, filepath.FromSlash(file)))
		err = errors.Join(err, e)
		files[file], e = replacePart(whole, render(file, name, d))
		if e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", file, e))
		}
	}
	return files, err
}

// replacePart returns a file with another generated part.
func replacePart(whole, part []byte) ([]byte, error) {
	before, rest, ok := bytes.Cut(whole, []byte(begin))
	_, after, ok2 := bytes.Cut(rest, []byte(end))
	if !ok || !ok2 {
		return nil, fmt.Errorf("no lines %q and %q", begin, end)
	}
	first, _, _ := bytes.Cut(rest, []byte("\n"))
	last := rest[:len(rest)-len(after)-len(end)]
	last = last[bytes.LastIndexByte(last, '\n')+1:]
	return slices.Concat(before, []byte(begin), first, []byte("\n"), part, last, []byte(end), after), nil
}

// Write writes the generated files that have changed, and returns their names. With built, it writes the files in Built, and otherwise those in git.
func Write(root string, built bool) (changed []string, err error) {
	files, err := Files(root)
	if err != nil {
		return nil, err
	}
	for name, contents := range files {
		if strings.HasPrefix(name, Built+"/") != built {
			continue
		}
		path := filepath.Join(root, filepath.FromSlash(name))
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, contents) {
			continue
		}
		changed = append(changed, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			return nil, err
		}
		if err := os.WriteFile(path, contents, 0o666); err != nil { //nolint:gosec // a source file
			return nil, err
		}
	}
	slices.Sort(changed)
	return changed, nil
}

func functions(d *Description) template.FuncMap {
	structs := d.structs()
	all := template.FuncMap{
		"notice":   func() string { return notice },
		"goNotice": func() string { return "generated from " + Source + " by internal/apigen (make api)." },
		"camel":    Camel,
		"lower":    strings.ToLower,
		"join":     strings.Join,
		"sentence": sentence,
		"trim":     strings.TrimSpace,
		"status":   statusName,
		"manual":   func() string { return fmt.Sprintf("rfaas %d.%d", d.Version.Major, d.Version.Minor) },
		"functionsOf": func(header string) []Item {
			return d.Functions(header)
		},
	}
	for _, more := range []template.FuncMap{cFunctions(), fortranFunctions(), manFunctions(d, structs), cppFunctions(), goFunctions(), pythonFunctions(d), languageFunctions(d)} {
		for name, f := range more {
			all[name] = f
		}
	}
	return all
}
