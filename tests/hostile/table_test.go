package hostile

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/agenttest"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
)

var clusterFlag = flag.Bool("cluster", false, "start a cluster and attack it; without it the suite is skipped (make test-hostile)")

func TestMain(m *testing.M) {
	flag.Parse()
	if !*clusterFlag {
		os.Exit(m.Run())
	}
	os.Exit(agenttest.Run(root, func() int { return leakcheck.Run(m, nil) }))
}

// attack is one row of the table.
type attack struct {
	class  string // function, client or outsider
	name   string
	expect string // the refusal, in a few words
	// try attacks, and returns what the attacker got: empty if it was refused.
	try func(c *cluster) (got string)
}

// row is an attack's result.
type row struct {
	attack
	got string // empty: refused
}

// TestHostileTenant runs every attack against one cluster and prints the table of them.
func TestHostileTenant(t *testing.T) {
	if !*clusterFlag {
		t.Skip("run make test-hostile")
	}
	// Functions come last: memory that the executor has allocated during one attack would hide the growth by another.
	attacks := slices.Concat(outsiderAttacks(), clientAttacks(), functionAttacks())
	checkNames(t, attacks)
	c := newCluster(t)
	var rows []row
	t.Cleanup(func() { printTable(t, rows, len(attacks)) })
	for _, a := range attacks {
		t.Run(a.class+"/"+strings.ReplaceAll(a.name, " ", "-"), func(t *testing.T) {
			c.T = t
			r := row{a, "the attack did not end"}
			defer func() {
				c.T = c.whole
				rows = append(rows, r)
			}()
			began, used := time.Now(), c.executor.processorTime()
			r.got = a.try(c)
			if harm := c.harm(); harm != "" {
				r.got = strings.TrimSpace(r.got + " " + harm)
			}
			if r.got != "" {
				t.Errorf("%s: %s\n  expected: %s\n  got:      %s", a.class, a.name, a.expect, r.got)
			}
			t.Logf("%.2f s, the executor ran %v of it", time.Since(began).Seconds(), c.executor.processorTime()-used)
		})
	}
}

// least is how many attacks the suite must have.
const least = 40

// checkNames checks that names are unique and that every class has attacks.
func checkNames(t *testing.T, attacks []attack) {
	t.Helper()
	names, classes := map[string]bool{}, map[string]int{}
	for _, a := range attacks {
		if names[a.class+a.name] {
			t.Errorf("there are two attacks %s: %s", a.class, a.name)
		}
		names[a.class+a.name] = true
		classes[a.class]++
	}
	if len(attacks) < least || classes["function"] == 0 || classes["client"] == 0 || classes["outsider"] == 0 {
		t.Errorf("%d attacks %v, want at least %d of three classes", len(attacks), classes, least)
	}
}

// printTable prints a line for each attack and their count.
func printTable(t *testing.T, rows []row, of int) {
	var b strings.Builder
	line := func(class, name, expect, got, ok string) {
		fmt.Fprintf(&b, "%-8s  %-58s  %-44s  %-44s  %s\n", class, name, expect, got, ok)
	}
	line("class", "attack", "expected", "got", "ok")
	refused := 0
	for _, r := range rows {
		ok, got := "ok", "refused"
		if r.got != "" {
			ok, got = "FAILED", cut(strings.Join(strings.Fields(r.got), " "), 44)
		} else {
			refused++
		}
		line(r.class, r.name, r.expect, got, ok)
	}
	fmt.Fprintf(&b, "%d attacks of %d: %d refused, %d got through\n", len(rows), of, refused, len(rows)-refused)
	t.Logf("the attacks:\n%s", b.String())
}

func cut(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-3]) + "..."
	}
	return s
}

// within returns a context with a time limit that ends with the running attack.
func (c *cluster) within(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	c.Cleanup(cancel)
	return ctx
}

// patience bounds every wait. It is far longer than any wait should take.
const patience = 20 * time.Second

// until waits until cond holds. It returns false if that takes longer than patience.
func until(cond func() bool) bool {
	for end := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		late := time.Now().After(end)
		if cond() {
			return true
		}
		if late {
			return false
		}
	}
}

// settle waits until done holds, or until progress has not changed for a second, when the effects of an attack are
// complete.
func settle(progress func() int, done func() bool) {
	last, since := progress(), time.Now()
	for end := time.Now().Add(patience); !done() && time.Since(since) < time.Second && time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if now := progress(); now != last {
			last, since = now, time.Now()
		}
	}
}
