package apigen

import (
	"strings"
	"text/template"
)

func languageFunctions(d *Description) template.FuncMap {
	return template.FuncMap{
		// The functions that Go programs lack.
		"goGaps": func() (gaps []string) {
			for _, f := range d.Functions() {
				if f.Go == "" && !strings.HasPrefix(f.NoGo, "not needed") {
					gaps = append(gaps, f.Function)
				}
			}
			return gaps
		},
	}
}
