// Command write generates files from client/api/rfaas.yaml: the files that are kept in git (`make api`), or with the argument `built` those
// that only the build reads. It runs in the root of the repository.
package main

import (
	"fmt"
	"os"

	"github.com/rfaas-go/rfaas/internal/apigen"
)

func main() {
	built := len(os.Args) == 2 && os.Args[1] == "built"
	changed, err := apigen.Write(".", built)
	if err != nil {
		fmt.Fprintf(os.Stderr, "apigen: %v\n", err)
		os.Exit(1)
	}
	for _, name := range changed {
		if !built {
			fmt.Println(name)
		}
	}
}
