// Package history keeps what a cluster has done over the last hour, day, week and year: harvested, idle and batch core-hours, calls,
// failures, worker starts with their times, ended leases, and the use of tenants. It needs a bounded amount of memory and,
// in a file, of disk. Bills do not depend on it.
package history
