package capi

import (
	"os"
	"testing"
)

// TestDescriptor has loops around poll wait for calls, with one thread and with several, while workers end, calls reach their deadlines and
// leases are released.
func TestDescriptor(t *testing.T) {
	crosses(t)
	program := build(t, "gcc", "testdata/descriptor_test.c", checkedC()...)
	library := built(t, "build/functions/echo.so")
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Log(run(t, program, library))
		return
	}
	for _, provider := range []string{"shm", "tcp"} {
		t.Run(provider, func(t *testing.T) {
			t.Setenv("RFAAS_PROVIDER", provider)
			t.Log(runWith(t, []string{"--providers", provider}, program, library))
		})
	}
}
