package executor

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/invoke"
)

// compile builds C source with flags and returns the file's bytes.
func compile(t testing.TB, source string, flags ...string) []byte {
	t.Helper()
	dir := t.TempDir()
	out := filepath.Join(dir, "out")
	cmd := exec.Command("cc", append([]string{"-o", out, "-x", "c", "-", "-x", "none"}, flags...)...)
	cmd.Stdin = strings.NewReader(source)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, text)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The numbers that this package copies from C.
func TestConstantsOfTheDataPlane(t *testing.T) {
	for file, lines := range map[string][]string{
		"internal/dataplane/dp_wire.h": {
			fmt.Sprintf("#define DP_DEPTH_MAX %d\n", invoke.MaxDepth),
			fmt.Sprintf("#define DP_EAGER_MAX (%du << 10)", invoke.MaxEager>>10),
		},
		"internal/dataplane/dp_fabric.h": {fmt.Sprintf("DP_PROVIDER_SHM = %d, DP_PROVIDER_VERBS = %d", invoke.ProviderSHM, invoke.ProviderVerbs)},
		"internal/dataplane/dp_status.h": {fmt.Sprintf("DP_BAD_LIBRARY = %d", statusBadLibrary), fmt.Sprintf("DP_BAD_BLOB = %d", statusBadBlob)},
		"worker/message.h":               {fmt.Sprintf("DP_EXIT_CLIENT_GONE = %d", exitClientGone)},
	} {
		b, err := os.ReadFile(filepath.Join("..", "..", file))
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range lines {
			if !bytes.Contains(b, []byte(l)) {
				t.Errorf("%s does not say %q", file, l)
			}
		}
	}
}
