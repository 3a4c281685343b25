package client

import (
	"cmp"
	"strings"
)

// Function finds a function by name. ErrInvalid (StatusNoFunction) names the nearest one and those that exist.
func (l *Lease) Function(name string) (*Function, error) {
	if f := l.byName[name]; f != nil {
		return f, nil
	}
	names := l.Functions()
	hint := ""
	if near := nearest(name, names); near != "" {
		hint = ", did you mean \"" + near + "\"?"
	}
	const most = 20
	more := ""
	if len(names) > most {
		names, more = names[:most], ", ..."
	}
	return nil, fail("find function", StatusNoFunction, "the library has no function %q%s It has: %s%s", name,
		cmp.Or(hint, "."), strings.Join(names, ", "), more)
}

// nearest returns the name that differs least, "" when none is near.
func nearest(name string, names []string) string {
	best, distance := "", max(2, len(name)/3)+1
	for _, n := range names {
		if d := edits(strings.ToLower(name), strings.ToLower(n)); d < distance {
			best, distance = n, d
		}
	}
	return best
}

// edits is the Levenshtein distance.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
