/* The C side of the Fortran module rfaas_function: Fortran knows neither weak references nor printf's arguments. */
#include <rfaas_function.h>

#include <limits.h>

#define FOR_FORTRAN __attribute__((visibility("hidden")))

FOR_FORTRAN uint32_t rfaas_fortran_result_capacity(void);
FOR_FORTRAN uint32_t rfaas_fortran_fail(const char *text, size_t length);
FOR_FORTRAN uint32_t rfaas_fortran_fail_code(int32_t code, const char *text, size_t length);
FOR_FORTRAN void *rfaas_fortran_state(size_t bytes, int *fresh);
FOR_FORTRAN const void *rfaas_fortran_table(const char *name, size_t *bytes);
FOR_FORTRAN uint32_t rfaas_fortran_worker_cores(void);
FOR_FORTRAN int rfaas_fortran_on_resume(void (*f)(void *), void *arg);
FOR_FORTRAN uint32_t rfaas_fortran_child_number(void);
FOR_FORTRAN void rfaas_fortran_set_root(const void *root, size_t bytes);

static int precision(size_t length) { return length < INT_MAX ? (int)length : INT_MAX; }

uint32_t rfaas_fortran_result_capacity(void) { return rfaas_result_capacity(); }

uint32_t rfaas_fortran_fail(const char *text, size_t length) { return rfaas_fail("%.*s", precision(length), text); }

uint32_t rfaas_fortran_fail_code(int32_t code, const char *text, size_t length) {
    return rfaas_fail_code(code, "%.*s", precision(length), text);
}

void *rfaas_fortran_state(size_t bytes, int *fresh) { return rfaas_state(bytes, fresh); }

const void *rfaas_fortran_table(const char *name, size_t *bytes) { return rfaas_table(name, bytes); }

uint32_t rfaas_fortran_worker_cores(void) { return rfaas_worker_cores(); }

int rfaas_fortran_on_resume(void (*f)(void *), void *arg) { return rfaas_on_resume(f, arg); }

uint32_t rfaas_fortran_child_number(void) { return rfaas_child_number(); }

void rfaas_fortran_set_root(const void *root, size_t bytes) { rfaas_set_root(root, bytes); }
