// Package upgrade tests the upgrade of a running cluster from an earlier revision of the repository (see EARLIER in the Makefile) to
// this one.
package upgrade
