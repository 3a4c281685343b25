package apigen

import (
	"slices"
	"strings"
	"text/template"
)

func manFunctions(d *Description, structs map[string]Item) template.FuncMap {
	return template.FuncMap{
		"upper": strings.ToUpper,
		"troff": troff,
		"prose": prose,
		"code":  code,
		"calls": func(s Section) bool {
			return slices.ContainsFunc(s.Items, func(i Item) bool { return i.Function != "" })
		},
		"structsOf": func(f Item) (used []Item) {
			seen := map[string]bool{}
			for _, p := range f.Params {
				for word := range strings.FieldsSeq(p.Type) {
					if s, ok := structs[word]; ok && !seen[word] {
						seen[word] = true
						used = append(used, s)
					}
				}
			}
			return used
		},
		"header": func(f Item) string {
			for _, s := range d.Sections {
				for _, i := range s.Items {
					if i.Function == f.Function {
						return s.header()
					}
				}
			}
			return ""
		},
		"neighbours": func(f Item) (names []string) {
			for _, s := range d.Sections {
				var section []string
				here := false
				for _, i := range s.Items {
					if i.Function == f.Function {
						here = true
					} else if i.Function != "" {
						section = append(section, i.Function)
					}
				}
				if here {
					return append(section, "rfaas")
				}
			}
			return nil
		},
	}
}

// troff protects what troff would take for a request or an escape.
func troff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		text = `\&` + text
	}
	return text
}

// prose returns text as paragraphs. Lines that begin with two spaces are program text.
func prose(text string) string {
	var b strings.Builder
	example := false
	for _, line := range wrap(text, commentWidth) {
		isCode := strings.HasPrefix(line, "  ")
		if isCode != example && (isCode || line != "") {
			b.WriteString(map[bool]string{true: ".EX\n", false: ".EE\n.PP\n"}[isCode])
			example = isCode
		}
		switch {
		case line != "":
			b.WriteString(troff(line) + "\n")
		case !example:
			b.WriteString(".PP\n")
		}
	}
	if example {
		b.WriteString(".EE\n")
	}
	return b.String()
}

// code returns program text that is not filled.
func code(text string) string {
	var b strings.Builder
	b.WriteString(".nf\n")
	for line := range strings.Lines(strings.TrimRight(text, "\n")) {
		b.WriteString(troff(strings.TrimRight(line, "\n")) + "\n")
	}
	return b.String() + ".fi\n"
}
