package docs

// page is a document. The test runs each of its commands, or knows why it does not.
type page struct {
	name  string
	steps []step
}

// step says what the test does with a command of a page: it runs the command, unless by or reason is set.
type step struct {
	command string
	by      string   // FILE: TEXT, a script or a test that CI runs, and which runs this command by a line with that text
	reason  string   // why CI cannot run the command
	with    []string // pairs: what the page has, and what the test has instead
	first   string   // what the page says in its text, or what the test prepares, before the command
	then    string   // what follows the command on its line
	ready   string   // not empty: the command is a daemon, which has started when its output has this text
}

// machine begins each script. A function for each way to run a command, and a network, a host name and layers over directories of the system.
const machine = `
now() { echo "+ $* ($(date +%T.%N | cut -c1-12))"; }
layer() { mkdir -p "$DIR/layer$1/up" "$DIR/layer$1/work" && mount -t overlay -o "lowerdir=$1,upperdir=$DIR/layer$1/up,workdir=$DIR/layer$1/work" overlay "$1"; }
# A line for each step: bash -e does not end at a failure before &&, and the next steps would change the real /etc and /var/lib.
mkdir "$DIR/layer"
mount -t tmpfs layer "$DIR/layer"
layer /etc
layer /var/lib
mount -t tmpfs -o mode=1777 shm /dev/shm
ip link set lo up
for a in 10.0.0.1 10.0.0.7; do ip addr add "$a/32" dev lo; done
echo '10.0.0.1 service service1
10.0.0.7 node7 node1' >>/etc/hosts
hostname service
daemon() {
	local log=$HOME/log.$RANDOM ready=$1
	shift
	"$@" >"$log" 2>&1 &
	daemons+=($!)
	until grep -qE -- "$ready" "$log"; do kill -0 $! 2>/dev/null || { cat "$log" && exit 1; }; sleep 0.02; done
}
daemons=()
# fresh: a user's new home, with the files of the pages.
fresh() {
	for p in "${daemons[@]}"; do kill "$p"; done
	wait
	daemons=()
	export HOME=$(mktemp -d "$DIR/home.XXXX")
	export XDG_RUNTIME_DIR=$HOME/run
	chmod 755 "$HOME" && mkdir -m 700 "$XDG_RUNTIME_DIR" && cd "$HOME" && cp "$DIR"/*.c "$DIR"/*.py . && rm -rf /etc/rfaas /var/lib/rfaas
}
# identity DIR and token FILE: copied to where daemons and programs look for them.
issuer='setpriv --reuid=nobody --clear-groups' # as the user of the issuer
identity() { mkdir -p /etc/rfaas && rm -rf /etc/rfaas/identity && cp -r "$1" /etc/rfaas/identity; }
token() { mkdir -p ~/.rfaas && cp "$1" ~/.rfaas/token; }
program() { rfaas-cc -o libhypot.so hypot.c -lm && cc -o program program.c $(pkg-config --cflags --libs rfaas); }
cluster() { rfaas cluster init && rfaas cluster node service 10.0.0.1 10.0.0.7 && identity service && rfaas token issue --tenant boss --role operator && token boss.token; }
fresh
`

const (
	systemd = "the machines of the tests have no systemd; the lane install checks the units by systemd-analyze, and the lane packages the calls of systemctl by the packages' scripts"
	nodes   = "500 nodes"
	etcd    = "an etcd of three members; the lane faults runs each command and setting with one member"
)

