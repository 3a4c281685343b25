// Command write writes the files that are generated from client/api/rfaas.yaml. It runs in the root of the repository: `make api`.
package main

import (
	"fmt"
	"os"

	"github.com/rfaas-go/rfaas/internal/apigen"
)

func main() {
	changed, err := apigen.Write(".")
	if err != nil {
		fmt.Fprintf(os.Stderr, "apigen: %v\n", err)
		os.Exit(1)
	}
	for _, name := range changed {
		fmt.Println(name)
	}
}
