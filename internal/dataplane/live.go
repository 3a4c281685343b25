package dataplane

// #include "dp_fabric.h"
import "C"

// Live returns how many objects of the fabric this process has made and not freed, by kind. Leak checks use it.
func Live() map[string]int {
	var l C.dp_live
	C.dp_live_now(&l)
	return map[string]int{"devices": int(l.devices), "domains": int(l.domains), "regions": int(l.regions),
		"completion queues": int(l.queues), "queue pairs": int(l.queue_pairs)}
}
