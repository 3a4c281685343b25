package slurm

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// submit submits a job script and returns its output. The job must end with status 0.
func (c *cluster) submit(args ...string) string {
	c.t.Helper()
	out := filepath.Join(c.files, "job.out")
	os.Remove(out)
	_, err := c.run("head", append([]string{"sbatch", "--wait", "--output=" + out}, args...)...)
	text, _ := os.ReadFile(out)
	if err != nil {
		c.t.Fatalf("%v\n%s", err, text)
	}
	return string(text)
}

// priced checks the output of examples/mpi/blackscholes.
func priced(t *testing.T, out string) {
	t.Helper()
	for _, want := range []string{"against the local ones: 0 wrong", "against published ones: 0 wrong", "remotely (50 %)"} {
		if !strings.Contains(out, want) {
			t.Errorf("the MPI program did not say %q:\n%s", want, out)
		}
	}
}

// mpichProgram builds the example program with MPICH, in another place than make.
func mpichProgram(c *cluster) string {
	if _, err := exec.LookPath("mpicc.mpich"); err != nil {
		c.t.Fatalf("%v: scripts/deps mpi installs it", err)
	}
	dir := filepath.Join(c.files, "build/examples")
	program := filepath.Join(dir, "blackscholes")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		c.t.Fatal(err)
	}
	sources, _ := filepath.Glob(c.root + "/examples/mpi/blackscholes/*.c")
	args := append([]string{"-std=gnu11", "-D_GNU_SOURCE", "-O2", "-I" + c.root + "/include", "-I" + c.root + "/examples/functions", "-o", program}, sources...)
	args = append(args, "-L"+c.root+"/lib", "-lrfaas", "-Wl,-rpath,"+c.root+"/lib", "-lm")
	if out, err := exec.Command("mpicc.mpich", args...).CombinedOutput(); err != nil {
		c.t.Fatalf("mpicc.mpich: %v\n%s", err, out)
	}
	return program
}

// MPI jobs of the batch partition use the spare cores of their own nodes by shared memory, with each MPI. A self-contained job
// starts its own manager and executors.
func TestMPIJobs(t *testing.T) {
	c := hooked(t, 2)
	examples := c.root + "/scripts/slurm/examples/"
	program := c.root + "/build/examples/blackscholes"
	if c.awaitAll(2)["n1"].Cores < 2 {
		t.Fatal("nodes of one CPU have nothing to spare for a job: TestMPIJobs needs two")
	}
	arguments := []string{"--n", "20000", "--samples", "0", "--remote-share", "0.5", "--options", c.root + "/examples/mpi/blackscholes/options.txt",
		"--library", c.root + "/build/functions/blackscholes.so"}
	run := func(script, program string, options ...string) {
		t.Helper()
		priced(t, c.submit(append(append(append(options, examples+script), program), arguments...)...))
	}
	run("openmpi.sbatch", program, "--mem=256")
	// Debian's MPICH 4.0.2 sometimes hangs in MPI_Finalize if ranks are on several nodes, with and without rfaas.
	run("mpich.sbatch", mpichProgram(c), "--mem=256", "--nodes=1")
	run("selfcontained.sbatch", program)
	if out := c.must("head", "sinfo", "-h", "-p", "batch", "-o", "%T"); strings.Contains(out, "drain") {
		t.Errorf("nodes are %s", out)
	}
}

// An MPI job of the batch partition uses the executor on another node, over tcp, or over verbs in a virtual machine with an RDMA
// device. The job takes the other nodes, whose executors drain and start again. The executor in use is not affected.
func TestMPIJobOnOtherNodes(t *testing.T) {
	provider := "tcp"
	var manager []string
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		provider = "verbs"
	} else {
		manager = []string{"--providers", "shm,tcp", "--data-listen", headAddress + ":0"}
		t.Setenv("RFAAS_EXECUTOR_PROVIDERS", "shm,tcp")
		t.Setenv("RFAAS_DATA_ENCRYPTION", "require") // of the ranks; control messages are in plaintext here
	}
	// Keeps the MPI library from using the RDMA device between ranks.
	t.Setenv("OMPI_MCA_pml", "ob1")
	t.Setenv("OMPI_MCA_btl", "self,tcp")
	c := up(t, 3, "--grace", "10") // three nodes on a machine of two CPUs are too slow for short times
	c.manage(manager...)
	c.follow("follow")
	before := c.awaitAll(3)
	out := c.submit("--nodelist=n1,n2", "--exclusive", c.root+"/scripts/slurm/examples/openmpi.sbatch", c.root+"/build/examples/blackscholes",
		"--n", "20000", "--samples", "100", "--remote-share", "0.5", "--options", c.root+"/examples/mpi/blackscholes/options.txt",
		"--library", c.root+"/build/functions/blackscholes.so")
	t.Logf("the job said:\n%s", out)
	priced(t, out)
	for _, want := range []string{"2 ranks", "(" + provider + ", executor ", " on n3)"} {
		if !strings.Contains(out, want) {
			t.Errorf("the MPI program did not say %q", want)
		}
	}
	if provider == "tcp" {
		log, err := os.ReadFile(filepath.Join(c.files, "rfaas-n3.log"))
		if err != nil || !strings.Contains(string(log), "by=memory provider=tcp") {
			t.Errorf("the executor does not report by the manager's memory over tcp: %v\n%s", err, log)
		}
	}
	after := c.awaitAll(3)
	for node, e := range before {
		if same := after[node].Incarnation == e.Incarnation; same != (node == "n3") {
			t.Errorf("%s: the same executor as before: %v", node, same)
		}
	}
	c.checkRecords(2)
}
