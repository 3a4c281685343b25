package report

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
)

const (
	width  = 18 * vg.Centimeter
	height = 11 * vg.Centimeter
)

// series is a line of a plot.
type series struct {
	name   string
	points plotter.XYs
	dashed bool
}

// Picture is a plot that was written.
type Picture struct{ File, Title string }

// picture draws lines. Points that a logarithmic axis cannot show are left out.
func picture(dir, file, title, x, y string, logX, logY bool, lines []series) (*Picture, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Legend.Top, p.Legend.Left = logY, logY // the lower right corner of a distribution is free
	p.Legend.TextStyle.Font.Size = vg.Points(9)
	p.Add(plotter.NewGrid())
	if logX {
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	if logY {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	drawn := 0
	for i, s := range lines {
		points := slices.DeleteFunc(slices.Clone(s.points), func(at plotter.XY) bool {
			return math.IsNaN(at.X+at.Y) || logX && at.X <= 0 || logY && at.Y <= 0
		})
		if len(points) == 0 {
			continue
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, err
		}
		line.Color, dots.Color, dots.Radius = plotutil.Color(i), plotutil.Color(i), vg.Points(2)
		if s.dashed {
			line.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
		}
		if len(points) > 60 {
			p.Add(line)
		} else {
			p.Add(line, dots)
		}
		p.Legend.Add(s.name, line)
		drawn++
	}
	if drawn == 0 {
		return nil, nil
	}
	if logY { // room for the legend
		p.Y.Max *= math.Pow(max(p.Y.Max/p.Y.Min, 10), 0.07*float64(drawn))
	}
	return &Picture{file, title}, p.Save(width, height, filepath.Join(dir, file))
}

// Plots writes every picture for which there is data.
func Plots(d *Data, dir string) ([]Picture, error) {
	var out []Picture
	for _, draw := range []func() (*Picture, error){
		func() (*Picture, error) { return latencyPlot(d, dir, "shm") },
		func() (*Picture, error) { return latencyPlot(d, dir, "verbs") },
		func() (*Picture, error) { return cdfPlot(d, dir, "shm") },
		func() (*Picture, error) { return cdfPlot(d, dir, "verbs") },
		func() (*Picture, error) { return bandwidthPlot(d, dir) },
		func() (*Picture, error) { return scalingPlot(d, dir) },
		func() (*Picture, error) { return startPlot(d, dir) },
	} {
		p, err := draw()
		if err != nil {
			return out, err
		}
		if p != nil {
			out = append(out, *p)
		}
	}
	return out, nil
}

// byPayload collects a series of values by payload.
func byPayload(d *Data, name string, match func(*latency.Result) bool, of func(*latency.Result) float64) series {
	s := series{name: name}
	for _, r := range d.Results {
		if r.Skipped == "" && r.Samples > 0 && match(r) {
			s.points = append(s.points, plotter.XY{X: float64(r.Payload), Y: of(r)})
		}
	}
	slices.SortFunc(s.points, func(a, b plotter.XY) int { return int(a.X - b.X) })
	return s
}

func p50us(r *latency.Result) float64   { return float64(r.P50NS) / 1e3 }
func floorUS(r *latency.Result) float64 { return float64(r.FloorP50) / 1e3 }

func latencyPlot(d *Data, dir, provider string) (*Picture, error) {
	calls := func(client, mode string) func(*latency.Result) bool {
		return func(r *latency.Result) bool {
			return r.Name == "latency" && r.Provider == provider && r.Client == client && r.Mode == mode && r.Depth == 1 && r.Result == 0
		}
	}
	lines := []series{
		byPayload(d, "rfaas, hot, C", calls("c", "hot"), p50us),
		byPayload(d, "floor, hot", calls("c", "hot"), floorUS),
		byPayload(d, "rfaas, warm, C", calls("c", "warm"), p50us),
	}
	lines[1].dashed = true
	var names []string
	for _, r := range d.Results {
		on := "shm"
		if len(r.Provider) > 9 && r.Provider[len(r.Provider)-9:] == " on verbs" {
			on = "verbs"
		}
		if r.Name == "other" && r.Skipped == "" && on == provider && !slices.Contains(names, r.Provider) {
			names = append(names, r.Provider)
		}
	}
	for _, name := range names {
		lines = append(lines, byPayload(d, name, func(r *latency.Result) bool { return r.Name == "other" && r.Provider == name }, p50us))
	}
	return picture(dir, "latency-"+provider+".png", "Round trip by payload, "+provider+", median", "payload, bytes", "us", true, true, lines)
}

func cdfPlot(d *Data, dir, provider string) (*Picture, error) {
	var lines []series
	add := func(name, encoded string, dashed bool) error {
		points, err := latency.CDF(encoded)
		s := series{name: name, dashed: dashed}
		for _, p := range points {
			s.points = append(s.points, plotter.XY{X: float64(p.NS) / 1e3, Y: p.Share})
		}
		lines = append(lines, s)
		return err
	}
	for _, payload := range []int{8, 64, 4096} {
		r := d.call(provider, "c", "hot", payload, 0, 1)
		if r == nil {
			continue
		}
		if err := add("call, "+size(payload), r.Histogram, false); err != nil {
			return nil, err
		}
		if err := add("floor, "+size(payload), r.FloorHistogram, true); err != nil {
			return nil, err
		}
	}
	return picture(dir, "cdf-"+provider+".png", "Distribution of hot round trips, "+provider+", C client", "us", "share of round trips", true, false, lines)
}

func bandwidthPlot(d *Data, dir string) (*Picture, error) {
	var lines []series
	for _, provider := range []string{"shm", "verbs"} {
		deep := func(r *latency.Result) bool {
			return r.Name == "latency" && r.Provider == provider && r.Client == "c" && r.Depth > 1 && r.Payload >= 1024 && r.Result == 0
		}
		lines = append(lines, byPayload(d, "rfaas, "+provider, deep, func(r *latency.Result) float64 { return r.BytesPerS / 1e9 }))
		floor := byPayload(d, "floor, "+provider, deep, func(r *latency.Result) float64 { return float64(r.Payload) / float64(r.FloorMeanNS) })
		floor.dashed = true
		lines = append(lines, floor)
	}
	return picture(dir, "bandwidth.png", "Payload there and as much back, several calls in flight", "payload, bytes", "GB/s each way", true, true, lines)
}

func scalingPlot(d *Data, dir string) (*Picture, error) {
	of := map[string]*series{}
	var order []string
	add := func(name string, n int, y float64) {
		if of[name] == nil {
			of[name] = &series{name: name}
			order = append(order, name)
		}
		of[name].points = append(of[name].points, plotter.XY{X: float64(n), Y: y})
	}
	for _, r := range d.Results {
		if r.Name != "scaling" || r.Pairs == 0 {
			continue
		}
		if r.Clients == 1 {
			add(r.Function+", workers of one client", r.Workers, r.OpsPerS)
			add(r.Function+", threads without calls", r.Workers, 1e9/float64(r.FloorMeanNS))
		}
		if r.Workers == 1 {
			add(r.Function+", clients of one worker", r.Clients, r.OpsPerS)
		}
	}
	var lines []series
	for _, name := range order {
		lines = append(lines, *of[name])
	}
	return picture(dir, "scaling.png", "Calls a second with workers and clients", "workers or clients", "calls/s", false, true, lines)
}

func startPlot(d *Data, dir string) (*Picture, error) {
	if len(d.Starts) == 0 {
		return nil, nil
	}
	p := plot.New()
	p.Title.Text, p.Y.Label.Text = "Lease to first result, medians of its steps", "us"
	p.Legend.Top = true
	var names, labels []string
	for _, s := range d.Starts {
		labels = append(labels, s.Provider+" "+s.Mode)
		for _, step := range s.Steps {
			if !slices.Contains(names, step.Name) {
				names = append(names, step.Name)
			}
		}
	}
	var below *plotter.BarChart
	for i, name := range names {
		values := make(plotter.Values, len(d.Starts))
		for k, s := range d.Starts {
			for _, step := range s.Steps {
				if step.Name == name {
					values[k] = max(step.NS/1e3, 0)
				}
			}
		}
		bars, err := plotter.NewBarChart(values, vg.Points(30))
		if err != nil {
			return nil, fmt.Errorf("bars of %s: %w", name, err)
		}
		bars.Color, bars.LineStyle.Width = plotutil.Color(i), 0
		if below != nil {
			bars.StackOn(below)
		}
		below = bars
		p.Add(bars)
		p.Legend.Add(name, bars)
	}
	p.NominalX(labels...)
	return &Picture{"starts.png", p.Title.Text}, p.Save(width, height, filepath.Join(dir, "starts.png"))
}
