package main

import (
	"bytes"
	"os"
	"testing"
)

// The file that is shipped is the one that this program writes.
func TestShippedFile(t *testing.T) {
	shipped, err := os.ReadFile("../options.txt")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := write(&b); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b.Bytes(), shipped) {
		t.Fatal("options.txt differs from the output of generate: run generate again")
	}
	// The comment lines aside, there is one option per line.
	options := 0
	for line := range bytes.Lines(shipped) {
		if line[0] != '#' {
			options++
		}
	}
	if options != 1024 {
		t.Errorf("%d options, want 1024", options)
	}
}
