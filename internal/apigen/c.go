package apigen

import (
	"fmt"
	"strconv"
	"strings"
	"text/template"
)

// Width of rfaas.h: of its comments, and of its lines.
const (
	commentWidth = 100
	lineWidth    = 118
	headerWidth  = 120
)

func cFunctions() template.FuncMap {
	return template.FuncMap{
		"cComment":     func(text string) string { return blockComment("", wrap(text, commentWidth)) },
		"cDescription": func(f Item) string { return blockComment("", functionText(f, commentWidth)) },
		"cDeclaration": cDeclaration,
		"cFields":      cFields,
		"cDefines":     cDefines,
		"cInit":        cInit,
		"cParams":      func(f Item) string { return strings.Join(cParams(f), ", ") },
	}
}

// spaced joins a C type and a name.
func spaced(ctype, name string) string {
	if strings.HasSuffix(ctype, "*") {
		return ctype + name
	}
	return ctype + " " + name
}

func cParams(f Item) []string {
	if len(f.Params) == 0 {
		return []string{"void"}
	}
	all := make([]string, len(f.Params))
	for i, p := range f.Params {
		all[i] = spaced(p.Type, p.Name)
		if p.Array {
			all[i] += "[]"
		}
	}
	return all
}

// cDeclaration returns the declaration of a function behind a prefix, in lines of the header's width.
func cDeclaration(prefix string, f Item) string {
	returns := f.Returns
	if returns == "" {
		returns = "int"
	}
	head := prefix + spaced(returns, f.Function) + "("
	line, out := head, ""
	params := cParams(f)
	for i, p := range params {
		p += map[bool]string{true: ")", false: ","}[i == len(params)-1]
		if line != head && len(line)+1+len(p)+1 > lineWidth {
			out += line + "\n"
			line = strings.Repeat(" ", len(head)) + p
			continue
		}
		if line != head {
			line += " "
		}
		line += p
	}
	return out + line
}

// cFields returns the fields of a structure. A short description stands behind its field, a long one before it.
func cFields(s Item) string {
	decls := make([]string, len(s.Fields))
	width := 0
	for i, f := range s.Fields {
		decls[i] = spaced(f.Type, f.Name)
		if f.Len > 0 {
			decls[i] += "[" + strconv.Itoa(f.Len) + "]"
		}
		decls[i] += ";"
		if !long(f.Doc) {
			width = max(width, len(decls[i]))
		}
	}
	var b strings.Builder
	for i, f := range s.Fields {
		switch {
		case f.Doc == "":
			b.WriteString("    " + decls[i] + "\n")
		case long(f.Doc):
			b.WriteString(blockComment("    ", wrap(f.Doc, commentWidth-4)) + "    " + decls[i] + "\n")
		default:
			fmt.Fprintf(&b, "    %-*s /* %s */\n", width, decls[i], strings.TrimSpace(f.Doc))
		}
	}
	return b.String()
}

// long reports whether a description stands on lines of its own, before the item.
func long(doc string) bool {
	doc = strings.TrimSpace(doc)
	return len(doc) > 115 || strings.Contains(doc, "\n") || strings.HasSuffix(doc, ".")
}

// cDefines returns the values of an enum.
func cDefines(e Item) string {
	width := 0
	lines := make([]string, len(e.Values))
	for i, v := range e.Values {
		number := strconv.Itoa(v.Value)
		switch {
		case e.Flags:
			number += "u"
		case v.Value < 0:
			number = "(" + number + ")"
		}
		lines[i] = "#define " + e.Enum + v.Name + " " + number
		if !long(v.Doc) {
			width = max(width, len(lines[i]))
		}
	}
	var b strings.Builder
	for i, v := range e.Values {
		doc := strings.TrimSpace(v.Doc)
		switch {
		case doc == "":
			b.WriteString(lines[i] + "\n")
		case long(v.Doc):
			if i > 0 {
				b.WriteString("\n")
			}
			b.WriteString(blockComment("", wrap(e.Enum+v.Name+": "+doc, commentWidth)) + lines[i] + "\n")
		default:
			if i > 0 && e.Values[i].Value/100 != e.Values[i-1].Value/100 && e.Cpp == "status" {
				b.WriteString("\n")
			}
			fmt.Fprintf(&b, "%-*s /* %s */\n", width, lines[i], doc)
		}
	}
	return b.String()
}

// cInit returns the initialiser of an option structure.
func cInit(s Item) string {
	values := make([]string, len(s.Fields))
	for i, f := range s.Fields {
		switch {
		case f.Name == "struct_size":
			values[i] = "sizeof(" + s.Struct + ")"
		case f.Init != "":
			values[i] = f.Init
		case strings.HasSuffix(f.Type, "*"):
			values[i] = "NULL"
		default:
			values[i] = strconv.Itoa(f.Default)
		}
	}
	const indent, continued = "    { ", " \\\n      "
	lines := wrap(strings.Join(values, ", "), headerWidth-len(indent)-len(" \\"))
	return "#define " + strings.ToUpper(s.Struct) + "_INIT \\\n" + indent + strings.Join(lines, continued) + " }\n"
}
