package capi

import (
	"os/exec"
	"testing"
)

// The processes of Python's multiprocessing, forked from one that has used the library or started anew, call functions through ctypes.
func TestPythonProcesses(t *testing.T) {
	crosses(t)
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Fatalf("%v: run make deps", err)
	}
	for _, method := range []string{"fork", "spawn", "forkserver"} {
		t.Run(method, func(t *testing.T) {
			t.Log(runWith(t, []string{"--share-cores", "4", "--max-workers", "8"}, python, "testdata/processes.py", built(t, "lib/librfaas.so"),
				built(t, "build/functions/echo.so"), method, "4"))
		})
	}
}
