package apigen

import (
	"fmt"
	"slices"
	"strings"
	"text/template"
)

// A field of a structure as Python has it.
type pythonField struct {
	Name string
	Kind string // the suffix of a FIELD_* of client/python/ext/binding.h
	C    string
	Size string // of FIELD_BUFFER: the field with the number of bytes
	Type string
}

func pythonFunctions(d *Description) template.FuncMap {
	return template.FuncMap{
		"pythonFields":    pythonFields,
		"pythonClass":     pythonClass,
		"pythonErrorBase": pythonErrorBase,
		"hasPrefix":       strings.HasPrefix,
		"upper":           strings.ToUpper,
		"mod":             func(a, b int) int { return a % b },
		"pythonOptions": func(s Item, flags []string) ([]pythonField, error) { // the fields, and the flags, some of which have a field of the same name
			fields, err := pythonFields(s)
			for _, flag := range flags {
				name := strings.ToLower(flag)
				if i := slices.IndexFunc(fields, func(f pythonField) bool { return f.Name == name }); i >= 0 {
					fields[i].Type = "bool | " + fields[i].Type
				} else {
					fields = append(fields, pythonField{Name: name, Type: "bool"})
				}
			}
			return fields, err
		},
		"pythonBaseOf": func(v Value) string { // the exception of the class of a status
			for _, s := range d.Sections {
				for _, i := range s.Items {
					for _, class := range i.Values {
						if i.Cpp == "error_class" && class.Value == -v.Value/100 {
							return Camel(class.Name) + "Error"
						}
					}
				}
			}
			return "Error"
		},
		"flagPrefix": func(structure string) string { return strings.ToUpper(strings.TrimSuffix(structure, "options")) },
		"pythonFlags": func(structure string) (flags []string) { // the bits of the field `flags`
			prefix := strings.ToUpper(strings.TrimSuffix(structure, "options"))
			for _, s := range d.Sections {
				for _, i := range s.Items {
					if i.Enum == prefix && i.Flags {
						for _, v := range i.Values {
							flags = append(flags, v.Name)
						}
					}
				}
			}
			return flags
		},
	}
}

// pythonClass is the name of a class for a type of C or C++: LeaseDetails for rfaas_lease_details.
func pythonClass(name string) string {
	return Camel(strings.ToUpper(strings.TrimPrefix(name, "rfaas_")))
}

// pythonErrorBase returns the classes from which the exception for a status or class of statuses is derived.
func pythonErrorBase(base string, v Value) string {
	if v.Python != "" {
		return base + ", " + v.Python
	}
	return base
}

// pythonFields returns the fields of a structure that a Python program sees. Times are in seconds and lose the suffix _ns.
func pythonFields(s Item) (fields []pythonField, err error) {
	for i, f := range s.Fields {
		if f.Name == "struct_size" || f.Name == "flags" || strings.HasPrefix(f.Name, "reserved") {
			continue
		}
		p := pythonField{Name: f.Name, C: f.Name, Type: "int"}
		switch {
		case strings.HasSuffix(f.Name, "_ns"):
			p.Name, p.Kind, p.Type = strings.TrimSuffix(f.Name, "_ns"), "SECONDS", "float"
		case f.Type == "uint32_t" || f.Type == "int32_t" || f.Type == "uint64_t" || f.Type == "size_t":
			if f.Type == "size_t" && i > 0 && s.Fields[i-1].Type == "const void *" {
				continue
			}
			p.Kind = strings.ToUpper(strings.TrimSuffix(f.Type, "_t"))
		case f.Type == "char":
			p.Kind, p.Type = "TEXT", "str"
		case f.Type == "const char *":
			p.Kind, p.Type = "STRING", "str | _os.PathLike[str]"
		case f.Type == "const void *" && i+1 < len(s.Fields):
			p.Kind, p.Size, p.Type = "BUFFER", s.Fields[i+1].Name, "bytes | bytearray | memoryview"
		default:
			return nil, fmt.Errorf("%s.%s: Python has no conversion for %q", s.Struct, f.Name, f.Type)
		}
		fields = append(fields, p)
	}
	return fields, nil
}
