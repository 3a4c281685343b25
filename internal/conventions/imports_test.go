package conventions

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/rfaas-go/rfaas"

// layers maps each layer to the other layers that it may import. A layer is a directory below the module's root with its
// subdirectories; a package belongs to the longest entry that contains it. Within a layer, packages may import each other.
// Dependencies point down: programs, then the packages behind them, then the public packages, then the base.
var layers = map[string][]string{
	// Programs. Thin: the layers below do the work.
	"cmd/executor":         {"internal/executor", "internal/config", "internal/cli", "internal/handover", "internal/privilege", "internal/spawner/wire"},
	"cmd/resource-manager": {"internal/manager", "internal/config", "internal/cli"},
	"cmd/rfaas":            {"internal/cli", "internal/config"},
	"cmd/rfaas-bench":      {"benchmarks", "internal/cli/command"},
	"cmd/rfaas-spawner":    {"internal/spawner", "internal/spawner/wire"},
	"cmd/rfaas-agent":      {"internal/agent", "internal/systemd"},

	// The packages behind the programs.
	"internal/cli": {"client", "internal/agent", "internal/grant", "lease", "accounting", "invoke", "internal/cli/command", "internal/daemon", "internal/executor", "internal/manager", "internal/board",
		"internal/link", "internal/config", "internal/control", "internal/dataplane", "internal/etcd", "internal/identity", "internal/issuer", "internal/slurm", "internal/systemd", "internal/topology", "internal/zygote", "internal/sandbox"},
	"internal/cli/command": {"internal/control"},
	"internal/daemon":      {},
	"internal/agent":       {"internal/api", "internal/claim", "internal/grant", "internal/control", "internal/dataplane", "internal/identity", "internal/issuer"},
	"internal/slurm":       {"internal/config", "internal/control", "internal/sandbox", "internal/topology"},
	"internal/executor": {"lease", "accounting", "invoke", "internal/beat", "internal/board", "internal/bundle", "internal/link", "internal/config", "internal/control",
		"internal/claim", "internal/datalisten", "internal/dataplane", "internal/handover", "internal/identity", "internal/issuer", "internal/observe", "internal/privilege", "internal/quota",
		"internal/reference", "internal/sandbox", "internal/systemd", "internal/topology", "internal/zygote"},
	"internal/manager": {"accounting", "internal/board", "internal/config", "internal/control", "internal/datalisten", "internal/dataplane", "internal/etcd", "internal/link",
		"internal/history", "internal/identity", "internal/issuer", "internal/observe", "internal/quota", "internal/systemd"},

	// Public packages.
	"client":     {"internal/api", "client/c", "internal/dataplane", "internal/control", "internal/topology"}, // the last two: its tests
	"client/c":   {"internal/dataplane"},
	"lease":      {"internal/api"},
	"accounting": {},
	"invoke":     {"internal/dataplane"},
	"mpi":        {},

	// The base.
	"internal/backtrace":    {},
	"internal/grant":        {"internal/api", "internal/backtrace", "internal/board", "internal/bundle", "internal/claim", "internal/link", "internal/control", "internal/dataplane", "internal/identity"},
	"internal/zygote":       {"internal/api", "internal/beat", "internal/claim", "internal/dataplane", "internal/handover", "internal/leafsum", "internal/sandbox", "internal/spawner", "internal/spawner/wire"},
	"internal/bundle":       {},
	"internal/handover":     {"internal/spawner/wire"},
	"internal/spawner":      {"internal/sandbox", "internal/spawner/wire"},
	"internal/spawner/wire": {},
	"internal/privilege":    {},
	"internal/api":          {}, // generated numbers of the C API
	"internal/sandbox":      {"internal/sandbox/isolation"},
	// Settings of the sandbox, for programs that have no sandbox.
	"internal/sandbox/isolation": {},
	"internal/board":             {"internal/api"},
	"internal/link":              {"accounting", "internal/board", "internal/control", "internal/dataplane"},
	"internal/etcd":              {"accounting"},
	"internal/history":           {"accounting", "internal/board"},
	"internal/identity":          {},
	"internal/control":           {"internal/api", "internal/identity", "internal/quota"},
	"internal/issuer":            {"internal/control", "internal/identity"},
	"internal/observe":           {"internal/control", "internal/identity", "internal/quota"},
	"internal/beat":              {},
	"internal/quota":             {},
	"internal/systemd":           {},
	"internal/config": {"accounting", "internal/control", "internal/identity", "internal/privilege", "internal/quota", "internal/sandbox/isolation",
		"internal/topology"},
	"internal/topology":    {},
	"internal/datalisten":  {"internal/control", "internal/dataplane"},
	"internal/dataplane":   {"internal/api"},
	"internal/claim":       {},
	"internal/reference":   {"internal/topology"}, // its tests
	"internal/leafsum":     {},
	"internal/apigen":      {}, // only `make api` and `make build` run it; no program contains it
	"internal/conventions": {"internal/apigen"},
	"tests/channel":        {"internal/dataplane"},
	"tests/ccalls":         {},
	"tests/docs":           {},
	"tests/leakcheck":      {},
	"tests/agenttest":      {},
	"tests/smalldisk":      {"tests/testkit"},
	"tests/etcdtest":       {"tests/testkit"},
	"tests/testkit":        {},

	// Users of the public packages.
	"examples":     {"client", "invoke", "mpi", "mpi/mpilease"},
	"mpi/mpilease": {"internal/api", "client", "mpi"},
	// Tests of the C library: they run its programs beside agents and executors of their own.
	"tests/capi": {"internal/agent", "client", "invoke", "internal/grant", "internal/config", "internal/control", "internal/dataplane"},
	// Tests of the whole system from outside: it knows programs and the client.
	"tests/faults": {"client"},
	// A hostile client uses the protocol directly, and makes proofs that a regular client would not make.
	"tests/hostile": {"client", "internal/control", "internal/identity"},
	"tests/remote":  {},
	"tests/slurm":   {"client", "internal/control"},
	"tests/cluster": {"internal/etcd", "internal/identity", "internal/issuer"},
	// `rfaas bench` starts the programs that it measures.
	"benchmarks": {"internal/cli/command", "internal/agent", "internal/daemon", "client", "invoke", "accounting", "internal/board", "internal/claim", "internal/link", "internal/config", "internal/control", "internal/dataplane",
		"internal/executor", "internal/identity", "internal/manager", "internal/topology", "internal/zygote"},
}

