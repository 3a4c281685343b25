package testkit

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Figures skips a test that measures, unless the figures are wanted.
func Figures(t testing.TB) {
	t.Helper()
	if os.Getenv("RFAAS_TEST_FIGURES") == "" {
		t.Skip("RFAAS_TEST_FIGURES is not set")
	}
}

// Figure prints a row of a table: what was measured, its bound, and whether the bound holds. floor says what else was measured in the same run. Figure never fails the test, because
// the machine may be busy. least: the bound is a minimum.
func Figure(what string, value, bound float64, least bool, unit, floor string) {
	sign, verdict := "<=", "MISSED"
	if least {
		sign = ">="
	}
	if value <= bound && !least || value >= bound && least {
		verdict = "holds"
	}
	fmt.Printf("| %s | %.3g %s | %s %g %s | %s | %s |\n", what, value, unit, sign, bound, unit, verdict, floor)
}

// ForkFloor returns a text with the times of a fork of a process of about a zygote's size, the floor of a worker's start. peer is the path of rfaas-bench-peer.
func ForkFloor(t testing.TB, peer string) string {
	t.Helper()
	out, err := exec.Command(peer, "--fork").Output()
	if err != nil {
		t.Fatalf("%s --fork: %v", peer, err)
	}
	return strings.TrimSpace(string(out))
}
