/* The extension module _rfaas: librfaas.so for Python. It uses the limited API, so one binary serves CPython 3.11 and later versions.
 *
 * module.c loads librfaas.so. fields.c converts the structures of rfaas.h. session.c, lease.c and seed.c have sessions, leases and
 * seeds, arguments.c the payload and the result of a call, numpy.c arrays, call.c functions, request.c calls in flight. */
#ifndef BINDING_H
#define BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <rfaas.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

/* ---- librfaas.so ---- */

/* The functions of librfaas.so that the extension calls: RFAAS.invoke is rfaas_invoke. */
#define BINDING_FUNCTIONS(_)                                                                                                                \
    _(init) _(finalize) _(version) _(last_error) _(started) _(function_code) _(session_open) _(session_close) _(session_cached)               \
    _(session_changes) _(table_put_at) _(table_put_seed) _(table_drop) _(lease_open) _(lease_open_at) _(places) _(lease_open_across) _(lease_release) _(lease_renew) _(lease_event) _(lease_workers)             \
    _(seed_create) _(seed_open) _(seed_name) _(seed_info) _(seed_release) _(lease_info) _(lease_status) _(lease_statistics) _(worker_origin) _(worker_info) _(worker_replace) _(lease_function)                      \
    _(lease_function_name) _(lease_chain) _(invoke) _(invokev) _(iinvoke) _(iinvokev) _(test) _(waitany_for) _(cancel) _(call_worker) _(kept_result) _(lease_descriptor) _(lease_arm) _(map) _(reduce)
#define BINDING_DECLARE(name) __typeof__(rfaas_##name) *name;
typedef struct binding_library {
    BINDING_FUNCTIONS(BINDING_DECLARE)
} binding_library;
extern binding_library RFAAS;

/* Loads librfaas.so if it is not loaded, and starts it in this process. Returns -1 with an exception. */
int binding_start(void);

/* The thread in which Python runs signal handlers. */
bool binding_main_thread(void);

/* Raises the exception for the status of the last call of this thread, and returns NULL. */
PyObject *binding_raise(int status);
/* The same for an error of which everything is known. */
PyObject *binding_raise_text(int status, const char *text, int started, int32_t code);

/* Numpy's ndarray, NULL while numpy is not imported. Borrowed, without an exception. */
PyObject *binding_ndarray(void);
/* The dtype of an array. */
PyObject *binding_dtype(PyObject *array);
/* The memory of an array for PyBuffer_Release, without an export. Returns false if the array is not contiguous, or read-only, or if this version
 * of numpy needs the buffer protocol. */
bool binding_view(PyObject *array, Py_ssize_t itemsize, bool writable, Py_buffer *b);
/* A function of the package rfaas, set by binding_hooks. Borrowed. */
typedef enum binding_hook { HOOK_ERROR, HOOK_LOAD, HOOK_RESULT, HOOK_PART, HOOK_DTYPE, HOOK_AWAIT, HOOK_COUNT } binding_hook;
PyObject *binding_hook_of(binding_hook which);

/* Threads that are inside librfaas without the GIL. All functions that may wait for another thread of a lease are called without it, also
 * rfaas_test and rfaas_cancel: the other thread may be waiting for the GIL. */
extern long binding_inside;
/* How often this process and its ancestors were forked, to tell requests of a parent from those of this process. */
extern unsigned binding_forks;
#define BEGIN_CALL { PyThreadState *state_ = (binding_inside++, PyEval_SaveThread());
#define END_CALL PyEval_RestoreThread(state_); binding_inside--; }

/* How long a wait lasts before it looks for Ctrl-C. */
#define BINDING_LOOK_NS 50000000

/* CLOCK_MONOTONIC in ns */
static inline int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* Runs signal handlers after a call that blocked, such as Ctrl-C pressed meanwhile. */
static inline int interrupted(void) { return PyErr_CheckSignals(); }

/* Replaces an owned reference, which may be NULL. Takes the new one over. */
static inline void replace_reference(PyObject **to, PyObject *with) {
    PyObject *old = *to;
    *to = with;
    Py_XDECREF(old);
}

/* Frees an object whose type, or a base class of it, was made by PyType_FromSpec. Such an object owns a reference to its type. */
static inline void binding_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ---- fields ---- */

typedef enum binding_kind {
    FIELD_UINT32 = 1,
    FIELD_INT32,
    FIELD_UINT64,
    FIELD_SIZE,
    FIELD_SECONDS, /* int64_t nanoseconds */
    FIELD_STRING,
    FIELD_BUFFER,
    FIELD_TEXT,
} binding_kind;

typedef struct binding_field {
    const char *name;
    binding_kind kind;
    size_t offset;
    size_t size; /* in bytes; of a buffer: the offset of its size */
} binding_field;

typedef struct binding_flag {
    const char *name;
    uint32_t value;
} binding_flag;

/* Sets the field or flag `name` of an option structure. Objects whose memory it then points to are appended to the list `keep`. Returns 1
 * if there is no such field, -1 with an exception. */
int binding_set(void *options, const binding_field *fields, const binding_flag *flags, uint32_t *bits, PyObject *name, PyObject *value,
                PyObject *keep);
/* Sets all fields that a dictionary names. `what` is for the text of errors. */
int binding_set_all(const char *what, void *options, const binding_field *fields, const binding_flag *flags, uint32_t *bits, PyObject *dict,
                    PyObject *keep);
