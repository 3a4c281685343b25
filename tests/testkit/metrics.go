package testkit

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// Metrics returns the metrics that a daemon serves on a unix socket.
func Metrics(t testing.TB, socket string) string {
	t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	r, err := c.Get("http://daemon/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Metric returns the value of a metric that a daemon serves on a unix socket, "" if there is none.
func Metric(t testing.TB, socket, name string) string {
	t.Helper()
	for line := range strings.Lines(Metrics(t, socket)) {
		if value, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), name+" "); ok {
			return value
		}
	}
	return ""
}
