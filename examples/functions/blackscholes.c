/* libblackscholes. Input: array of bs_option. Result: array of prices (double). The ABI is that of the first rFaaS, and building
 * it needs nothing of rfaas:  gcc -O2 -shared -fPIC -o blackscholes.so blackscholes.c -lm */
#include "blackscholes.h"

__attribute__((visibility("default"))) uint32_t blackscholes(void *args, uint32_t size, void *res) {
    const bs_option *option = args;
    double *price = res;
    uint32_t n = size / sizeof *option;
    for (uint32_t i = 0; i < n; i++)
        price[i] = bs_price(&option[i]);
    return n * (uint32_t)sizeof *price;
}

/* For latency: returns its payload. */
__attribute__((visibility("default"))) uint32_t echo(void *args, uint32_t size, void *res) {
    __builtin_memcpy(res, args, size);
    return size;
}