/* Parses a number of bytes. Returns -1 with an exception. */
int binding_size(const char *name, PyObject *value, size_t *size);
/* A dictionary with the fields of a structure. */
PyObject *binding_dict(const void *from, const binding_field *fields);

/* ---- objects ---- */

typedef struct Session {
    PyObject_HEAD
    rfaas_session *handle; /* NULL: closed */
} Session;

typedef struct Lease {
    PyObject_HEAD
    rfaas_lease *handle; /* NULL: released */
    PyObject *session, *functions /* dict: name to Function */;
    bool named; /* the dict has all functions, by names that the library does not have */
    struct Request *flying; /* a list */
    size_t eager;
} Lease;

typedef struct Seed {
    PyObject_HEAD
    rfaas_seed *handle; /* NULL: released */
    PyObject *session;
} Seed;

typedef struct Function {
    PyObject_HEAD
    void *vectorcall;
    Lease *lease;
    PyObject *name, *takes, *returns, *shape; /* takes: a tuple of dtypes; NULL: not given */
    PyObject *exported; /* name in the library, NULL: as `name` */
    rfaas_function index;
    rfaas_call_options options;
    bool plain; /* options are the defaults */
    bool refuse; /* arguments that are not contiguous */
    size_t capacity; /* of results that are bytes, 0: chosen */
} Function;

extern PyTypeObject *Session_type, *Lease_type, *Seed_type, *Function_type, *Request_type;
extern PyType_Spec Session_spec, Lease_spec, Seed_spec, Function_spec, Request_spec;

/* Reports whether the session is open. If not, it sets an exception. */
bool Session_is_open(const Session *s);
/* Returns the open lease of a function, NULL with an exception. */
rfaas_lease *Lease_open(Lease *l);
PyObject *Lease_chain(Lease *l, PyObject *args);

/* Sets an option of calls by its name. */
int Function_option(Function *f, rfaas_call_options *o, PyObject *name, PyObject *value);
PyObject *Function_make(Lease *l, PyObject *name, rfaas_function index, PyObject *options);

/* ---- arguments and results ---- */

/* The payload and the result of one call. */
typedef struct Plan {
    Py_buffer first, *in; /* in: &first or an array */
    rfaas_piece one, *pieces; /* NULL: first is contiguous and alone */
    Py_ssize_t count; /* of buffers in use */
    void *copies[2]; /* memory to free: pieces and buffers, and copied arrays */
    PyObject *copied; /* a list of bytes objects, or NULL */
    Py_buffer out;
    bool has_out, refuse; /* refuse: arguments that are not contiguous */
    PyObject *result; /* an array or the caller's `out`. NULL: bytes */
    char *bytes; /* room for a result that is bytes */
    char *kept; /* a result that was larger (option keep) */
    bool given; /* result is the caller's `out` */
    size_t capacity;
    rfaas_call_options own; /* if options points here */
    const rfaas_call_options *options;
} Plan;

/* The arguments of a call, as Python passes them to a METH_FASTCALL | METH_KEYWORDS function: n positional arguments, followed by the
 * keyword arguments, whose names are in the tuple `names`. */
typedef struct call_arguments {
    PyObject *const *values;
    Py_ssize_t n;
    PyObject *names; /* or NULL */
} call_arguments;

/* Parses the arguments of a call. Returns -1 with an exception. */
int Plan_make(Plan *p, Function *f, const call_arguments *a);
/* Takes one buffer as an argument: contiguous, or *piece describes it. */
int Plan_argument(Plan *p, Function *f, Py_ssize_t number, PyObject *x, Py_buffer *b, rfaas_piece *piece);
/* The result of a call of `size` bytes, as the caller gets it. */
PyObject *Plan_result(Plan *p, Function *f, size_t size);
/* Takes a result that was too large, of a call that this thread has just waited for. Returns the status of the call. */
int Plan_keep(Plan *p, int status, size_t size);
void Plan_free(Plan *p);
/* Gives the buffers of the arguments back, when the library does not read them any more. */
void Plan_free_inputs(Plan *p);

static inline void *Plan_room(Plan *p) { return p->has_out ? p->out.buf : p->bytes; }

/* binding_raise for a call of the function. */
PyObject *Function_raise(Function *f, int status);
PyObject *Function_raise_text(Function *f, int status, const char *text, int started, int32_t code);

/* Starts a call when a slot is free. Returns -1 with an exception. */
int Function_start(Function *f, Plan *p, rfaas_request *r);

/* ---- requests ---- */

typedef struct Request {
    PyObject_HEAD
    struct Request *next, *prev; /* of the lease's flying requests */
    Function *function;
    Plan plan;
    rfaas_request id; /* RFAAS_REQUEST_NULL: it has ended */
    int watched; /* threads that wait for it without the GIL */
    bool cancelled; /* by cancel(), even if a wait notices it first */
    unsigned forks; /* binding_forks when it was started */
    int status, started;
    int32_t code;
    int worker; /* of a call that has ended; -1: none */
    size_t size;
    char *text;
    PyObject *result; /* after the first result() */
} Request;

/* Starts a call with the arguments of Plan_make, and returns a Request. */
PyObject *Request_start(Function *f, PyObject *const *values, Py_ssize_t n, PyObject *names);
/* Waits until a slot of the lease may be free, at most for BINDING_LOOK_NS. Returns -1 with an exception, such as KeyboardInterrupt. */
int Request_await_slot(Lease *l, unsigned *turn);
PyObject *binding_wait_any(PyObject *module, PyObject *args);

#endif
