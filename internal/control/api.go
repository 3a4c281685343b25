package control

import "github.com/rfaas-go/rfaas/internal/api"

// The control protocol, rfaas.h and packages lease and zygote use the same numbers and convert them into each other.
// A difference is an error of the compiler.
var (
	_ = [1]struct{}{}[WaitMode_WAIT_MODE_ADAPTIVE-api.WaitAdaptive]
	_ = [1]struct{}{}[WaitMode_WAIT_MODE_HOT-api.WaitHot]
	_ = [1]struct{}{}[WaitMode_WAIT_MODE_WARM-api.WaitWarm]
	_ = [1]struct{}{}[StartPath_START_PATH_UNKNOWN-api.StartUnknown]
	_ = [1]struct{}{}[StartPath_START_PATH_COLD-api.StartCold]
	_ = [1]struct{}{}[StartPath_START_PATH_POOLED-api.StartPooled]
	_ = [1]struct{}{}[StartPath_START_PATH_CACHED-api.StartCached]
	_ = [1]struct{}{}[StartPath_START_PATH_SEEDED-api.StartSeeded]
)
