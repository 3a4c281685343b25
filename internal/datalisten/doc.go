// Package datalisten accepts the data connections of provider tcp for a daemon and hands each one to the receiver whose token it
// names: to a worker of an executor, or to a queue pair of the resource manager's memory.
package datalisten
