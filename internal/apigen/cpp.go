package apigen

import (
	"strings"
	"text/template"
)

func cppFunctions() template.FuncMap {
	return template.FuncMap{
		"cppComment": func(doc string) string {
			doc = strings.TrimSpace(doc)
			if doc == "" || long(doc) {
				return ""
			}
			return " /* " + doc + " */"
		},
	}
}
