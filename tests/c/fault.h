/* A device with faults. It decorates an open device of any provider with a table of operations that forwards to the provider's
 * and misbehaves by a script. It is not part of the product, and does not affect other devices.
 *
 * A script is a list of rules, POINT:N[+M]=ACTION[(K)], separated by commas: at the Nth event of that kind on the device
 * (and every Mth after it), the action happens. Events are counted from 1.
 *
 *   point       event                                            actions
 *   post        a write, read, atomic or send                    busy   DP_BUSY, without effect
 *                                                                fail   DP_CONNECTION, the queue pair in error
 *   post-recv   a receive                                        busy, fail
 *   recv        completion of a receive                          drop   never delivered
 *   sent        completion of a post                             dup    delivered twice
 *                                                                delay(K) delivered K polls later, in order
 *                                                                error  delivered as DP_CONNECTION
 *                                                                gone   delivered as DP_PEER_GONE
 *   qp          any of the above                                 break  the queue pair is marked DP_PEER_GONE, refuses posts
 *                                                                       and delivers nothing until it is reset
 *   poll        a poll                                           fail   DP_FATAL
 *   arm         an arm                                           fail   DP_FATAL, nothing armed
 *   wait        a wait                                           fail   DP_FATAL; early  returns at once
 *   probe       a probe                                          break
 *   make        a domain, region, completion queue or queue pair fail   DP_FATAL, nothing made
 *   connect     a queue pair's connect                           fail   DP_CONNECTION
 *   reset       a queue pair's reset                             fail   DP_FATAL, the queue pair in error
 *   rkey-ptr    a request for a pointer                          fail   NULL
 *
 *   "post:5=busy,recv:7+10=drop,qp:100=break"
 *
 * One thread at a time uses a decorated device and all that is made from it; any thread may wake and break. */
#ifndef RFAAS_CTEST_FAULT_H
#define RFAAS_CTEST_FAULT_H

#include "dp_fabric.h"

typedef struct fault fault;

/* Decorates dev, from which nothing may have been made yet. Copies the script. DP_INVALID names the error in the script. The
 * decoration ends with the device. */
int fault_wrap(dp_dev *dev, const char *script, fault **out, dp_error *err);
/* Ends all faults. The next poll delivers held completions. Broken queue pairs stay broken until they are reset. */
void fault_stop(fault *f);
/* How many faults have happened. */
uint32_t fault_count(const fault *f);

#endif
