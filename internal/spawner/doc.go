// Package spawner is the part of an executor that needs root: it starts workers as other users, in namespaces and control groups, and
// reaps them. It runs in a separate process, rfaas-spawner, so that the executor needs no privileges: the executor parses
// input from tenants and unauthenticated clients.
//
//	executor (unprivileged)
//	  └── rfaas-spawner (this package)
//	        ├── rfaas-worker zygote      loads the fabric's providers once, clones workers; replaced when it dies
//	        ├── rfaas-w1                 cloned by the zygote, but a child of the spawner (CLONE_PARENT)
//	        └── rfaas-w2
//
// The spawner never reads a byte that a tenant wrote. Code, names, output and counters of a worker are descriptors that
// it passes on and closes. It does not parse the channel blob. It treats the executor as possibly hostile: it checks
// every field that it uses, and no message can make it run a worker as root, as a system user or as the user of another
// worker.
//
// When the executor ends, the socket closes, and the spawner ends all workers and itself. When the spawner ends, the
// kernel ends the zygote and all workers (PDEATHSIG).
package spawner
