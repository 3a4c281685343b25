package conventions

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// source reads a file of the repository.
func source(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(name)))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var (
	hexBlock   = regexp.MustCompile("(?s)```hex (\\w+)\n(.*?)```")
	hexString  = regexp.MustCompile(`(?s)\bgolden_(\w+)\[\] =\s*(.*?);`)
	hexOnly    = regexp.MustCompile(`^([0-9a-f]{2} )*[0-9a-f]{2}$`)
	enumStatus = regexp.MustCompile(`\bDP_([A-Z_]+) = (-\d+),`)
	abiStatus  = regexp.MustCompile(`(?m)^#define RFAAS_([A-Z_]+) \((-\d{3})\)`)
	docStatus  = regexp.MustCompile(`\b([A-Z_]{4,}) (-\d+)\b`)
)

// found returns what a pattern with a name and a value finds, the values freed from what clean removes.
func found(t *testing.T, file string, pattern *regexp.Regexp, clean *strings.Replacer) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, m := range pattern.FindAllStringSubmatch(source(t, file), -1) {
		if _, twice := all[m[1]]; twice {
			t.Errorf("%s states %s twice", file, m[1])
		}
		all[m[1]] = strings.Join(strings.Fields(clean.Replace(m[2])), " ")
	}
	return all
}

func compare(t *testing.T, what string, a, b map[string]string) {
	t.Helper()
	names := slices.Sorted(maps.Keys(a))
	for name := range b {
		if _, ok := a[name]; !ok {
			names = append(names, name)
		}
	}
	for _, name := range names {
		if a[name] != b[name] {
			t.Errorf("%s: %s is\n  %q and\n  %q", what, name, a[name], b[name])
		}
	}
}

func TestGoldenBytesOfDocumentAndCode(t *testing.T) {
	doc := found(t, "docs/PROTOCOL.md", hexBlock, strings.NewReplacer("\n", " "))
	code := found(t, "tests/c/wire_test.c", hexString, strings.NewReplacer(`"`, " "))
	for name, hex := range doc {
		if !hexOnly.MatchString(hex) {
			t.Errorf("docs/PROTOCOL.md: %s is not hex bytes: %q", name, hex)
		}
	}
	for _, name := range []string{"request_short", "request_long", "request_keyed", "request_chain", "reply", "reply_chain", "channel_blob"} {
		if doc[name] == "" {
			t.Errorf("docs/PROTOCOL.md has no golden bytes %s", name)
		}
	}
	compare(t, "docs/PROTOCOL.md and wire_test.c", doc, code)
}

func TestStatusesAreTheSameEverywhere(t *testing.T) {
	clean := strings.NewReplacer()
	enum := found(t, "internal/dataplane/dp_status.h", enumStatus, clean)
	if len(enum) < 10 {
		t.Fatalf("dp_status.h states %d statuses", len(enum))
	}
	compare(t, "dp_status.h and docs/PROTOCOL.md", enum, found(t, "docs/PROTOCOL.md", docStatus, clean))
	compare(t, "dp_status.h and rfaas.h", enum, found(t, "client/c/rfaas.h", abiStatus, clean))
}

// Sizes that the document states in words, against the constants.
func TestSizesOfDocumentAndCode(t *testing.T) {
	wire, doc := source(t, "internal/dataplane/dp_wire.h"), source(t, "docs/PROTOCOL.md")
	for _, c := range []struct{ define, value, inDoc string }{
		{"DP_WIRE_VERSION", "1", "wire version is 1."},
		{"DP_SLOT_ROOM", "64", "64 bytes of header room"},
		{"DP_DEPTH_MAX", "1024", "1 to 1024"},
		{"DP_EAGER_MAX", "(256u << 10)", "64 to 262,144"},
		{"DP_EAGER_DEFAULT", "(16u << 10)", "default 16,384"},
		{"DP_BULK_MAX", "(1ull << 32)", "up\nto 4 GiB"},
		{"DP_BULK_DEFAULT", "(2ull << 20)", "default 2 MiB"},
		{"DP_REQ_LONG", "32", "long form is 32 bytes"},
		{"DP_REQ_SHORT", "24", "its last 24"},
		{"DP_REQ_KEYED", "40", "keyed form is 40 bytes"},
		{"DP_REPLY_SIZE", "16", "header is 16 bytes"},
		{"DP_CHANNEL_BLOB_MAX", "256", "together at most 256 bytes"},
	} {
		if !regexp.MustCompile(`(?m)^#define ` + c.define + ` ` + regexp.QuoteMeta(c.value) + `( |$)`).MatchString(wire) {
			t.Errorf("dp_wire.h: %s is not %s any more; docs/PROTOCOL.md says %q", c.define, c.value, c.inDoc)
		}
		if !strings.Contains(strings.ReplaceAll(doc, "\n", " "), strings.ReplaceAll(c.inDoc, "\n", " ")) {
			t.Errorf("docs/PROTOCOL.md does not say %q (%s)", c.inDoc, c.define)
		}
	}
}

// The targets that people and CI rely on.
func TestMakefileTargets(t *testing.T) {
	text := source(t, "Makefile")
	for target := range strings.FieldsSeq("help deps build run test test-go test-race test-c test-softroce fuzz lint check bench install uninstall clean proto") {
		if !regexp.MustCompile(fmt.Sprintf(`(?m)^%s:.* ## `, target)).MatchString(text) {
			t.Errorf("Makefile: no documented target %s", target)
		}
	}
}
