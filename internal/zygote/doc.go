// Package zygote is the executor's side of its workers. It has the spawner start them, gives them leases and observes them.
//
//	executor (this package)
//	  └── rfaas-spawner (package spawner)
//	        ├── rfaas-worker zygote      loads the providers once; clones; replaced when it dies
//	        ├── rfaas-w1                 cloned by the zygote, but a child of the spawner (CLONE_PARENT)
//	        └── rfaas-w2
//
// Workers are children of the spawner, which reaps them, so they outlive the zygote. All die with the executor (PDEATHSIG).
// worker/message.h defines the messages; message.go and package wire are its Go side. The package has no cgo.
//
// A worker runs user code. Everything that it sends or prints is bounded and treated as hostile.
package zygote
