package latency

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Result is one measurement. The JSON form is read by other programs: fields are added, never changed.
type Result struct {
	Name     string `json:"name"` // "latency"
	Provider string `json:"provider"`
	Client   string `json:"client"`
	Mode     string `json:"mode"`
	Function string `json:"function"`
	Buffers  string `json:"buffers"`          // copied or registered
	Payload  int    `json:"payload"`          // bytes there, and as many back unless Result says otherwise
	Result   int    `json:"result,omitempty"` // bytes back
	Depth    int    `json:"depth"`            // calls in flight

	// Single calls, from batches in which each is timed.
	Samples int   `json:"samples"`
	P50NS   int64 `json:"p50_ns"`
	P90NS   int64 `json:"p90_ns"`
	P99NS   int64 `json:"p99_ns"`
	P999NS  int64 `json:"p999_ns"`
	MaxNS   int64 `json:"max_ns"`
	// Disturbed is how many of the samples took over ten times the median, because of interrupts or a moved virtual CPU. All of
	// the above includes them.
	Disturbed int `json:"samples_disturbed"`

	// The floor, measured beside it.
	FloorName string `json:"floor_name"`
	FloorP50  int64  `json:"floor_p50_ns"`

	// Ratios are medians over the good pairs of the batch means' ratios; RatioLow and RatioHigh are the quartiles of Ratio.
	Ratio     Number `json:"ratio"`
	RatioLow  Number `json:"ratio_q1"`
	RatioHigh Number `json:"ratio_q3"`
	RatioP95  Number `json:"ratio_p95,omitzero"` // of all pairs' ratios; 0: not wanted
	// RatioPayloadOnly is to a floor that moves the payload without our headers (verbs).
	RatioPayloadOnly Number `json:"ratio_payload_only,omitzero"`

	// OverFloor is the median of the differences between pairs' means, ns; 0 if only the ratio is wanted.
	OverFloor Number `json:"over_floor_ns,omitzero"`

	// RatioRough is the ratio of all pairs whose batches ran to their end, including those whose calibrations differ.
	RatioRough Number `json:"ratio_rough,omitzero"`

	MeanNS      Number  `json:"mean_ns"` // medians of batch means
	FloorMeanNS Number  `json:"floor_mean_ns"`
	OpsPerS     float64 `json:"ops_per_s"`
	BytesPerS   float64 `json:"bytes_per_s"` // of payload, one way; as many come back

	// Remote is the address of the peer's machine, if it was another one.
	Remote string `json:"remote,omitempty"`

	// Workers and Clients that took part; 0: one each.
	Workers int `json:"workers,omitempty"`
	Clients int `json:"clients,omitempty"`

	Pairs          int  `json:"pairs"`
	PairsDiscarded int  `json:"pairs_discarded"` // calibrations differed
	PairsShared    int  `json:"pairs_shared"`    // discarded: a hot waiter blocked, because something else ran on its core
	PairsAwake     int  `json:"pairs_awake"`     // discarded: the warm client did not block, in the floor or in the calls
	PairsRough     int  `json:"pairs_rough"`     // pairs of RatioRough
	Peers          int  `json:"peers,omitempty"` // peers in succession; 0: one, or another kind of benchmark
	Complete       bool `json:"complete"`        // there are as many good pairs as were wanted

	Calibration Calibration `json:"calibration_ns"`
	Near        *bool       `json:"near,omitempty"` // shm: client and peer share a cache

	Slots      int     `json:"slots"`
	Eager      int     `json:"eager"`
	BatchCalls int     `json:"batch_calls"`
	CPUClient  int     `json:"cpu_client"`
	CPUPeer    int     `json:"cpu_peer"` // -1: on another machine
	ClockNS    float64 `json:"clock_ns"` // cost of one reading, contained in each sample of floor and calls
	Load       float64 `json:"load_avg"` // of the last minute, at the start
	Seconds    float64 `json:"seconds"`  // duration of the measurement
	StartedAt  string  `json:"started_at"`
	Method     string  `json:"method"`
	Parts      string  `json:"parts,omitempty"` // what RatioP95 and the ratio consist of

	// Skipped is the reason why there are no figures.
	Skipped string `json:"skipped,omitempty"`
	// Histograms of the samples and of the floor's, in HdrHistogram's compressed form, base64.
	Histogram      string `json:"histogram,omitempty"`
	FloorHistogram string `json:"floor_histogram,omitempty"`
}

// Calibration is the bare round trip before and after the pairs: medians over the good ones, ns.
type Calibration struct {
	Before Number `json:"before"`
	After  Number `json:"after"`
}

// Number is a float that may be unknown: NaN, null in JSON. The zero value means that it was not measured.
type Number float64

