/* What functions that rfaas executes may use, in C and C++. rfaas_function.hpp adds typed parameters and exceptions for C++.
 * The module rfaas_function is for Fortran. rfaas_function(3) has this text too.
 *
 * A function has C linkage and this type:
 *
 *     uint32_t f(void *args, uint32_t size, void *res);
 *
 *   args    `size` bytes of input, aligned to 64. The function may overwrite them. They are gone when it returns.
 *           The input of a call with RFAAS_CALL_IN_PLACE is read-only: a function that writes to it crashes.
 *   res     where the result goes, aligned to 64. It has room for rfaas_result_capacity() bytes. If the function writes
 *           beyond that but returns a smaller size, the call fails. A result in place (RFAAS_CALL_IN_PLACE) is an
 *           exception: the function changes the caller's memory behind the result, and the call does not fail.
 *   return  bytes of the result. If that is more than the capacity, the caller gets the error RFAAS_RESULT_TOO_LARGE
 *           and this size, but no bytes.
 *
 * Compile with rfaas-cc, or with -O3 -shared -fPIC. A function that uses none of the extras below need not include this
 * header. A worker calls one function at a time, always on the same thread, pinned to the worker's cores. A function
 * may start threads of its own. What a function prints goes to a bounded log.
 * If the worker dies, the caller's error has the end of that log; errors made by rfaas_fail do not have it. A crash ends
 * the worker and the call, and no other worker. The caller's error then names the functions on the stack. It also names
 * their source lines if the library was compiled with -g1, as by rfaas-cc.
 *
 * Static variables and all other state of a worker end with the lease: no other lease gets the worker, unless both have
 * the flag RFAAS_LEASE_REUSE. A lease may name an init call, a function that each of its workers executes before any
 * other call (init_function of rfaas_lease_options). Workers that replace dead ones execute it too. Later calls can rely
 * on the state that it makes.
 *
 * The extras are weak references: a library that uses them can be loaded into any program, for tests or as local
 * fallback. There the extras do what their descriptions say under "elsewhere". They act on the call that runs on the
 * calling thread. On other threads of a worker, such as those of OpenMP, rfaas_result_capacity and rfaas_fail act
 * as described under "elsewhere", rfaas_state returns NULL, and rfaas_worker_cores returns the same value.
 */
#ifndef RFAAS_FUNCTION_H
#define RFAAS_FUNCTION_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifdef RFAAS_FUNCTION_IMPLEMENTATION
#define RFAAS_FUNCTION_EXTRA __attribute__((visibility("default")))
#else
#define RFAAS_FUNCTION_EXTRA __attribute__((weak))
#endif

/* Bytes that the caller accepts as result. In the first function of a chain (rfaas_lease_chain), bytes that the second
 * one can get. Elsewhere UINT32_MAX. */
RFAAS_FUNCTION_EXTRA uint32_t rfaas_result_capacity(void);

/* Marks this call as failed with a message (printf's format; at most 511 bytes, the rest is cut). The caller gets an
 * error with the message; the function's return value and result are ignored. The worker goes on. The last message
 * wins. Returns 0, so that a function can end by `return rfaas_fail("negative volatility %g", v);`. Calls in the
 * program's process (RFAAS_LEASE_LOCAL) fail in the same way. Elsewhere prints the message to standard error. */
RFAAS_FUNCTION_EXTRA uint32_t rfaas_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* rfaas_fail with a code, which the caller gets as a number beside the message: from rfaas_function_code in C and
 * Fortran, error::function_code in C++, Error.Code in Go. The program defines what it means. 0: no code, as with
 * rfaas_fail. */
