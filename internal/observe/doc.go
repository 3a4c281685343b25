// Package observe is what a daemon shows of itself over HTTP: /healthz, /readyz, /metrics in the format of Prometheus, and
// what the daemon adds to Mux. It changes nothing and asks for no credentials, so nothing here may name a tenant, a secret or
// a lease; a handler that is added and does has to ask itself.
package observe