// MarshalJSON writes null for an unknown number.
func (n Number) MarshalJSON() ([]byte, error) {
	f := float64(n)
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return []byte("null"), nil
	}
	return strconv.AppendFloat(nil, f, 'g', 6, 64), nil
}

// UnmarshalJSON is its inverse.
func (n *Number) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		*n = Number(math.NaN())
		return nil
	}
	f, err := strconv.ParseFloat(string(b), 64)
	*n = Number(f)
	return err
}

func (n Number) format(decimals int) string {
	if math.IsNaN(float64(n)) {
		return "-"
	}
	return strconv.FormatFloat(float64(n), 'f', decimals, 64)
}

// Key names what was measured: results of the same key can be compared.
func (r *Result) Key() string {
	key := fmt.Sprintf("%s %s %s %s %s %d B depth %d", r.Name, r.Provider, r.Client, r.Mode, r.Function, r.Payload, r.Depth)
	if r.Result > 0 {
		key += fmt.Sprintf(", %d B back", r.Result)
	}
	if r.Remote != "" {
		key += ", another machine"
	}
	if r.Workers > 0 || r.Clients > 0 {
		key += fmt.Sprintf(", %d workers, %d clients", r.Workers, r.Clients)
	}
	return key
}

// WriteJSON writes one object on one line for each result.
func WriteJSON(w io.Writer, results ...*Result) error {
	e := json.NewEncoder(w)
	for _, r := range results {
		if err := e.Encode(r); err != nil {
			return err
		}
	}
	return nil
}

// ReadJSON is the inverse of WriteJSON. It skips lines that do not begin with {, so that the output of a terminal session can
// be read.
func ReadJSON(r io.Reader) ([]*Result, error) {
	text, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	var out []*Result
	for i, line := range strings.Split(string(text), "\n") {
		if !strings.HasPrefix(strings.TrimSpace(line), "{") {
			continue
		}
		var one Result
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		out = append(out, &one)
	}
	return out, nil
}

var csvColumns = []struct {
	name string
	of   func(*Result) string
}{
	{"name", func(r *Result) string { return r.Name }},
	{"provider", func(r *Result) string { return r.Provider }},
	{"client", func(r *Result) string { return r.Client }},
	{"mode", func(r *Result) string { return r.Mode }},
	{"function", func(r *Result) string { return r.Function }},
	{"buffers", func(r *Result) string { return r.Buffers }},
	{"payload", func(r *Result) string { return strconv.Itoa(r.Payload) }},
	{"depth", func(r *Result) string { return strconv.Itoa(r.Depth) }},
	{"samples", func(r *Result) string { return strconv.Itoa(r.Samples) }},
	{"p50_ns", func(r *Result) string { return strconv.FormatInt(r.P50NS, 10) }},
	{"p90_ns", func(r *Result) string { return strconv.FormatInt(r.P90NS, 10) }},
	{"p99_ns", func(r *Result) string { return strconv.FormatInt(r.P99NS, 10) }},
	{"p999_ns", func(r *Result) string { return strconv.FormatInt(r.P999NS, 10) }},
	{"max_ns", func(r *Result) string { return strconv.FormatInt(r.MaxNS, 10) }},
	{"samples_disturbed", func(r *Result) string { return strconv.Itoa(r.Disturbed) }},
	{"floor_name", func(r *Result) string { return r.FloorName }},
	{"floor_p50_ns", func(r *Result) string { return strconv.FormatInt(r.FloorP50, 10) }},
	{"mean_ns", func(r *Result) string { return r.MeanNS.format(1) }},
	{"floor_mean_ns", func(r *Result) string { return r.FloorMeanNS.format(1) }},
	{"ratio", func(r *Result) string { return r.Ratio.format(4) }},
	{"ratio_payload_only", func(r *Result) string { return asked(r.RatioPayloadOnly, 4) }},
	{"ratio_rough", func(r *Result) string { return asked(r.RatioRough, 4) }},
	{"over_floor_ns", func(r *Result) string { return asked(r.OverFloor, 1) }},
	{"ops_per_s", func(r *Result) string { return strconv.FormatFloat(r.OpsPerS, 'f', 0, 64) }},
	{"bytes_per_s", func(r *Result) string { return strconv.FormatFloat(r.BytesPerS, 'f', 0, 64) }},
	{"workers", func(r *Result) string { return strconv.Itoa(r.Workers) }},
	{"clients", func(r *Result) string { return strconv.Itoa(r.Clients) }},
	{"pairs", func(r *Result) string { return strconv.Itoa(r.Pairs) }},
	{"pairs_discarded", func(r *Result) string { return strconv.Itoa(r.PairsDiscarded) }},
	{"pairs_shared", func(r *Result) string { return strconv.Itoa(r.PairsShared) }},
	{"pairs_awake", func(r *Result) string { return strconv.Itoa(r.PairsAwake) }},
	{"pairs_rough", func(r *Result) string { return strconv.Itoa(r.PairsRough) }},
	{"calibration_before_ns", func(r *Result) string { return r.Calibration.Before.format(1) }},
	{"calibration_after_ns", func(r *Result) string { return r.Calibration.After.format(1) }},
	{"load_avg", func(r *Result) string { return strconv.FormatFloat(r.Load, 'f', 2, 64) }},
	{"skipped", func(r *Result) string { return r.Skipped }},
	{"result", func(r *Result) string { return strconv.Itoa(or(r.Result, r.Payload)) }},
	{"remote", func(r *Result) string { return r.Remote }},
}

