package control

import "time"

// Limit is how long a lease may take longer while its seed is made; 0 without a seed.
func (s *Seed) Limit() time.Duration {
	const most = 24 * time.Hour
	return time.Duration(min(s.GetLimitMs(), uint64(most/time.Millisecond))) * time.Millisecond
}
