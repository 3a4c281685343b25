/* Measures virtual queue pairs for `rfaas-bench leases`. */
#ifndef BENCH_BROKER_H
#define BENCH_BROKER_H

/* Measures with n calls in each round, and prints lines:
 *   brokered NS RATE, private NS RATE   median time of a call of 8 bytes; calls a second with 8 in flight
 *   floor BARE RELAYED              median times of a bare round trip of 8 bytes, by the caller and through another thread
 *   soak REFUSED FAILED CALLED WRONG POSTED LOST MOVES
 * Returns an exit status. The error is on standard error. */
int bench_broker(const char *provider, int n);

#endif
