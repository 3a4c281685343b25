// A library of Go. Its runtime starts threads when it is loaded.
package main

import "C"

//export setup
func setup(args *byte, size uint32, result *byte) uint32 { return 0 }

func main() {}
