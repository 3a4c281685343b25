/* What user code may leave behind in the process outside of its own memory. Nothing of this travels with a seed. */
#ifndef RFAAS_SEED_STATE_H
#define RFAAS_SEED_STATE_H

#include "seed.h"

void dp_state_note(dp_seed_before *was);
/* Returns DP_OK if nothing has changed, else DP_UNSUPPORTED with a text that names what has, and the remedy. */
int dp_state_compare(const dp_seed_before *was, dp_error *err);
/* Looks for pointers from static data of user code to memory that does not travel. Returns DP_OK if there is none, else DP_UNSUPPORTED. A
 * number that looks like such a pointer counts as one. */
int dp_state_scan(const dp_modules *m, const void *payload, uint64_t size, dp_error *err);

#endif
