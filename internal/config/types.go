package config

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Bytes is a size, written as a number with an optional unit: 4096, 64KiB, 2GiB, 1.5GB. Empty or "auto" is 0.
type Bytes uint64

var units = []struct {
	suffix string
	factor float64
}{
	{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", 1 << 40},
	{"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"tb", 1e12},
	{"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}, {"t", 1 << 40}, {"b", 1},
}

// UnmarshalText parses a size.
func (b *Bytes) UnmarshalText(text []byte) error {
	s := strings.ToLower(strings.TrimSpace(string(text)))
	if s == "" || s == "auto" {
		*b = 0
		return nil
	}
	if n, err := strconv.ParseUint(s, 10, 64); err == nil {
		*b = Bytes(n)
		return nil
	}
	for _, u := range units {
		num, ok := strings.CutSuffix(s, u.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(num), 64)
		if err != nil || n < 0 || n*u.factor >= math.MaxUint64 || math.IsNaN(n) {
			break
		}
		*b = Bytes(n * u.factor)
		return nil
	}
	return fmt.Errorf("%q is not a size like 4096, 64KiB or 2GB", text)
}

// String writes the size in the largest binary unit that divides it.
func (b Bytes) String() string {
	for i := 3; i >= 0; i-- {
		if f := Bytes(units[i].factor); b >= f && b%f == 0 {
			return fmt.Sprintf("%d%s", b/f, [...]string{"KiB", "MiB", "GiB", "TiB"}[i])
		}
	}
	return strconv.FormatUint(uint64(b), 10)
}

// Cores is what the executor lends: a count of physical cores ("4"), a list of logical CPUs ("2-5,8", and "0," or "0-0"
// for the one CPU 0), or "auto" for all that the process may run on.
type Cores struct {
	List  []int // ascending, each once; nil unless a list was given
	Count int   // 0 unless a count was given
}

// maxCPU bounds CPU numbers: what the worker's spawn message can name (DP_CPUS_MAX).
const maxCPU = 1024

// UnmarshalText parses a count or a list.
func (c *Cores) UnmarshalText(text []byte) error {
	*c = Cores{}
	s := strings.TrimSpace(string(text))
	if s == "" || s == "auto" {
		return nil
	}
	if n, err := strconv.Atoi(s); err == nil {
		if n < 1 || n > maxCPU {
			return fmt.Errorf("%q cores: want 1 to %d", text, maxCPU)
		}
		c.Count = n
		return nil
	}
	for part := range strings.SplitSeq(s, ",") {
		part = strings.TrimSpace(part)
		if part == "" {
			continue
		}
		from, to, ranged := strings.Cut(part, "-")
		lo, err := strconv.Atoi(from)
		hi := lo
		if err == nil && ranged {
			hi, err = strconv.Atoi(to)
		}
		if err != nil || lo < 0 || hi < lo || hi >= maxCPU {
			return fmt.Errorf("cores %q: %q is not a CPU or a range of CPUs below %d", text, part, maxCPU)
		}
		for cpu := lo; cpu <= hi; cpu++ {
			c.List = append(c.List, cpu)
		}
	}
	if len(c.List) == 0 {
		return fmt.Errorf("cores %q: an empty list", text)
	}
	slices.Sort(c.List)
	c.List = slices.Compact(c.List)
	return nil
}

// String writes what UnmarshalText reads.
func (c Cores) String() string {
	if c.Count > 0 {
		return strconv.Itoa(c.Count)
	}
	if len(c.List) == 0 {
		return "auto"
	}
	var parts []string
	for i := 0; i < len(c.List); {
		j := i
		for j+1 < len(c.List) && c.List[j+1] == c.List[j]+1 {
			j++
		}
		// Always a range: a single number would be read as a count.
		parts = append(parts, fmt.Sprintf("%d-%d", c.List[i], c.List[j]))
		i = j + 1
	}
	return strings.Join(parts, ",")
}
