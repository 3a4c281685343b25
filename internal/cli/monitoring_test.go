package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/rfaas-go/rfaas/tests/etcdtest"
)

// The alert rules and the dashboard name only metrics and labels that the daemons export.
func TestMonitoringNamesExist(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	env := map[string]string{"RFAAS_CLUSTER_DIR": in("cluster"), "HOME": dir}
	etcd := etcdtest.Start(t, etcdtest.Options{}).Endpoint
	for _, args := range [][]string{{"cluster", "init", "--name", "here"}, {"cluster", "node", "localhost", "--out", in("node")},
		{"ledger", "etcd", "init", "--etcd-endpoints", etcd}} {
		var out bytes.Buffer
		if code := Run(t.Context(), Env{Version: "v1", Getenv: func(k string) string { return env[k] }, Stdout: &out, Stderr: &out}, args); code != 0 {
			t.Fatalf("%v: %s", args, out.String())
		}
	}
	startDaemon(t, "bin/resource-manager", "--listen", "unix:"+in("m"), "--secret-file", in("secret"), "--identity-dir", in("node"), "--http-listen", "unix:"+in("hm"),
		"--etcd-endpoints", etcd)
	startDaemon(t, "bin/executor", "--listen", "unix:"+in("x"), "--secret-file", in("secret"), "--identity-dir", in("node"), "--sandbox", "on", "--manager", "unix:"+in("m"), "--cores", "1",
		"--providers", "shm", "--http-listen", "unix:"+in("hx"))
	exported := map[string]string{"up": ""} // the lines of each metric
	for _, socket := range []string{in("hm"), in("hx")} {
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}
		r, err := client.Get("http://daemon/metrics")
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.SplitSeq(string(text), "\n") {
			name, _, _ := strings.Cut(line, " ")
			name, _, _ = strings.Cut(name, "{")
			exported[name] += line + "\n"
		}
	}
	metric := regexp.MustCompile(`\b(rfaas_[a-z_]+|up)\b(?:\{([^}]*)\})?`)
	label := regexp.MustCompile(`([a-z_]+)(=~?|!=)"([^"]*)"`)
	check := func(where, expression string) {
		t.Helper()
		found := metric.FindAllStringSubmatch(expression, -1)
		if len(found) == 0 {
			t.Errorf("%s names no metric: %s", where, expression)
		}
		for _, m := range found {
			lines, ok := exported[m[1]]
			if !ok {
				t.Errorf("%s: no daemon exports %s", where, m[1])
			}
			for _, l := range label.FindAllStringSubmatch(m[2], -1) {
				if l[1] == "job" || l[1] == "instance" { // of Prometheus
					continue
				}
				if want := l[1] + `="`; !strings.Contains(lines, want) || l[2] == "=" && !strings.Contains(lines, want+l[3]+`"`) {
					t.Errorf("%s: %s has no %s", where, m[1], l[0])
				}
			}
		}
	}
	text, err := os.ReadFile("../../packaging/monitoring/rfaas.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr string
				Labels      map[string]string
				Annotations map[string]string
			}
		}
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&rules); err != nil || len(rules.Groups) != 1 || len(rules.Groups[0].Rules) < 10 {
		t.Fatalf("rules: %v", err)
	}
	for _, r := range rules.Groups[0].Rules {
		check(r.Alert, r.Expr)
		if r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("%s lacks a severity, a summary or a description", r.Alert)
		}
	}
	if text, err = os.ReadFile("../../packaging/monitoring/grafana-rfaas.json"); err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil || len(board.Panels) < 10 {
		t.Fatalf("dashboard: %v", err)
	}
	for _, p := range board.Panels {
		for _, x := range p.Targets {
			check(p.Title, x.Expr)
		}
	}
}
