package cli

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/config"
)

// scriptDir is the directory of the scripts for Slurm.
const scriptDir = "../../scripts/slurm"

// An executor job uses plain text only if the administrator sets it, never because a setting is missing.
func TestExecutorJobNeverTurnsToPlainText(t *testing.T) {
	bin := t.TempDir()
	srun := "#!/bin/sh\nfor a; do echo \"$a\"; done\n"
	if err := os.WriteFile(filepath.Join(bin, "srun"), []byte(srun), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		environ []string
		refused string
	}{
		"nothing is set":                  {refused: "--identity-dir"},
		"an empty identity":               {environ: []string{"RFAAS_EXECUTOR_IDENTITY_DIR="}, refused: "--identity-dir"},
		"an identity":                     {environ: []string{"RFAAS_EXECUTOR_IDENTITY_DIR=/etc/rfaas/identity"}},
		"clients may speak it":            {environ: []string{"RFAAS_ALLOW_PLAINTEXT=1"}, refused: "--identity-dir"},
		"the administrator says so":       {environ: []string{"RFAAS_EXECUTOR_ALLOW_PLAINTEXT=true"}},
		"the administrator says no to it": {environ: []string{"RFAAS_EXECUTOR_ALLOW_PLAINTEXT=false"}, refused: "--identity-dir"},
	} {
		t.Run(name, func(t *testing.T) {
			environ := append([]string{"PATH=" + bin + ":/usr/bin:/bin", "HOME=/nonexistent"}, c.environ...)
			cmd := exec.Command("bash", scriptDir+"/executor.sbatch")
			cmd.Env = environ
			out, err := cmd.Output()
			if err != nil {
				t.Fatal(err)
			}
			args := strings.Split(strings.TrimSpace(string(out)), "\n")
			if i := slices.Index(args, "--"); i < 0 || !slices.Contains(args, "slurm") {
				t.Fatalf("the script starts %q", args)
			} else {
				args = args[i+1:]
			}
			_, err = config.LoadExecutor(args, environ, io.Discard, "test")
			if c.refused == "" && err != nil || c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused)) {
				t.Errorf("the executor with %q: %v; want an error with %q", args, err, c.refused)
			}
		})
	}
}

// A user's job script uses what the user has: a token or, with an explicit setting, a trusted network.
func TestJobScriptsLeaveTLSToTheUser(t *testing.T) {
	for _, name := range []string{"openmpi.sbatch", "mpich.sbatch"} {
		bin := t.TempDir()
		if err := os.WriteFile(filepath.Join(bin, "srun"), []byte("#!/bin/sh\nenv\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		for _, own := range []string{"", "RFAAS_ALLOW_PLAINTEXT=1"} {
			cmd := exec.Command("bash", filepath.Join(scriptDir, "examples", name))
			cmd.Env = append([]string{"PATH=" + bin + ":/usr/bin:/bin", "HOME=/nonexistent"}, strings.Fields(own)...)
			out, err := cmd.Output()
			if err != nil || !strings.Contains(string(out), "RFAAS_MANAGER=") {
				t.Fatalf("%s: %q, %v", name, out, err)
			}
			if got := strings.Contains(string(out), "ALLOW_PLAINTEXT"); got != (own != "") {
				t.Errorf("%s with %q: %s", name, own, out)
			}
		}
	}
}
