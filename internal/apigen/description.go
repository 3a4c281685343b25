// Package apigen writes everything that follows from the description of the C API, client/api/rfaas.yaml: rfaas.h, the raw Fortran
// module, the C++ enumerations, the Go constants, the structures and exceptions of Python, the manual pages of section 3 and the table of
// languages.
package apigen

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Description is what the API consists of. The comment at the top of rfaas.yaml explains every key.
type Description struct {
	Version struct {
		Major int
		Minor int
	}
	Brief    string
	Overview string
	Sections []Section
}

// Section is a group of items under one title.
type Section struct {
	Title  string
	Header string // "": rfaas.h
	Doc    string
	Items  []Item
}

// Item is one thing that the API declares. Exactly one of the first fields is set; it is the item's name.
type Item struct {
	Enum     string // the prefix of its values
	Constant string
	Macro    string
	Handle   string
	Number   string
	Struct   string
	Callback string
	Function string

	Doc     string
	Brief   string // of a function: continues the function's name
	Type    string
	Flags   bool   // of an enum: its values are bits
	Value   string // of a constant or macro, in C
	Fortran string // of a constant: its value there; of an enum: "raw" if the module rfaas does not offer it
	Cpp     string
	CppType string `yaml:"cpptype"`
	Go      string
	NoGo    string `yaml:"nogo"` // why Go has no counterpart
	Python  string // of a function: its counterpart in package rfaas, or why there is none
	// Of an enum:
	GoDoc    string `yaml:"godoc"`
	GoPrefix string `yaml:"goprefix"`
	Internal bool   // package internal/api has its values
	Values   []Value
	Options  bool
	Sized    bool
	Fields   []Variable
	Returns  string
	Params   []Variable
	Errors   []Failure
}

// Value is one constant of an enum.
type Value struct {
	Name  string
	Value int
	Doc   string
	GoDoc string `yaml:"godoc"`
	NoGo  bool   `yaml:"nogo"` // package client has no such constant
	// Of a status or class: the exception of Python's own that the exception also is.
	Python string
}

// Variable is a field of a structure or a parameter of a function.
type Variable struct {
	Name     string
	Type     string
	Len      int
	Default  int
	Init     string
	Doc      string
	Buffer   bool
	Nullable bool
	Array    bool
}

// Failure says when a function returns a status.
type Failure struct {
	Status string
	When   string
}

// Name is the item's name.
func (i Item) Name() string {
	return i.Enum + i.Constant + i.Macro + i.Handle + i.Number + i.Struct + i.Callback + i.Function
}

// Read reads and checks the description of the repository at root.
func Read(root string) (*Description, error) {
	text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(Source)))
	if err != nil {
		return nil, err
	}
	d := new(Description)
	dec := yaml.NewDecoder(bytes.NewReader(text))
	dec.KnownFields(true)
	if err := dec.Decode(d); err != nil {
		return nil, fmt.Errorf("%s: %w", Source, err)
	}
	if err := d.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", Source, err)
	}
	return d, nil
}

// Functions returns the functions of all sections, or of the sections that one header declares.
func (d *Description) Functions(headers ...string) (all []Item) {
	for _, s := range d.Sections {
		for _, i := range s.Items {
			if i.Function != "" && (len(headers) == 0 || slices.Contains(headers, s.header())) {
				all = append(all, i)
			}
		}
	}
	return all
}

func (d *Description) structs() map[string]Item {
	all := map[string]Item{}
	for _, s := range d.Sections {
		for _, i := range s.Items {
			if i.Struct != "" {
				all[i.Struct] = i
			}
		}
	}
	return all
}

func (s Section) header() string {
	if s.Header == "" {
		return "rfaas.h"
	}
	return s.Header
}

// inStatus are the Go types of enums that status_gen.go has.
var inStatus = []string{"Status", "Err"}

func (d *Description) check() error {
	var errs []error
	seen := map[string]bool{"CONNECTION class": true}
	once := func(name string) {
		if seen[name] {
			errs = append(errs, fmt.Errorf("%s is described twice", name))
		}
		seen[name] = true
	}
	for _, s := range d.Sections {
		for _, i := range s.Items {
			if i.Enum != "" && (i.GoDoc != "" && i.Go == "" || i.GoDoc == "" && i.Go != "" && !slices.Contains(inStatus, i.Go)) {
				errs = append(errs, fmt.Errorf("%s needs go and godoc, or neither: nothing is generated for Go type %q", i.Enum, i.Go))
			}
			if i.Name() == "" {
				errs = append(errs, fmt.Errorf("section %q has an item without a name", s.Title))
			}
			if i.Enum == "" {
				once(i.Name())
			}
			for _, v := range i.Values {
				once(i.Enum + v.Name)
			}
		}
	}
	for _, f := range d.Functions() {
		if f.Brief == "" || strings.HasSuffix(f.Brief, ".") {
			errs = append(errs, fmt.Errorf("%s needs a brief that continues its name and has no full stop", f.Function))
		}
		if f.Cpp == "" {
			errs = append(errs, fmt.Errorf("%s names no counterpart in C++", f.Function))
		}
		for _, e := range f.Errors {
			if !seen[e.Status] && !seen["RFAAS_"+e.Status] {
				errs = append(errs, fmt.Errorf("%s returns the unknown status %s", f.Function, e.Status))
			}
		}
	}
	return errors.Join(errs...)
}
