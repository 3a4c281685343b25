/* What user code may leave behind in the process outside of its own memory. Nothing of this travels with a seed. */
#ifndef RFAAS_SEED_STATE_H
#define RFAAS_SEED_STATE_H

#include <stddef.h>

#include "foreign.h"
#include "seed.h"

void dp_state_note(dp_seed_before *was);
/* Returns DP_OK if nothing has changed, else DP_UNSUPPORTED with a text that names what has, and the remedy. */
int dp_state_compare(const dp_seed_before *was, const dp_modules *m, dp_error *err);
/* Returns DP_UNSUPPORTED if the library started threads when it was loaded. Call it before the init call, which may take long. */
int dp_state_library(const dp_seed_before *was, dp_error *err);
/* Begins to count what only the init call must not leave behind: forks and mapped memory. The mode of floating point is what the library's constructors
 * have set. When the library is loaded. */
void dp_state_loaded(dp_seed_before *was);
/* Looks for pointers from static data of user code to memory that does not travel. Returns DP_OK if there is none, else DP_UNSUPPORTED. A
 * number that looks like such a pointer counts as one. */
int dp_state_scan(const dp_foreign *f, const dp_modules *m, dp_error *err);
/* Looks for such pointers in the parts of the heap that `list` names, and writes a warning to `text`, or "" if there are none. They are no reason to refuse
 * the seed, because functions may never use them, and freed memory may contain them. */
void dp_state_scan_heap(const dp_foreign *f, const dp_seed_extent *list, uint32_t n, char *text, size_t room);

#endif
