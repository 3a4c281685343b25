// Package latency measures calls together with their floor: a careful program that moves the same bytes between the same
// threads and does nothing else. benchmarks/README.md describes the method.
//
// A pair is a floor batch and a batch of calls, one after the other in alternating order, with a calibration before,
// between and after. The result is the median of the pairs' ratios; absolute times are for orientation.
package latency
