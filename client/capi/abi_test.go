package capi

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// abi returns what a compiled program depends on in a header: places and sizes of the fields of every structure, values of
// every constant, and the declarations of every function, one a line.
func abi(t *testing.T, header string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(header)
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	var c strings.Builder
	c.WriteString("#include <rfaas.h>\n#include <stdio.h>\nint main(void) {\n")
	for _, s := range regexp.MustCompile(`(?s)typedef struct (rfaas_\w+) \{(.*?)\n\} `).FindAllStringSubmatch(text, -1) {
		body := regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(s[2], "")
		for _, f := range regexp.MustCompile(`(\w+)(\[\d+\])?;`).FindAllStringSubmatch(body, -1) {
			c.WriteString(`printf("` + s[1] + "." + f[1] + ` %zu+%zu\n", offsetof(` + s[1] + "," + f[1] + "), sizeof((" + s[1] + "*)0)->" + f[1] + ");\n")
		}
	}
	for _, d := range regexp.MustCompile(`(?m)^#define (RFAAS_[A-Z_]+) [^\\\n]*$`).FindAllStringSubmatch(text, -1) {
		if d[1] != "RFAAS_API" && !strings.HasPrefix(d[1], "RFAAS_VERSION") {
			c.WriteString(`printf("` + d[1] + ` %lld\n", (long long)(` + d[1] + "));\n")
		}
	}
	c.WriteString("}\n")
	dir := t.TempDir()
	source := filepath.Join(dir, "abi.c")
	if err := os.WriteFile(source, []byte(c.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-std=gnu11", "-I", filepath.Dir(header), "-o", filepath.Join(dir, "abi"), source).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	out, err := exec.Command(filepath.Join(dir, "abi")).Output()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for line := range strings.Lines(string(out)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		found[name] = value
	}
	for _, f := range regexp.MustCompile(`(?s)RFAAS_API ([^;]*?(rfaas_\w+)\([^;]*)\);`).FindAllStringSubmatch(text, -1) {
		found[f[2]+"()"] = strings.Join(strings.Fields(f[1]), " ")
	}
	return found
}

// What a published header says stays so: fields in their places, constants with their values, functions as declared.
func TestABIOnlyGrows(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		t.Skip("a header is the same on every fabric")
	}
	headers, err := filepath.Glob("testdata/frozen/*/rfaas.h")
	if err != nil || len(headers) == 0 {
		t.Fatalf("no frozen headers: %v", err)
	}
	now := abi(t, root+"/internal/dataplane/rfaas.h")
	for _, header := range headers {
		then := abi(t, header)
		if len(then) < 90 {
			t.Errorf("only %d names were found in %s", len(then), header)
		}
		for name, value := range then {
			if now[name] != value {
				t.Errorf("%s: %s was %q and is %q", header, name, value, now[name])
			}
		}
	}
}