// cgoLayers may import "C": the data plane, the executor's signals, its side of claims and its reference, the messages between library and agent, the binding of MPI, the bare round trips
// and the leases from C of the benchmarks, and the channels of tests.
var cgoLayers = []string{"internal/dataplane", "cmd/executor", "internal/claim", "internal/leafsum", "internal/reference", "client/c", "internal/agent/protocol", "mpi", "benchmarks/raw", "benchmarks/fromc", "tests/ccalls", "tests/channel"}

// testHelpers may be imported by the tests of any package. internal/datalisten is one for tests that stand in for an executor on tcp.
var testHelpers = []string{"internal/datalisten", "tests/agenttest", "tests/ccalls", "tests/channel", "tests/etcdtest", "tests/leakcheck", "tests/smalldisk", "tests/testkit"}

// noCgo layers reach no C at all, not even through what they import.
var noCgo = []string{"lease", "accounting", "internal/board", "internal/sandbox"}

type listed struct {
	ImportPath   string
	Standard     bool
	CgoFiles     []string
	CFiles       []string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
}

// list returns every package of the module and all they depend on.
func list(t *testing.T) map[string]listed {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", "-json=ImportPath,Standard,CgoFiles,CFiles,Imports,TestImports,XTestImports,Deps",
		"./...")
	cmd.Dir = "../.."
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	all := map[string]listed{}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("go list: %v", err)
		}
		all[p.ImportPath] = p
	}
	return all
}

// inModule returns the path below the module's root.
func inModule(importPath string) (string, bool) {
	return strings.CutPrefix(importPath, module+"/")
}

// layerOf returns the layer of a path below the module's root, or "".
func layerOf(p string) string {
	for ; p != "."; p = path.Dir(p) {
		if _, ok := layers[p]; ok {
			return p
		}
	}
	return ""
}

