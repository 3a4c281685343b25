package apigen

import (
	"fmt"
	"strconv"
	"strings"
	"text/template"
)

// The longest line of standard Fortran.
const fortranWidth = 130

func fortranFunctions() template.FuncMap {
	return template.FuncMap{
		"fComment":    func(text string) string { return prefixed("   !> ", wrap(text, commentWidth)) },
		"fParameters": fortranParameters,
		"fFields":     fortranFields,
		"fFunction":   fortranFunction,
		"fPublic":     fortranPublic,
		"fOffered":    fortranOffered,
	}
}

func prefixed(prefix string, lines []string) string {
	var b strings.Builder
	for _, line := range lines {
		b.WriteString(strings.TrimRight(prefix+line, " ") + "\n")
	}
	return b.String()
}

// broken joins parts to a statement whose lines are short enough.
func broken(indent, head, separator string, parts []string) string {
	line, out := indent+head, ""
	for i, p := range parts {
		if i < len(parts)-1 {
			p += separator
		}
		if len(line)+len(p)+2 > fortranWidth {
			out += strings.TrimRight(line, " ") + " &\n"
			line = indent + "   "
		}
		line += p
	}
	return out + line + "\n"
}

func fortranParameters(i Item) string {
	var b strings.Builder
	if i.Constant != "" {
		kind := "integer"
		if strings.Contains(i.Fortran, "int64") {
			kind = "integer(c_int64_t)"
		}
		return fmt.Sprintf("   %s, parameter :: %s = %s\n", kind, i.Constant, i.Fortran)
	}
	kind := "integer"
	if i.Flags {
		kind = "integer(c_int32_t)"
	}
	for _, v := range i.Values {
		line := fmt.Sprintf("   %s, parameter :: %s = %d", kind, i.Enum+v.Name, v.Value)
		if doc := strings.TrimSpace(v.Doc); doc != "" && len(line)+5+len(doc) <= fortranWidth && !long(doc) {
			line += " !< " + doc
		}
		b.WriteString(line + "\n")
	}
	return b.String()
}

// fortranScalar returns the Fortran type that interoperates with a C type that is not an array, "" if there is none.
func fortranScalar(ctype string) string {
	switch ctype {
	case "int":
		return "integer(c_int)"
	case "int32_t", "uint32_t", "rfaas_function":
		return "integer(c_int32_t)"
	case "int64_t", "uint64_t":
		return "integer(c_int64_t)"
	case "size_t":
		return "integer(c_size_t)"
	case "ptrdiff_t":
		return "integer(c_intptr_t)" // c_ptrdiff_t came with Fortran 2018
	case "rfaas_request":
		return "type(rfaas_request)"
	case "rfaas_change_fn", "rfaas_combine_fn":
		return "type(c_funptr)"
	}
	if strings.HasSuffix(ctype, "*") {
		return "type(c_ptr)"
	}
	return ""
}

func fortranFields(s Item) (string, error) {
	var b strings.Builder
	for _, f := range s.Fields {
		switch kind := fortranScalar(f.Type); {
		case f.Type == "char":
			fmt.Fprintf(&b, "      character(kind=c_char) :: %s(%d) = c_null_char\n", f.Name, f.Len)
		case kind == "type(c_ptr)":
			fmt.Fprintf(&b, "      type(c_ptr) :: %s = c_null_ptr\n", f.Name)
		case kind != "":
			fmt.Fprintf(&b, "      %s :: %s = %s\n", kind, f.Name, strconv.Itoa(f.Default))
		default:
			return "", fmt.Errorf("%s.%s: no Fortran type for %q", s.Struct, f.Name, f.Type)
		}
	}
	return b.String(), nil
}

// fortranDummy declares a parameter of a C function.
func fortranDummy(p Variable) string {
	optional := ""
	if p.Nullable {
		optional = ", optional"
	}
	element := strings.TrimSpace(strings.TrimSuffix(p.Type, "*"))
	constant := strings.HasPrefix(element, "const ")
	element = strings.TrimPrefix(element, "const ")
	intent := "inout"
	if constant {
		intent = "in"
	}
	scalar := fortranScalar(p.Type)
	switch {
	case p.Buffer && constant:
		return "type(*), dimension(*), intent(in), asynchronous" + optional + " :: " + p.Name
	case p.Buffer:
		return "type(*), dimension(*), asynchronous" + optional + " :: " + p.Name
	case element == "char":
		return "character(kind=c_char), intent(" + intent + ") :: " + p.Name + "(*)"
	case element == "rfaas_session" || element == "rfaas_lease" || element == "rfaas_seed" || element == "void":
		if p.Array {
			return "type(c_ptr), intent(inout) :: " + p.Name + "(*)"
		}
		return "type(c_ptr), value :: " + p.Name
	case strings.HasSuffix(element, "*"): // a pointer that the function sets
		return "type(c_ptr), intent(inout) :: " + p.Name
	case scalar != "" && scalar != "type(c_ptr)" && !p.Array:
		return scalar + ", value :: " + p.Name
	}
	kind := fortranScalar(element)
	if kind == "" {
		kind = "type(" + element + "_c)"
	}
	if p.Array {
		return kind + ", intent(" + intent + ")" + optional + " :: " + p.Name + "(*)"
	}
	return kind + ", intent(" + intent + ")" + optional + " :: " + p.Name
}

func fortranFunction(f Item) string {
	kind := "integer(c_int)"
	if strings.HasSuffix(f.Returns, "*") {
		kind = "type(c_ptr)"
	}
	names := make([]string, len(f.Params))
	for i, p := range f.Params {
		names[i] = p.Name
	}
	if len(names) == 0 {
		names = []string{""}
	}
	names[len(names)-1] += ") bind(c, name='" + f.Function + "')"
	var b strings.Builder
	b.WriteString("      !> " + f.Function + " " + f.Brief + ".\n")
	b.WriteString(broken("      ", kind+" function "+f.Function+"_c(", ", ", names))
	b.WriteString("         import\n")
	for _, p := range f.Params {
		b.WriteString("         " + fortranDummy(p) + "\n")
	}
	return b.String() + "      end function\n"
}

// fortranPublic returns the statements by which the module rfaas offers the constants.
func fortranPublic(d *Description) string {
	return "   public :: " + strings.TrimLeft(broken("   ", "", ", ", fortranOffered(d)), " ")
}

// fortranOffered returns the names of the constants that the module rfaas offers. Names of flags are names of procedures too, since
// Fortran does not distinguish capitals.
func fortranOffered(d *Description) (names []string) {
	for _, s := range d.Sections {
		for _, i := range s.Items {
			if i.Constant != "" && i.Fortran != "" {
				names = append(names, i.Constant)
			}
			for _, v := range i.Values {
				if i.Fortran != "raw" {
					names = append(names, i.Enum+v.Name)
				}
			}
		}
	}
	return names
}