RFAAS_FUNCTION_EXTRA uint32_t rfaas_fail_code(int32_t code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* A block of memory that this worker keeps between calls, zeroed at first, aligned to 64. *fresh (if fresh is not
 * NULL) becomes 1 when this call made it, else 0. There is one block per worker, of the size asked for first; asking
 * for more, for 0 bytes, or when memory is short returns NULL. It ends with the worker. Elsewhere there is one block
 * per source file. */
RFAAS_FUNCTION_EXTRA void *rfaas_state(size_t size, int *fresh);

/* Cores that this worker is pinned to, at least 1: how many threads make sense. Elsewhere 1. */
RFAAS_FUNCTION_EXTRA uint32_t rfaas_worker_cores(void);

/* The bytes that the caller's program has published by rfaas_table_put under this name, read-only and aligned to a page, and in *size (if
 * size is not NULL) their number. The workers of a node map one copy. If the table is a seed (rfaas_table_put_seed), returns
 * the bytes that its setup function has passed to rfaas_set_root, at the same address. Valid as long as the worker. NULL and size 0: the program has
 * published no such table. May be called from the first call on, but not in constructors of the library. With RFAAS_LEASE_LOCAL, in the
 * program, only on the thread that runs the function. Elsewhere NULL. */
RFAAS_FUNCTION_EXTRA const void *rfaas_table(const char *name, size_t *size);

/* Path of a file or directory of the bundle. `name` is the last component of a path in the lease's option `bundle`. NULL: the option has no
 * such path. Functions can only read the files. With RFAAS_LEASE_LOCAL it is the path of the program's own file, which is not protected.
 * Valid until the next call on the same thread. May be called in constructors of the library, but not with RFAAS_LEASE_LOCAL. Elsewhere
 * NULL. */
RFAAS_FUNCTION_EXTRA const char *rfaas_bundle_path(const char *name);

/* Calls f(arg) in each worker that starts from the seed in which this is called (RFAAS_LEASE_SEED, rfaas_seed_create), once, before the worker's
 * first call. Use it for what a seed cannot keep or what must differ between workers: open files, start threads, choose random numbers. The
 * functions are called in the order of their registration. Returns 0, or -1 if 32 functions are registered. In workers that make the init call
 * themselves, and after the init call, f(arg) is called at once: so register at the end of the setup function. Elsewhere it is called at once
 * too. */
RFAAS_FUNCTION_EXTRA int rfaas_on_resume(void (*f)(void *arg), void *arg);

/* The number of this worker among all workers of its node that have started from the same seed, from 1 on. 0: it has not started from a seed. The
 * process that makes a seed has the number 0, so do not keep the number in the init call. Elsewhere 0. */
RFAAS_FUNCTION_EXTRA uint32_t rfaas_child_number(void);

/* Chooses what rfaas_table returns in functions of other libraries: these bytes, the root, if a program publishes this seed as a table
 * (rfaas_table_put_seed). Call it in the setup function (rfaas_seed_create). Those functions see all memory of the seed from malloc and new, read-only
 * and at the same addresses. So the root must lie in such memory, else the seed is refused. It may point to other such memory, but not to code or to
 * static or thread-local variables. An object with virtual functions contains a pointer to static data. If the function is called several times, the last
 * call counts. Elsewhere it does nothing. */
RFAAS_FUNCTION_EXTRA void rfaas_set_root(const void *root, size_t size);

#ifdef __cplusplus
}
#endif

#ifndef RFAAS_FUNCTION_IMPLEMENTATION

#ifdef __cplusplus
extern "C" {
#endif
/* Set by the client library when it loads the functions into its own process (RFAAS_LEASE_LOCAL). */
__attribute__((weak, visibility("default"))) const void *(*rfaas_table_elsewhere)(const char *name, size_t *size);
__attribute__((weak, visibility("default"))) const char *(*rfaas_bundle_path_elsewhere)(const char *name);
__attribute__((weak, visibility("default"))) uint32_t (*rfaas_fail_elsewhere)(int32_t code, const char *format, ...);
#ifdef __cplusplus
}
#endif

__attribute__((unused)) static inline const void *rfaas_table_of_program(const char *name, size_t *size) {
    if (rfaas_table_elsewhere)
        return rfaas_table_elsewhere(name, size);
    if (size)
        *size = 0;
    return NULL;
}

__attribute__((unused)) static inline const char *rfaas_bundle_path_of_program(const char *name) {
    return rfaas_bundle_path_elsewhere ? rfaas_bundle_path_elsewhere(name) : NULL;
}

__attribute__((unused)) static inline void *rfaas_state_elsewhere(size_t size, int *fresh) {
    static void *block;
    static size_t block_size;
    int made = 0;
    if (!block && size && size <= SIZE_MAX - 63) {
        char *room = (char *)calloc(1, size + 63);
        if (room) {
            block = room + (64 - (uintptr_t)room % 64) % 64;
            block_size = size;
            made = 1;
        }
    }
    if (fresh)
        *fresh = made;
    return size && size <= block_size ? block : NULL;
}

__attribute__((unused)) static inline int rfaas_on_resume_elsewhere(void (*f)(void *arg), void *arg) {
    f(arg);
    return 0;
}

/* A macro's own name is not expanded again: these call the function when there is one. */
#define rfaas_result_capacity() (rfaas_result_capacity ? rfaas_result_capacity() : UINT32_MAX)
#define rfaas_fail_outside(code, ...) \
    (rfaas_fail_elsewhere ? rfaas_fail_elsewhere(code, __VA_ARGS__) : (uint32_t)(0 * fprintf(stderr, __VA_ARGS__)))
#define rfaas_fail(...) (rfaas_fail ? rfaas_fail(__VA_ARGS__) : rfaas_fail_outside(0, __VA_ARGS__))
#define rfaas_fail_code(code, ...) \
    (rfaas_fail_code ? rfaas_fail_code(code, __VA_ARGS__) : rfaas_fail_outside(code, __VA_ARGS__))
#define rfaas_state(size, fresh) (rfaas_state ? rfaas_state(size, fresh) : rfaas_state_elsewhere(size, fresh))
#define rfaas_table(name, size) (rfaas_table ? rfaas_table(name, size) : rfaas_table_of_program(name, size))
#define rfaas_bundle_path(name) (rfaas_bundle_path ? rfaas_bundle_path(name) : rfaas_bundle_path_of_program(name))
#define rfaas_on_resume(f, arg) (rfaas_on_resume ? rfaas_on_resume(f, arg) : rfaas_on_resume_elsewhere(f, arg))
#define rfaas_child_number() (rfaas_child_number ? rfaas_child_number() : (uint32_t)0)
#define rfaas_set_root(root, size) (rfaas_set_root ? rfaas_set_root(root, size) : (void)0)
#define rfaas_worker_cores() (rfaas_worker_cores ? rfaas_worker_cores() : (uint32_t)1)

#endif
#endif