func asked(n Number, decimals int) string {
	if n == 0 {
		return ""
	}
	return n.format(decimals)
}

// WriteCSV writes a line of names and one for each result.
func WriteCSV(w io.Writer, results ...*Result) error {
	c := csv.NewWriter(w)
	row := make([]string, len(csvColumns))
	for i, k := range csvColumns {
		row[i] = k.name
	}
	if err := c.Write(row); err != nil {
		return err
	}
	for _, r := range results {
		for i, k := range csvColumns {
			row[i] = k.of(r)
		}
		if err := c.Write(row); err != nil {
			return err
		}
	}
	c.Flush()
	return c.Error()
}

// WriteTable writes a table in microseconds, and below it the floors and the method.
func WriteTable(w io.Writer, results ...*Result) error {
	if len(results) == 0 {
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "provider\tclient\tmode\tfunction\tdepth\tbytes\tp50 us\tp90\tp99\tp99.9\tmax\tfloor\tratio\tquartiles\tpayload only\tcalls/s\tpairs\t")
	for _, r := range results {
		pairs := strconv.Itoa(r.Pairs)
		if n := r.PairsDiscarded + r.PairsShared + r.PairsAwake; n > 0 {
			pairs += fmt.Sprintf(" (-%d)", n)
		}
		if !r.Complete {
			pairs += " !"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s-%s\t%s\t%s\t%s\t\n", r.Provider, r.Client, r.Mode, r.Function, r.Depth, r.bytes(),
			micro(r.P50NS), micro(r.P90NS), micro(r.P99NS), micro(r.P999NS), micro(r.MaxNS), micro(r.FloorP50),
			r.Ratio.format(3), r.RatioLow.format(2), r.RatioHigh.format(2), dash(asked(r.RatioPayloadOnly, 3)),
			rate(r.OpsPerS), pairs)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, r := range results {
		if r.RatioP95 > 0 {
			fmt.Fprintf(w, "%s: ratio %s, p95 %s%s\n", r.Function, r.Ratio.format(3), r.RatioP95.format(3), r.Parts)
		}
	}
	last := results[len(results)-1]
	said := map[string]bool{}
	for _, r := range results {
		if line := fmt.Sprintf("floor of %s, %s, %s B: %s", r.Provider, r.Mode, r.bytes(), r.FloorName); !said[line] {
			said[line] = true
			fmt.Fprintln(w, line)
		}
	}
	place := ""
	if last.Near != nil {
		place = ", far placement"
		if *last.Near {
			place = ", near placement"
		}
	}
	cpus := fmt.Sprintf("CPUs %d and %d%s", last.CPUClient, last.CPUPeer, place)
	if last.Remote != "" {
		cpus = fmt.Sprintf("CPU %d, and another machine: %s", last.CPUClient, last.Remote)
	}
	_, err := fmt.Fprintf(w, "%s. %s; calibration %s ns before, %s ns after; load %.1f.\n", last.Method, cpus, last.Calibration.Before.format(0), last.Calibration.After.format(0), last.Load)
	return err
}

// bytes names the sizes of payload and result.
func (r *Result) bytes() string {
	if r.Result > 0 {
		return fmt.Sprintf("%d>%d", r.Payload, r.Result)
	}
	return strconv.Itoa(r.Payload)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func micro(ns int64) string {
	switch us := float64(ns) / 1e3; {
	case us < 10:
		return strconv.FormatFloat(us, 'f', 3, 64)
	case us < 1000:
		return strconv.FormatFloat(us, 'f', 1, 64)
	default:
		return strconv.FormatFloat(us, 'f', 0, 64)
	}
}

func rate(perSecond float64) string {
	switch {
	case perSecond >= 1e6:
		return strconv.FormatFloat(perSecond/1e6, 'f', 2, 64) + " M"
	case perSecond >= 1e4:
		return strconv.FormatFloat(perSecond/1e3, 'f', 1, 64) + " k"
	}
	return strconv.FormatFloat(perSecond, 'f', 0, 64)
}
