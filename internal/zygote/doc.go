// Package zygote supervises rfaas-worker: the zygote process and the workers that it clones.
//
//	executor (this package)
//	  ├── rfaas-worker zygote      loads the providers once; clones; replaced when it dies
//	  ├── rfaas-w1                 cloned by the zygote, but a child of the executor (CLONE_PARENT)
//	  └── rfaas-w2
//
// Workers are children of the executor, held by pidfd, so they outlive the zygote and are reaped here; they and the
// zygote die with the executor (PDEATHSIG). What the processes say to each other is in worker/message.h;
// message.go is its Go side. The package has no cgo.
//
// A worker runs user code. Everything that it sends or prints is bounded and treated as hostile.
package zygote