var pages = []page{
	{"README.md", []step{
		{command: "make run", by: "Makefile: $(Q)scripts/demo"},
		{command: "sudo make install && sudo ldconfig", by: "tests/run: install DESTDIR="},
		{command: "rfaas-cc -o libhypot.so hypot.c -lm"},
		{command: "cc -o program program.c $(pkg-config --cflags --libs rfaas)"},
		{command: "rfaas run -- ./program", then: ` | grep -qx 5; for p in python-*.py; do RFAAS_EXECUTOR_CORES=2 rfaas run --cores 2 -- /usr/bin/python3 "$p"; done | tee out; grep -qx 5.0 out; [ "$(grep -c '^\[1.0, 1.41' out)" = 2 ]`},
	}},
	{"CONTRIBUTING.md", []step{
		{command: "make build", by: "Makefile: build-tests: build"},
		{command: "make check", by: "Makefile: check: build test-programs lint"},
		{command: "make test", by: "Makefile: $(Q)tests/run"},
		{command: "make test-hostile", by: "tests/run: test-hostile"},
		{command: "make fuzz", reason: "a minute for each of many targets; the lane fuzz runs them for a shorter time"},
		{command: "make bench", reason: "thirteen minutes on a quiet machine; the lane guard runs a part"},
	}},
	{"docs/deploying.md", []step{
		{command: "rfaas cluster init"},
		{command: "rfaas cluster node service"},
		{command: "for n in $(seq -w 1 500); do rfaas cluster node node$n; done", with: []string{"1 500", "499 500"}, then: "; ls -d node499 node500"},
		{command: "for n in service $(seq -f node%03g 1 500); do\nrunuser -u rfaas-issuer -- rfaas cluster enrol-code --dir /var/lib/rfaas-issuer --node $n |\nssh $n 'rfaas cluster join --code-file /dev/stdin --host '$n'\ndone", reason: nodes},
		{command: "pdcp -w service rfaas-manager_*.deb /tmp", reason: nodes},
		{command: "pdcp -w node[001-500] rfaas-executor_*.deb rfaas-agent_*.deb librfaas0_*.deb executor.yaml /tmp", reason: nodes},
		{command: "pdsh -w service apt-get install -y /tmp/rfaas-manager_*.deb", reason: nodes},
		{command: "pdsh -w node[001-500] -f 64 'apt-get install -y /tmp/rfaas-executor_*.deb /tmp/rfaas-agent_*.deb /tmp/librfaas0_*.deb &&\ninstall -m 644 /tmp/executor.yaml /etc/rfaas/'", reason: nodes},
		{command: "for n in service $(seq -f node%03g 1 500); do rsync -a --chmod=go= $n/ $n:/etc/rfaas/identity/; done", reason: nodes},
		{command: "pdsh -w service systemctl enable --now rfaas-resource-manager", reason: nodes},
		{command: "pdsh -w node[001-500] -f 64 systemctl enable --now rfaas-executor", reason: nodes},
		{command: "ansible-playbook -f 50 -i inventory packaging/ansible/rfaas.yml -e packages=build/deb -e identities=.", reason: nodes + "; the lane packages reads the playbook"},
		{command: "RFAAS_MANAGER=service:7464 rfaas executors", first: "identity service; rfaas token issue --tenant ann; token ann.token; " +
			"daemon msg=ready resource-manager --listen 0.0.0.0:7464 --identity-dir /etc/rfaas/identity"},
		{command: "pdsh -w node[001-500] -f 64 rfaas doctor | dshbak -c", reason: nodes},
	}},
	{"docs/operations.md", []step{
		{command: "apt install ./build/deb/*.deb", by: `packaging/test-debs: install /debs/old/*.deb`},
		{command: "rfaas demo", by: "packaging/test-debs: rfaas demo"},
		{command: "systemctl enable --now rfaas-resource-manager", reason: systemd},
		{command: "systemctl enable --now rfaas-executor", reason: systemd},
		{command: "scripts/deps build", by: "Makefile: scripts/deps"},
		{command: "make build", by: "Makefile: build-tests: build"},
		{command: "sudo make install PREFIX=/opt/rfaas", by: "tests/run: install DESTDIR="},
		{command: "make install PREFIX=/opt/rfaas DESTDIR=/tmp/tree", by: "tests/run: install DESTDIR="},

		{command: "rfaas cluster init"},
		{command: "rfaas cluster node service && rfaas cluster node node1"},
		{command: "rfaas token issue --tenant ann"},
		{command: "resource-manager --listen 0.0.0.0:7464 --identity-dir /etc/rfaas/identity --state-dir /var/lib/rfaas/manager", first: "identity service; token ann.token; program", ready: "msg=ready"},
		{command: "executor --listen 0.0.0.0:7465 --manager service:7464 --identity-dir /etc/rfaas/identity --state-dir /var/lib/rfaas/executor", ready: "msg=registered"},
		{command: "RFAAS_MANAGER=service:7464 mpirun ./program", then: " | grep -qx 5"},

		{command: "rfaas cluster init", first: "fresh"},
		{command: "rfaas cluster node node7 10.0.0.7 --out node7"},
		{command: "rfaas token issue --tenant ann --uid 1001"},
		{command: "rfaas token list", then: " | grep ann"},
		{command: "rfaas token show [FILE]", with: []string{"[FILE]", "ann.token"}},
		{command: "rfaas token verify [FILE]", with: []string{"[FILE]", "ann.token"}},
		{command: "rfaas token get", by: `internal/cli/issuer_test.go: "token", "get"`},
		{command: "rfaas token revoke --mine", by: `internal/cli/issuer_test.go: "--mine"`},
		{command: "rfaas token renew FILE", with: []string{"FILE", "ann.token"}},
		{command: "rfaas token revoke ID|FILE", with: []string{"ID|FILE", "ann.token"}},
		{command: "rfaas token revoke --tenant ann", first: "rfaas token issue --tenant ann --out second.token"},
		{command: "rfaas cluster nodes", then: " | grep node7"},
		{command: "rfaas cluster revoke DIR|FILE", first: "rfaas cluster node node8", with: []string{"DIR|FILE", "node8"}},
		{command: "rfaas cluster revoke --node node7"},
		{command: "rfaas cluster renew DIR...", first: "rfaas cluster node node9", with: []string{"DIR...", "node9"}},
		{command: "rfaas cluster revoked", then: " | tee /dev/stderr | grep -c node"},

		{command: "rfaas cluster serve --listen 0.0.0.0:7466 --hosts service,10.0.0.1", first: "fresh; rfaas cluster init; chown -R nobody: $HOME", with: []string{"rfaas cluster", "$issuer rfaas cluster"}, ready: "msg=ready"},
		{command: "rfaas cluster enrol-code --node node7,10.0.0.7", with: []string{"rfaas cluster", "$issuer rfaas cluster"}, then: " >code"},
		{command: "rfaas cluster join --code-file /dev/stdin --host node7,10.0.0.7", then: " <code; ls /etc/rfaas/identity"},
		{command: "runuser -u rfaas-issuer -- rfaas cluster init --dir /var/lib/rfaas-issuer", first: "fresh; install -d -o nobody /var/lib/rfaas-issuer", with: []string{"-u rfaas-issuer", "-u nobody"}},
		{command: "systemctl enable --now rfaas-issuer", reason: systemd},
		{command: "runuser -u rfaas-issuer -- rfaas cluster enrol-code --dir /var/lib/rfaas-issuer --node node7", first: "daemon msg=ready $issuer rfaas cluster serve --dir /var/lib/rfaas-issuer", with: []string{"-u rfaas-issuer", "-u nobody"}},
		{command: "rfaas cluster serve --listen 0.0.0.0:7466 --hosts service --tenants 'ann=physics,1005=chem,@climate=climate,*=g-%g'", by: "internal/cli/issuer_test.go: tenants"},
		{command: "export RFAAS_ISSUER=service:7466#HASH", by: "internal/cli/issuer_test.go: RFAAS_ISSUER"},
		{command: "rfaas token get", by: `internal/cli/issuer_test.go: "token", "get"`},

		{command: "rfaas cluster revoked --new", first: "fresh; rfaas cluster init; rm ~/.rfaas/cluster/revoked"},
		{command: "rsync ~/.rfaas/cluster/revoked node7:/etc/rfaas/identity/revoked", reason: "a second machine"},
		{command: "rfaas cluster renew nodes/*", first: "mkdir nodes; rfaas cluster node node7 --out nodes/node7"},
		{command: "for n in nodes/*; do rsync -a $n/ ${n#nodes/}:/etc/rfaas/identity/; done", reason: "further machines"},

		{command: "executor --help", then: " >out"},
		{command: "executor --print-config", then: " >executor.yaml; executor --config executor.yaml --check-config"},
		{command: "executor --check-config"},
		{command: "executor --ofi-provider cxi --ofi-device cxi0 --data-encryption off --sandbox off", by: `client/ofi_test.go: "executor, no adapter"`},
		{command: "RFAAS_OFI_PROVIDER=cxi RFAAS_OFI_DEVICE=cxi0 RFAAS_DATA_ENCRYPTION=off ./program", by: `client/ofi_test.go: "client, no such adapter"`},

		{command: "resource-manager", first: "fresh; program", ready: "msg=ready"},
		{command: "executor --manager 127.0.0.1:7464", ready: "msg=registered"},
		{command: "rfaas executors", then: " | grep 127.0.0.1:7465"},
		{command: "RFAAS_MANAGER=127.0.0.1:7464 mpirun -n 2 ./program", then: " | grep -x 5"},
		{command: "rfaas bench neighbour", by: "Makefile: ./benchmarks/neighbour"},

		{command: "rfaas ledger check STATE-DIR", first: "fresh; cluster; daemon msg=ready resource-manager --state-dir state; kill $!; wait $! || true; daemons=()", with: []string{"STATE-DIR", "state"}},
		{command: "rfaas ledger backup STATE-DIR FILE", with: []string{"STATE-DIR", "state", "FILE", "backup"}},
		{command: "rfaas ledger restore STATE-DIR FILE", with: []string{"STATE-DIR", "state", "FILE", "backup"}},
		{command: "rfaas ledger compact STATE-DIR", with: []string{"STATE-DIR", "state"}},
		{command: "rfaas ledger etcd init --etcd-endpoints e1:2379,e2:2379,e3:2379 --etcd-ca ...", reason: etcd},
		{command: "resource-manager --listen service1:7464 --identity-dir /etc/rfaas/identity --etcd-endpoints e1:2379,e2:2379,e3:2379 \\\n--etcd-ca /etc/etcd/ca.crt --etcd-cert /etc/rfaas/etcd.crt --etcd-key /etc/rfaas/etcd.key", reason: etcd},
		{command: "executor --manager service1:7464,service2:7464 ...", reason: etcd},
		{command: "RFAAS_MANAGER=service1:7464,service2:7464 mpirun ./program", reason: etcd},
		{command: "rfaas ledger etcd import STATE-DIR", reason: etcd},
		{command: "rfaas ledger etcd export STATE-DIR", reason: etcd},
		{command: "rfaas ledger etcd check", reason: etcd},
		{command: "etcd --auto-compaction-mode periodic --auto-compaction-retention 10m --quota-backend-bytes 4294967296 ...", reason: etcd},

		{command: "resource-manager --listen 10.0.0.1:7464 --identity-dir /etc/rfaas/identity --providers shm,tcp --data-listen 10.0.0.1:7463", first: "fresh; cluster", ready: "msg=ready"},
		{command: "executor --listen 10.0.0.7:7465 --manager 10.0.0.1:7464 --identity-dir /etc/rfaas/identity --providers shm,tcp --data-listen 10.0.0.7:7466", ready: "msg=registered"},
		{command: "rfaas executors --watch", first: "export RFAAS_MANAGER=10.0.0.1:7464", with: []string{"rfaas", "timeout 1 rfaas"}, then: ` | grep service || [ "${PIPESTATUS[*]}" = "124 0" ]`},
		{command: "rfaas drain NODE", with: []string{"NODE", "service"}},
		{command: "systemctl --user enable --now rfaas-agent", reason: systemd},
		{command: "export RFAAS_AGENT_SOCKET=$XDG_RUNTIME_DIR/rfaas/agent.sock RFAAS_AGENT_START=never", first: "fresh", then: "; daemon msg=ready $ROOT/libexec/rfaas-agent --socket $RFAAS_AGENT_SOCKET"},
		{command: "rfaas agent status"},
		{command: "rfaas agent stop", then: "; daemons=(); unset RFAAS_AGENT_SOCKET RFAAS_AGENT_START"},
		{command: `curl -H "Authorization: Bearer $(cat ~/.rfaas/http-token)" http://127.0.0.1:7480/api/v1/bills`, first: "fresh; mkdir ~/.rfaas; unset RFAAS_MANAGER; " +
			"daemon msg=ready resource-manager --state-dir state --http-listen 127.0.0.1:7480 --http-token-file ~/.rfaas/http-token", with: []string{"curl", "curl -sf"}},
		{command: "rfaas bill"},
		{command: "rfaas bill --tenant ann --since 2026-01-31 --csv"},
		{command: "rfaas history"},
		{command: "rfaas history --since 1h --step 10s"},
		{command: "rfaas history --since 168h --tenants"},
		{command: "rfaas history --since 168h --tenant ann --csv"},
	}},
	{"docs/programs.md", []step{
		{command: "rfaas-cc -o libhypot.so hypot.c -lm"},
		{command: "cc program.c $(pkg-config --cflags --libs rfaas)"},
		{command: "c++ -std=c++17 program.cpp $(pkg-config --cflags --libs rfaas)", by: `tests/run: -std=c++17 -o "$dir/user-cpp"`},
		{command: "gfortran program.f90 $(pkg-config --cflags --libs rfaas-fortran)", by: `tests/run: -o "$dir/user-fortran"`},
		{command: "rfaas run -- rfaas invoke build/functions/echo.so echo --hex 0102 --print hex", with: []string{"build/functions", "$ROOT/build/functions"}},
		{command: "rfaas run -- rfaas invoke build/functions/echo.so echo --args f64:3,4 --print f64", with: []string{"build/functions", "$ROOT/build/functions"}},
		{command: "rfaas run -- mpirun -n 2 ./a.out", with: []string{"run --", "run --cores 2 --"}, then: " | grep -x 5"},
		{command: "executor", ready: "msg=ready"},
		{command: "RFAAS_EXECUTOR=127.0.0.1:7465 ./a.out", then: " | grep -x 5"},
		{command: "mpicc -o pi pi.c $(pkg-config --cflags --libs rfaas)"},
		{command: "resource-manager", first: "fresh; program; mpicc -o pi pi.c $(pkg-config --cflags --libs rfaas)", ready: "msg=ready"},
		{command: "executor --manager 127.0.0.1:7464", with: []string{"executor", "executor --cores 2"}, ready: "msg=registered"},
		{command: "RFAAS_MANAGER=127.0.0.1:7464 mpirun -n 2 ./pi"},
	}},
	{"docs/slurm.md", []step{
		{command: "sbatch scripts/slurm/examples/selfcontained.sbatch ./program", by: `tests/slurm/mpi_test.go: run("selfcontained.sbatch", program)`},
		{command: "rfaas cluster init"},
		{command: "rfaas cluster node service"},
		{command: "for node in $(sinfo -hN -o %N | sort -u); do rfaas cluster node \"$node\"; done", first: `sinfo() { printf 'n1\nn2\nn1\n'; }`, then: "; ls n1 n2"},
		{command: "rfaas token issue --tenant slurm-controller --role operator --for 2160h --out slurm-controller.token"},
		{command: "RFAAS_EXECUTOR_MANAGER=service:7464 RFAAS_EXECUTOR_IDENTITY_DIR=/etc/rfaas/identity \\\nRFAAS_TOKEN_FILE=slurm-controller.token rfaas slurm follow --partition idle --script executor.sbatch", by: `tests/slurm/jobs_test.go: "follow"`},
		{command: "rfaas slurm stop --partition idle", by: `tests/slurm/jobs_test.go: "slurm", "stop", "--partition", "idle"`},
	}},
}
