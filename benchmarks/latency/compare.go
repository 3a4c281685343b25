package latency

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
)

// Change is two results of the same measurement.
type Change struct {
	Key      string
	Old, New *Result
}

// Worse is the share by which the ratio has grown, or the p50 if there is no floor, as for starts.
func (c *Change) Worse() float64 {
	old, now := float64(c.Old.Ratio), float64(c.New.Ratio)
	if !(old > 0 && now > 0) {
		old, now = float64(c.Old.P50NS), float64(c.New.P50NS)
	}
	return now/old - 1
}

// Compare pairs the results with equal keys, in the order of the old ones. Of several with one key the last counts.
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

// changeFields are the columns of the machine-readable forms: A is the old result, B the new one.
type changeFields struct {
	Key    string `json:"key"`
	RatioA Number `json:"ratio_a"`
	RatioB Number `json:"ratio_b"`
	BOverA Number `json:"b_over_a"` // Worse
	P50A   int64  `json:"p50_a_ns"`
	P50B   int64  `json:"p50_b_ns"`
	P99A   int64  `json:"p99_a_ns"`
	P99B   int64  `json:"p99_b_ns"`
	P999A  int64  `json:"p999_a_ns"`
	P999B  int64  `json:"p999_b_ns"`
	FloorA int64  `json:"floor_p50_a_ns"`
	FloorB int64  `json:"floor_p50_b_ns"`
}

func (c *Change) fields() changeFields {
	return changeFields{c.Key, c.Old.Ratio, c.New.Ratio, Number(c.Worse()), c.Old.P50NS, c.New.P50NS, c.Old.P99NS, c.New.P99NS,
		c.Old.P999NS, c.New.P999NS, c.Old.FloorP50, c.New.FloorP50}
}

// WriteChangesJSON writes an object for each change, one a line.
func WriteChangesJSON(w io.Writer, changes []Change) error {
	e := json.NewEncoder(w)
	for _, c := range changes {
		if err := e.Encode(c.fields()); err != nil {
			return err
		}
	}
	return nil
}

// WriteChangesCSV writes the same as comma-separated values.
func WriteChangesCSV(w io.Writer, changes []Change) error {
	c := csv.NewWriter(w)
	rows := [][]string{{"key", "ratio_a", "ratio_b", "b_over_a", "p50_a_ns", "p50_b_ns", "p99_a_ns", "p99_b_ns", "p999_a_ns", "p999_b_ns", "floor_p50_a_ns", "floor_p50_b_ns"}}
	for _, change := range changes {
		f := change.fields()
		row := []string{f.Key, f.RatioA.format(4), f.RatioB.format(4), f.BOverA.format(4)}
		for _, n := range []int64{f.P50A, f.P50B, f.P99A, f.P99B, f.P999A, f.P999B, f.FloorA, f.FloorB} {
			row = append(row, strconv.FormatInt(n, 10))
		}
		rows = append(rows, row)
	}
	return c.WriteAll(rows)
}

// WriteChanges writes a table of changes. It compares ratios, because times of two runs are not comparable.
func WriteChanges(w io.Writer, changes []Change) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "measurement\tratio A\tratio B\tB over A\tp50 us A\tp50 us B\tp99 us A\tp99 us B\tfloor A\tfloor B\t")
	for _, c := range changes {
		fmt.Fprintf(t, "%s\t%s\t%s\t%+.1f %%\t%s\t%s\t%s\t%s\t%s\t%s\t\n", c.Key, c.Old.Ratio.format(3), c.New.Ratio.format(3), 100*c.Worse(),
			micro(c.Old.P50NS), micro(c.New.P50NS), micro(c.Old.P99NS), micro(c.New.P99NS), micro(c.Old.FloorP50), micro(c.New.FloorP50))
	}
	return t.Flush()
}
