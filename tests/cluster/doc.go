// Package cluster tests a whole cluster from outside: its upgrade from an earlier revision of the repository (see EARLIER in the Makefile),
// and standby resource managers.
package cluster
