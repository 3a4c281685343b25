package protocol

/*
#include <stdlib.h>
#include "agent_job.h" // a link, so that go build notices changes

static const rfaas_agent_batch *batch_of(size_t i) { return i < RFAAS_AGENT_BATCHES ? &rfaas_agent_batches[i] : NULL; }
*/
import "C"

import "unsafe"

// Job returns the text that names the batch job in the name of the agent's socket; "" outside of a batch job. It contains only ASCII
// letters, digits and underscores.
func Job(getenv func(string) string) string {
	value := func(name *C.char) *C.char {
		if name == nil {
			return nil
		}
		return C.CString(getenv(C.GoString(name))) // up to the first NUL, and no variable contains one
	}
	for i := C.size_t(0); ; i++ {
		batch := C.batch_of(i)
		if batch == nil {
			return ""
		}
		id, index, mark := value(batch.id), value(batch.index), value(batch.mark)
		var job [C.RFAAS_AGENT_JOB]C.char
		found := C.rfaas_agent_job_of(batch, id, index, mark, &job[0])
		for _, v := range []*C.char{id, index, mark} {
			C.free(unsafe.Pointer(v))
		}
		if found {
			return C.GoString(&job[0])
		}
	}
}
