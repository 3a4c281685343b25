package command

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// ManHeader is the header of a manual page.
func (p *Program) ManHeader(section string) *doc.GenManHeader {
	return &doc.GenManHeader{Section: section, Source: "rfaas " + p.Version, Manual: "rfaas"}
}

// WriteManual writes a page of section 1 for root and each of its commands into the directory.
func (p *Program) WriteManual(root *cobra.Command, dir string) error {
	root.DisableAutoGenTag = true
	err := doc.GenManTreeFromOpts(root, doc.GenManTreeOptions{Path: dir, CommandSeparator: "-", Header: p.ManHeader("1")})
	if err != nil {
		return fmt.Errorf("write manual pages: %w", err)
	}
	return nil
}