func within(p string, roots []string) bool {
	return slices.ContainsFunc(roots, func(r string) bool { return p == r || strings.HasPrefix(p, r+"/") })
}

// breaches returns what package p, imported by the given path, imports against the law.
func breaches(p string, imports []string) []string {
	layer := layerOf(p)
	if layer == "" {
		return []string{p + " is in no layer: add it to `layers` in imports_test.go, and to docs/architecture.md or RATIONALE.md"}
	}
	var bad []string
	for _, i := range imports {
		target, ours := inModule(i)
		if !ours {
			continue
		}
		to := layerOf(target)
		if to != layer && !slices.Contains(layers[layer], to) {
			bad = append(bad, p+" imports "+target+": layer "+layer+" may import "+strings.Join(layers[layer], ", "))
		}
	}
	return bad
}

func TestImportsPointDown(t *testing.T) {
	seen := 0
	for ip, pkg := range list(t) {
		p, ours := inModule(ip)
		if !ours {
			continue
		}
		seen++
		// A package's tests may use what the package may, testing helpers of the same layer, and those for every layer.
		tests := slices.DeleteFunc(slices.Concat(pkg.TestImports, pkg.XTestImports), func(i string) bool {
			p, _ := inModule(i)
			return slices.Contains(testHelpers, p)
		})
		for _, b := range breaches(p, slices.Concat(pkg.Imports, tests)) {
			t.Error(b)
		}
	}
	if seen < 2 {
		t.Fatalf("go list shows %d packages of %s", seen, module)
	}
}

func TestLayersHaveNoCycle(t *testing.T) {
	state := map[string]int{} // 1: on the way, 2: done
	var visit func(layer string, way []string)
	visit = func(layer string, way []string) {
		if _, ok := layers[layer]; !ok {
			t.Errorf("%v leads to %q, which is no layer", way, layer)
			return
		}
		switch state[layer] {
		case 1:
			t.Errorf("layers import each other: %v", append(way, layer))
		case 0:
			state[layer] = 1
			for _, next := range layers[layer] {
				visit(next, append(slices.Clone(way), layer))
			}
			state[layer] = 2
		}
	}
	for layer := range layers {
		visit(layer, nil)
	}
}

func TestCgoStaysInItsLayers(t *testing.T) {
	all := list(t)
	for ip, pkg := range all {
		p, ours := inModule(ip)
		if !ours {
			continue
		}
		if (len(pkg.CgoFiles) > 0 || len(pkg.CFiles) > 0) && !within(p, cgoLayers) {
			t.Errorf("%s has C (%s): C lives in %s", p, strings.Join(slices.Concat(pkg.CgoFiles, pkg.CFiles), ", "),
				strings.Join(cgoLayers, ", "))
		}
		if !within(p, noCgo) {
			continue
		}
		for _, d := range append(pkg.Deps, ip) {
			if d == "runtime/cgo" || len(all[d].CgoFiles) > 0 && !all[d].Standard {
				t.Errorf("%s reaches cgo through %s", p, d)
			}
		}
	}
}

// The law's own test: it must be able to find something.
func TestBreachesAreFound(t *testing.T) {
	for _, c := range []struct {
		pkg, imports string
		want         int
	}{
		{"lease", "accounting", 1},
		{"accounting", "lease", 1},
		{"lease", "internal/dataplane", 1},
		{"invoke", "client", 1},
		{"internal/dataplane", "internal/control", 1},
		{"client", "internal/executor", 1},
		{"client", "tests/capi", 1},
		{"cmd/executor", "internal/dataplane", 1},
		{"internal/cli", "benchmarks/latency", 1},
		{"nowhere/at/all", "lease", 1},
		{"tests/capi", "client", 0},
		{"client/internal/cache", "client", 0},
		{"internal/executor", "lease", 0},
		{"lease", "lease/sub", 0},
	} {
		if got := breaches(c.pkg, []string{"fmt", module + "/" + c.imports}); len(got) != c.want {
			t.Errorf("%s imports %s: %v, want %d breaches", c.pkg, c.imports, got, c.want)
		}
	}
}
