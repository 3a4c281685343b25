package apigen

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Headers for authors of functions. They are written by hand, and their manual pages in section 3 are generated from their comments.
const (
	FunctionHeader  = "worker/rfaas_function.h"
	FunctionCxx     = "worker/rfaas_function.hpp"
	FunctionFortran = "worker/fortran/rfaas_function.f90"
)

// extras is what pages about functions consist of.
type extras struct {
	Overview string
	Cpp      string
	Fortran  string
	Extras   []extra
}

// extra is a function that functions may call.
type extra struct {
	Name, Brief, Declaration, Doc string
}

var (
	topComment   = regexp.MustCompile(`(?s)\A/\*(.*?)\*/`)
	declaredAs   = regexp.MustCompile(`(?s)/\*((?:[^*]|\*[^/])*)\*/\nRFAAS_FUNCTION_EXTRA ([^;]*);`)
	declarations = regexp.MustCompile(`(?m)^RFAAS_FUNCTION_EXTRA `)
	itsName      = regexp.MustCompile(`\b(rfaas_\w+)\(`)
)

// readExtras reads the headers of the repository at root.
func readExtras(root string) (*extras, error) {
	c, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(FunctionHeader)))
	cpp, err2 := os.ReadFile(filepath.Join(root, filepath.FromSlash(FunctionCxx)))
	fortran, err3 := os.ReadFile(filepath.Join(root, filepath.FromSlash(FunctionFortran)))
	if err := errors.Join(err, err2, err3); err != nil {
		return nil, err
	}
	e := &extras{Fortran: firstFortranComment(fortran)}
	if e.Overview, err = firstComment(c); err != nil {
		return nil, fmt.Errorf("%s: %w", FunctionHeader, err)
	}
	if e.Cpp, err = firstComment(cpp); err != nil {
		return nil, fmt.Errorf("%s: %w", FunctionCxx, err)
	}
	for _, m := range declaredAs.FindAllStringSubmatch(string(c), -1) {
		declaration, _, _ := strings.Cut(m[2], " __attribute__")
		name := itsName.FindStringSubmatch(declaration)
		if name == nil {
			return nil, fmt.Errorf("%s: no name in %q", FunctionHeader, declaration)
		}
		doc := commentText(m[1])
		e.Extras = append(e.Extras, extra{name[1], brief(doc), strings.Join(strings.Fields(declaration), " "), doc})
	}
	if n := len(declarations.FindAll(c, -1)); n != len(e.Extras) {
		return nil, fmt.Errorf("%s: %d of %d functions have a comment before them", FunctionHeader, len(e.Extras), n)
	}
	return e, nil
}

func firstComment(file []byte) (string, error) {
	m := topComment.FindSubmatch(file)
	if m == nil {
		return "", errors.New("it does not begin with a comment")
	}
	return commentText(string(m[1])), nil
}

// firstFortranComment is the text of the lines with !> at the beginning of a file.
func firstFortranComment(file []byte) string {
	var lines []string
	for line := range strings.Lines(string(file)) {
		text, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), "!>")
		if !ok {
			break
		}
		lines = append(lines, strings.TrimPrefix(text, " "))
	}
	return strings.Join(lines, "\n")
}

// commentText is the text of a block comment, without the asterisks at the beginning of its lines.
func commentText(comment string) string {
	var lines []string
	for line := range strings.Lines(comment) {
		line = strings.TrimRight(line, " \n")
		lines = append(lines, strings.TrimPrefix(strings.TrimPrefix(line, " *"), " "))
	}
	return strings.Trim(strings.Join(lines, "\n"), "\n")
}

// brief is the beginning of a comment's first sentence, as it continues a name.
func brief(doc string) string {
	text := strings.Join(strings.Fields(doc), " ")
	for _, end := range []string{". ", ", ", ": ", " ("} {
		text, _, _ = strings.Cut(text, end)
	}
	text = strings.TrimSuffix(text, ".")
	return strings.ToLower(text[:1]) + text[1:]
}
