// Package latency measures calls, and beside them in the same minute, processes and threads their floor: what a
// careful program could do with the same bytes and nothing else. benchmarks/README.md tells the method.
//
// A pair is a floor batch and a batch of calls, one after the other in alternating order, with a calibration before,
// between and after. What is believed is the median of the pairs' ratios; absolute times are for orientation.
package latency
