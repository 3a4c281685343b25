package zygote

import (
	"fmt"
	"strings"
)

// Executor and rfaas-worker are two files of one program, and change what they say to each other from one version to the
// next. An executor that runs when another version is installed meets that one when its zygote has to be replaced.

// sameVersion refuses a worker program of another version than ours. One that was built without a version goes with all,
// as does this program.
func sameVersion(ours, theirs string) error {
	const edited = "-dirty" // git's, of a clone in which each part is built when it is edited
	if ours == "" || strings.TrimSuffix(ours, edited) == strings.TrimSuffix(theirs, edited) || unversioned(ours) || unversioned(theirs) {
		return nil
	}
	if theirs == "" {
		theirs = "from before versions were told"
	}
	return otherVersion("it is version %s, this executor %s", theirs, ours)
}

// unversioned: what the Makefile and the sources put where there is no version. Every worker program says something.
func unversioned(version string) bool {
	return version == "unknown" || version == "devel"
}

// otherVersion is of class connection: another executor may well serve.
func otherVersion(format string, args ...any) error {
	return &WorkerError{statusProtocol, fmt.Sprintf(format, args...) + ": install both of one version, then restart the executor"}
}
