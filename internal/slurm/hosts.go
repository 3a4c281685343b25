package slurm

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// maxHosts is the largest number of hosts in one host list.
const maxHosts = 1 << 17

var errTooMany = errors.New("too many hosts")

// ExpandHosts expands a host list in Slurm's format, like "n[1-3,07],login2" or "r[1-2]n[1-4]". Numbers keep their
// leading zeros. The last bracket of a name varies fastest. An empty list, "(null)", "N/A" and "None" have no hosts.
func ExpandHosts(list string) ([]string, error) { return expandHosts(list, maxHosts) }

// expandHosts is ExpandHosts for at most room hosts.
func expandHosts(list string, room int) ([]string, error) {
	list = strings.TrimSpace(list)
	if list == "" || list == "(null)" || list == "None" || list == "N/A" {
		return nil, nil
	}
	var out []string
	for rest := list; rest != ""; {
		end, depth := len(rest), 0
		for i, c := range rest {
			switch {
			case c == '[':
				depth++
			case c == ']':
				depth--
			case c == ',' && depth == 0:
				end = i
			}
			if depth < 0 || depth > 1 {
				return nil, fmt.Errorf("host list %q: brackets do not match", list)
			}
			if end == i {
				break
			}
		}
		if depth != 0 {
			return nil, fmt.Errorf("host list %q: brackets do not match", list)
		}
		names, err := expandName(rest[:end], room-len(out))
		if err != nil {
			return nil, fmt.Errorf("host list %q: %w", list, err)
		}
		out = append(out, names...)
		rest = strings.TrimPrefix(rest[end:], ",")
	}
	return out, nil
}

// expandName expands one name with any number of brackets.
func expandName(name string, room int) ([]string, error) {
	if i := strings.IndexFunc(name, notInName); i >= 0 || name == "" {
		return nil, fmt.Errorf("%q is not a host name", name)
	}
	out := []string{""}
	for name != "" {
		plain, rest, found := strings.Cut(name, "[")
		var inside string
		if found {
			inside, rest, _ = strings.Cut(rest, "]")
		}
		parts := []string{""}
		if found {
			var err error
			if parts, err = expandRanges(inside, room/len(out)); err != nil {
				return nil, err
			}
		}
		next := make([]string, 0, len(out)*len(parts))
		for _, o := range out {
			for _, p := range parts {
				next = append(next, o+plain+p)
			}
		}
		out, name = next, rest
	}
	if len(out) > room {
		return nil, errTooMany
	}
	return out, nil
}

func notInName(c rune) bool {
	return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("._-[],", c))
}

// expandRanges expands the inside of a bracket, like "1-3,07".
func expandRanges(inside string, room int) ([]string, error) {
	var out []string
	for part := range strings.SplitSeq(inside, ",") {
		from, to, ranged := strings.Cut(part, "-")
		if !ranged {
			to = from
		}
		lo, err := strconv.ParseUint(from, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("%q is neither a number nor a range", part)
		}
		hi, err := strconv.ParseUint(to, 10, 32)
		if err != nil || hi < lo {
			return nil, fmt.Errorf("%q is neither a number nor a range", part)
		}
		if hi-lo >= uint64(max(room-len(out), 0)) {
			return nil, errTooMany
		}
		for n := lo; n <= hi; n++ {
			out = append(out, fmt.Sprintf("%0*d", len(from), n))
		}
	}
	return out, nil
}
