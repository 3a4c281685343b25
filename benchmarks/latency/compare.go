package latency

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"
)

// Change is a measurement of which there are two results.
type Change struct {
	Key      string
	Old, New *Result
}

// Worse is by which share the new ratio is above the old one; by which the p50 is where there is no floor.
func (c *Change) Worse() float64 {
	old, now := float64(c.Old.Ratio), float64(c.New.Ratio)
	if math.IsNaN(old) || math.IsNaN(now) {
		old, now = float64(c.Old.P50NS), float64(c.New.P50NS)
	}
	return now/old - 1
}

// Compare pairs results by what they measured, in the order of the old ones. Of several with one key the last counts.
func Compare(old, now []*Result) (changes []Change, onlyOld, onlyNew []string) {
	last := map[string]*Result{}
	for _, r := range now {
		last[r.Key()] = r
	}
	at := map[string]int{}
	for _, r := range old {
		key := r.Key()
		if i, seen := at[key]; seen {
			changes[i].Old = r
			continue
		}
		if n := last[key]; n != nil {
			at[key] = len(changes)
			changes = append(changes, Change{key, r, n})
		} else {
			onlyOld = append(onlyOld, key)
		}
	}
	seen := map[string]bool{}
	for _, r := range now {
		if key := r.Key(); !seen[key] {
			seen[key] = true
			if _, both := at[key]; !both {
				onlyNew = append(onlyNew, key)
			}
		}
	}
	return changes, onlyOld, onlyNew
}

// WriteChanges writes a table of changes. Ratios are compared, since times of two runs are of two machines, however alike.
func WriteChanges(w io.Writer, changes []Change) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "measurement\tratio A\tratio B\tB over A\tp50 us A\tp50 us B\tfloor A\tfloor B\t")
	for _, c := range changes {
		fmt.Fprintf(t, "%s\t%s\t%s\t%+.1f %%\t%s\t%s\t%s\t%s\t\n", c.Key, c.Old.Ratio.format(3), c.New.Ratio.format(3), 100*c.Worse(),
			micro(c.Old.P50NS), micro(c.New.P50NS), micro(c.Old.FloorP50), micro(c.New.FloorP50))
	}
	return t.Flush()
}
