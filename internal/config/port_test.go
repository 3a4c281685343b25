package config

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/quota"
)

// The settings for callers reach the port. The defaults allow one client all its leases.
func TestBounds(t *testing.T) {
	c, _, err := load(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b := c.Bounds(640); b.Streams < 640+64 || b.UnauthBytes != 64<<20 || b.FirstCall != 10*time.Second || b.Tenant[quota.Connections] != 1024 ||
		b.Tenant[quota.Streams] != 4096 || b.Tenant[quota.Leases] != 2000 || b.Tenant[quota.UploadBytes] != 128<<20 {
		t.Errorf("%+v", b)
	}
	c, _, err = load([]string{"--connection-streams", "100", "--unauthenticated-memory", "2MiB", "--unauthenticated-time", "3s", "--tenant-connections", "5",
		"--tenant-streams", "6", "--tenant-leases", "7", "--tenant-replaces", "8", "--tenant-upload", "9", "--tenant-log-lines", "0"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	b := c.Bounds(640)
	if b.Streams != 100 || b.UnauthBytes != 2<<20 || b.FirstCall != 3*time.Second {
		t.Errorf("%+v", b)
	}
	for kind, want := range map[quota.Kind]int{quota.Connections: 5, quota.Streams: 6, quota.Leases: 7, quota.Replaces: 8, quota.UploadBytes: 9, quota.LogLines: 0} {
		if b.Tenant[kind] != want {
			t.Errorf("%s: %d, want %d", kind, b.Tenant[kind], want)
		}
	}
	m, err := LoadManager([]string{"--tenant-attaches", "11"}, home, io.Discard, "v1")
	if err != nil || m.Bounds().Tenant[quota.Attaches] != 11 || m.Bounds().Tenant[quota.Connections] != 1024 {
		t.Errorf("%+v, %v", m.Bounds(), err)
	}
}

func TestBadBounds(t *testing.T) {
	for _, arg := range []string{"--connection-streams=5", "--connection-streams=-1", "--unauthenticated-memory=1000", "--unauthenticated-time=0s",
		"--tenant-connections=-1", "--tenant-streams=9999999", "--tenant-leases=-1", "--tenant-replaces=-1", "--tenant-upload=2TiB", "--tenant-log-lines=-1"} {
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		if _, _, err := load([]string{arg}, nil); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", arg, err)
		}
	}
	if _, err := LoadManager([]string{"--tenant-attaches=-1"}, home, io.Discard, "v1"); err == nil || !strings.Contains(err.Error(), "tenant-attaches") {
		t.Error(err)
	}
}
