//go:build !mpich && !mpienv

package mpi

// #cgo pkg-config: ompi-c
import "C"
