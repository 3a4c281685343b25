package slurm

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestExpandHosts(t *testing.T) {
	for in, want := range map[string]string{
		"": "", "(null)": "", "None": "", "n1": "n1", "n1,n2": "n1 n2",
		"n[1-3]":            "n1 n2 n3",
		"n[1-3,07],login":   "n1 n2 n3 n07 login",
		"n[098-101]":        "n098 n099 n100 n101",
		"r[1-2]n[1-2]":      "r1n1 r1n2 r2n1 r2n2",
		"r[1-2]n[1-2]-ib":   "r1n1-ib r1n2-ib r2n1-ib r2n2-ib",
		"a-b[5],c":          "a-b5 c",
		" n1\n":             "n1",
		"gpu-a[0-1],n[3,5]": "gpu-a0 gpu-a1 n3 n5",
	} {
		got, err := ExpandHosts(in)
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"n[", "n]", "n[1-", "n[1-2", "n[a]", "n[2-1]", "n[1,]", "n[]", "n[[1]]", "n1,,n2", ",", "n[0-4294967295]",
		"n[0-999]m[0-999]", "n[-1]", "n[1--2]"} {
		if got, err := ExpandHosts(in); err == nil {
			t.Errorf("%q: %d hosts", in, len(got))
		}
	}
}

// Whatever is expanded is bounded, and expands to itself again.
func FuzzExpandHosts(f *testing.F) {
	for _, s := range []string{"n[1-3,07],login", "r[1-2]n[1-2]", "n[", "a,b", "n[0-99999999]"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ExpandHosts(s)
		if err != nil {
			return
		}
		if len(got) > maxHosts {
			t.Fatalf("%d hosts", len(got))
		}
		if len(got) > 1000 {
			return
		}
		again, err := ExpandHosts(strings.Join(got, ","))
		if err != nil || !slices.Equal(again, got) && fmt.Sprint(got) != "[]" {
			t.Fatalf("%q: %q, and again %q, %v", s, got, again, err)
		}
	})
}
