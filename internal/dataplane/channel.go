package dataplane

// #include "dp_channel.h"
import "C"

// Limits and defaults of a channel.
const (
	MaxDepth     = C.DP_DEPTH_MAX
	MaxEager     = C.DP_EAGER_MAX
	DefaultDepth = C.DP_DEPTH_DEFAULT
	DefaultEager = C.DP_EAGER_DEFAULT
	DefaultBulk  = int64(C.DP_BULK_DEFAULT)
)
