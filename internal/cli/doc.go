// Package cli is the program rfaas: a file per subcommand, listed in newRoot.
package cli
