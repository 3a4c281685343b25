package apigen

import (
	"strings"
	"unicode/utf8"
)

// wrap breaks text into lines of at most width characters. Paragraphs are separated by an empty line. Lines that begin with two spaces
// are program text and stay as they are.
func wrap(text string, width int) (lines []string) {
	var words []string
	flush := func() {
		line := ""
		for _, w := range words {
			if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(w) > width {
				lines = append(lines, line)
				line = ""
			}
			if line != "" {
				line += " "
			}
			line += w
		}
		if line != "" {
			lines = append(lines, line)
		}
		words = nil
	}
	for line := range strings.Lines(strings.Trim(text, "\n")) {
		line = strings.TrimRight(line, " \n")
		switch {
		case line == "":
			flush()
			lines = append(lines, "")
		case strings.HasPrefix(line, "  "):
			flush()
			lines = append(lines, line)
		default:
			words = append(words, strings.Fields(line)...)
		}
	}
	flush()
	return lines
}

// hang wraps text under a first line that begins with head. The lines after it are indented.
func hang(head, text string, width int, indent string) []string {
	lines := wrap(head+text, width)
	for i := 1; i < len(lines); i++ {
		if lines[i] != "" {
			lines[i] = indent + lines[i]
		}
	}
	return lines
}

// sentence returns a short text as a sentence of its own.
func sentence(text string) string {
	text = strings.TrimSpace(text)
	if text == "" || strings.HasSuffix(text, ".") {
		return text
	}
	return text + "."
}

// blockComment is a C comment of these lines.
func blockComment(indent string, lines []string) string {
	if len(lines) == 1 {
		return indent + "/* " + lines[0] + " */\n"
	}
	var b strings.Builder
	for i, line := range lines {
		switch {
		case i == 0:
			b.WriteString(indent + "/* " + line)
		case line == "":
			b.WriteString("\n" + indent + " *")
		default:
			b.WriteString("\n" + indent + " * " + line)
		}
	}
	return b.String() + " */\n"
}

// functionText is the description of a function as lines of a comment.
func functionText(f Item, width int) (lines []string) {
	lines = wrap(f.Function+" "+f.Brief+".", width)
	if params := paramLines(f, width); len(params) > 0 {
		lines = append(append(lines, ""), params...)
	}
	if f.Doc != "" {
		lines = append(append(lines, ""), wrap(f.Doc, width)...)
	}
	if len(f.Errors) > 0 {
		lines = append(lines, "", "Errors:")
		for _, e := range f.Errors {
			for _, line := range hang(statusName(e.Status)+": ", sentence(e.When), width-4, "  ") {
				lines = append(lines, "  "+line)
			}
		}
	}
	return lines
}

func paramLines(f Item, width int) (lines []string) {
	for _, p := range f.Params {
		if p.Doc == "" {
			continue
		}
		for _, line := range hang(p.Name+": ", sentence(p.Doc), width-4, "  ") {
			lines = append(lines, "  "+line)
		}
	}
	return lines
}

// statusName returns RFAAS_BUSY for BUSY, and leaves "CONNECTION class" readable.
func statusName(s string) string {
	if class, ok := strings.CutSuffix(s, " class"); ok {
		return "class " + class
	}
	return "RFAAS_" + s
}

// Camel turns NO_FUNCTION into NoFunction.
func Camel(name string) string {
	if name == "OK" {
		return name
	}
	var b strings.Builder
	for part := range strings.SplitSeq(name, "_") {
		b.WriteString(part[:1] + strings.ToLower(part[1:]))
	}
	return b.String()
}
