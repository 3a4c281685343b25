package observe

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"testing"
	"time"
)

// slow opens connections that send only the first byte of a request.
func slow(t *testing.T, address, first string, n int) {
	t.Helper()
	for range n {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := io.WriteString(c, first); err != nil {
			t.Fatal(err)
		}
	}
}

// Slow connections do not delay answers to others, and do not end connections that make requests. Time-outs play no
// part: the test switches them off.
func TestSlowConnections(t *testing.T) {
	certified := httptest.NewTLSServer(nil)
	defer certified.Close()
	for scheme, c := range map[string]struct {
		tls   *tls.Config
		first string
	}{"http": {nil, "G"}, "https": {&tls.Config{Certificates: certified.TLS.Certificates}, "\x16"}} {
		t.Run(scheme, func(t *testing.T) {
			s, err := Open("127.0.0.1:0", c.tls, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			s.http.ReadHeaderTimeout, s.http.ReadTimeout, s.http.IdleTimeout = 0, 0, 0
			s.Serve()
			t.Cleanup(func() {
				ended, cancel := context.WithCancel(context.Background())
				cancel()
				s.Close(ended)
			})
			client := certified.Client()
			client.Timeout = 20 * time.Second
			defer client.CloseIdleConnections()
			fresh := client.Transport.(*http.Transport).Clone()
			fresh.DisableKeepAlives = true
			another := &http.Client{Transport: fresh, Timeout: client.Timeout}
			reused := false
			ask := func(client *http.Client) {
				t.Helper()
				trace := &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) { reused = i.Reused }}
				r, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), http.MethodGet, scheme+"://"+s.Address+"/healthz", nil)
				if err != nil {
					t.Fatal(err)
				}
				answer, err := client.Do(r)
				if err != nil {
					t.Fatal(err)
				}
				defer answer.Body.Close()
				if text, err := io.ReadAll(answer.Body); err != nil || string(text) != "ok\n" {
					t.Errorf("%q, %v", text, err)
				}
			}
			slow(t, s.Address, c.first, 300)
			ask(client)
			for range 6 {
				slow(t, s.Address, c.first, 100)
				ask(another) // the answer to a new connection shows that the slow ones before it have been accepted
				if ask(client); !reused {
					t.Error("a connection that makes requests was closed for slow ones")
				}
			}
		})
	}
}
