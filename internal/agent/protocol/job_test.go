package protocol

import (
	"strings"
	"testing"
)

func TestJob(t *testing.T) {
	long := strings.Repeat("9", 300)
	for _, k := range []struct {
		env  map[string]string
		want string
	}{
		{nil, ""},
		{map[string]string{"SLURM_JOB_ID": "12", "SLURM_JOBID": "13"}, "12"},
		{map[string]string{"SLURM_JOB_ID": "", "PBS_JOBID": "7.host"}, "7_host"},
		{map[string]string{"SLURM_JOB_ID": "../../etc/x\n"}, "______etc_x_"},
		{map[string]string{"SLURM_JOB_ID": "1\x002"}, "1"},
		{map[string]string{"FLUX_JOB_ID": "ƒ2X", "SLURM_JOB_ID": "12"}, "__2X"},
		{map[string]string{"FLUX_JOB_ID": "f2X"}, "f2X"},
		{map[string]string{"PBS_JOBID": "1234[56].server.site.example"}, "1234_56__server_site_example"},
		{map[string]string{"PBS_JOBID": long}, long[:32]},
		{map[string]string{"LSB_JOBID": "5", "LSB_JOBINDEX": "0"}, "5"},
		{map[string]string{"LSB_JOBID": "5", "LSB_JOBINDEX": "31"}, "5_31"},
		{map[string]string{"LSB_JOBID": long, "LSB_JOBINDEX": long}, long[:32] + "_" + long[:14]},
		{map[string]string{"JOB_ID": "5", "SGE_TASK_ID": "3"}, ""},
		{map[string]string{"JOB_ID": "5", "SGE_ROOT": "/opt/sge"}, "5"},
		{map[string]string{"JOB_ID": "5", "SGE_ROOT": "/opt/sge", "SGE_TASK_ID": "undefined"}, "5"},
		{map[string]string{"JOB_ID": "5", "SGE_ROOT": "/opt/sge", "SGE_TASK_ID": "3"}, "5_3"},
	} {
		if got := Job(func(name string) string { return k.env[name] }); got != k.want {
			t.Errorf("%v: %q, want %q", k.env, got, k.want)
		}
	}
}
