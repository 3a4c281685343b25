// A library with a runtime of its own, which has threads from the time at which it is loaded.
package main

import "C"

//export setup
func setup(args *byte, size uint32, result *byte) uint32 { return 0 }

func main() {}
