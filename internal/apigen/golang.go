package apigen

import (
	"fmt"
	"strings"
	"text/template"
)

// The longest line of a comment in the Go files.
const goWidth = 130

func goFunctions() template.FuncMap {
	return template.FuncMap{
		"goConstant": goConstant,
		// The name of RFAAS_EVENT_WORKER_DIED is "worker died".
		"goName": func(name string) string { return strings.ToLower(strings.ReplaceAll(name, "_", " ")) },
		"goComment": func(doc string) string {
			doc = strings.TrimSpace(doc)
			if doc == "" || long(doc) {
				return ""
			}
			return " // " + doc
		},
	}
}

// APIPrefix is what the names of an enum begin with in package internal/api: Event for RFAAS_EVENT_.
func (i Item) APIPrefix() string {
	if !i.Internal {
		return ""
	}
	return Camel(strings.TrimSuffix(strings.TrimPrefix(i.Enum, "RFAAS_"), "_"))
}

// goConstant declares one value of an enum in package client. A description for Go stands before the constant, else that of C behind it.
func goConstant(e Item, v Value) string {
	name := e.GoPrefix + Camel(v.Name)
	line := fmt.Sprintf("\t%s %s = %d", name, e.Go, v.Value)
	if v.GoDoc == "" {
		return line + " // " + strings.TrimSpace(v.Doc)
	}
	return prefixed("\t// ", wrap(name+": "+v.GoDoc, goWidth-len("\t// "))) + line
}
