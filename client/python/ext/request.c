/* Calls in flight. */
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "binding.h"

PyTypeObject *Request_type;

/* Changes when a wait or a request ends. A thread whose request another thread already waits for waits for a change, on a futex, because librfaas
 * wakes only the other thread. */
static uint32_t ended;
static uint32_t sleepers; /* threads that wait for a change. Guarded by the GIL */

/* Waits at most `ns` until a request or the wait of another thread ends. */
static void await_another(int64_t ns) {
    struct timespec t = { ns / 1000000000, ns % 1000000000 };
    uint32_t seen = ended;
    sleepers++;
    BEGIN_CALL
    syscall(SYS_futex, &ended, FUTEX_WAIT_PRIVATE, seen, &t, NULL, 0);
    END_CALL
    sleepers--;
}

/* Wakes other threads after a request has ended, or after this thread has stopped waiting for it. */
static void tell_others(void) {
    __atomic_fetch_add(&ended, 1, __ATOMIC_SEQ_CST);
    if (sleepers)
        syscall(SYS_futex, &ended, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static void unlink_request(Request *r) {
    Lease *l = r->function->lease;
    if (r->prev)
        r->prev->next = r->next;
    else if (l->flying == r)
        l->flying = r->next;
    if (r->next)
        r->next->prev = r->prev;
    r->next = r->prev = NULL;
}

/* What the library says about a call that ended, kept until its result is asked for. */
typedef struct ending {
    int status, started, worker;
    int32_t code;
    size_t size;
    char *text;
} ending;

/* In the thread that waited for the call, before it makes another one. */
static void note(ending *e) {
    e->worker = RFAAS.call_worker();
    if (!e->status)
        return;
    e->started = RFAAS.started();
    e->code = RFAAS.function_code();
    e->text = strdup(RFAAS.last_error());
}

/* Another thread may have cancelled the request meanwhile. */
static void finish(Request *r, const ending *e) {
    if (!r->id) {
        free(e->text);
        return;
    }
    unlink_request(r);
    tell_others();
    r->id = RFAAS_REQUEST_NULL;
    r->status = r->cancelled ? RFAAS_CANCELLED : Plan_keep(&r->plan, e->status, e->size);
    r->started = r->cancelled ? RFAAS_MAYBE_EXECUTED : e->started;
    r->code = e->code;
    r->worker = e->worker;
    r->size = e->size;
    r->text = e->text;
    Plan_free_inputs(&r->plan);
}

/* Whether another thread waits for the request. Threads of a parent process do not count: the library says that the request is not valid. */
static bool is_watched(Request *r) {
    if (r->forks != binding_forks) {
        r->forks = binding_forks;
        r->watched = 0;
    }
    return r->watched;
}

#define MANY 1024

/* Waits for one of the requests, of which no other thread waits, until `until` or for BINDING_LOOK_NS, whichever is sooner. The requests
 * must not be freed meanwhile. Returns whether one has ended. */
static bool watch(Request **requests, size_t count, int64_t until) {
    rfaas_request ids[MANY], *all = ids;
    if (count > MANY && !(all = malloc(count * sizeof *all)))
        all = ids, count = MANY;
    for (size_t i = 0; i < count; i++) {
        all[i] = requests[i]->id;
        requests[i]->watched++;
    }
    int64_t t = now(), limit = until && until - t < BINDING_LOOK_NS ? until > t ? until - t : 0 : BINDING_LOOK_NS;
    size_t index = RFAAS_UNDEFINED;
    ending e = { 0 };
    BEGIN_CALL
    e.status = RFAAS.waitany_for(count, all, limit, &index, &e.size);
    note(&e);
    END_CALL
    for (size_t i = 0; i < count; i++)
        requests[i]->watched--;
    if (index != RFAAS_UNDEFINED)
        finish(requests[index], &e);
    else
        free(e.text);
    tell_others();
    if (all != ids)
        free(all);
    return index != RFAAS_UNDEFINED;
}

/* until: 0: for ever. Returns 1 if the request has not ended, -1 with an exception. */
static int await(Request *r, int64_t until) {
    for (bool first = true; r->id; first = false) {
        if (!first && until && now() >= until)
            return 1;
        if (is_watched(r)) {
            int64_t left = until ? until - now() : BINDING_LOOK_NS;
            if (left <= 0)
                return 1;
            await_another(left < BINDING_LOOK_NS ? left : BINDING_LOOK_NS);
        } else {
            watch(&r, 1, until);
        }
        if (PyErr_CheckSignals())
            return -1;
    }
    return 0;
}

/* How long a thread waits for the end of other threads' requests before it tries again to start a call. No thread is woken when an abandoned call
 * ends, although its slot becomes free. */
#define SLOT_LOOK_NS 1000000

int Request_await_slot(Lease *l, unsigned *turn) {
    Request *some[MANY];
    size_t n = 0;
    for (Request *r = l->flying; r && n < MANY; r = r->next)
        if (!is_watched(r))
            some[n++] = (Request *)Py_NewRef((PyObject *)r);
    if (n)
        watch(some, n, 0);
    else if ((*turn)++)
        await_another(SLOT_LOOK_NS);
    for (size_t i = 0; i < n; i++)
        Py_DECREF((PyObject *)some[i]);
    return PyErr_CheckSignals();
}

PyObject *Request_start(Function *f, PyObject *const *values, Py_ssize_t n, PyObject *names) {
    Request *r = (Request *)PyType_GenericAlloc(Request_type, 0);
    if (!r)
        return NULL;
    r->function = (Function *)Py_NewRef((PyObject *)f);
    r->forks = binding_forks;
    if (Plan_make(&r->plan, f, &(call_arguments){ values, n, names }) || Function_start(f, &r->plan, &r->id)) {
        Py_DECREF((PyObject *)r);
        return NULL;
    }
    if (!r->plan.options || (!r->plan.options->repeats && !(r->plan.options->flags & RFAAS_CALL_IN_PLACE)))
        Plan_free_inputs(&r->plan);
    Lease *l = f->lease;
    r->next = l->flying;
    if (r->next)
        r->next->prev = r;
    l->flying = r;
    return (PyObject *)r;
}

/* Parses a time limit in seconds, None: no limit. Returns -1 with an exception. */
static int64_t until_of(PyObject *timeout) {
    if (timeout == Py_None)
        return 0;
    double s = PyFloat_AsDouble(timeout);
    if (s == -1 && PyErr_Occurred())
        return -1;
    return now() + (s <= 0 ? 0 : s > 9e9 ? (int64_t)9e18 - now() : (int64_t)(s * 1e9));
}

static int timeout_of(PyObject *args, PyObject *kwargs, int64_t *until) {
    static char *names[] = { "timeout", NULL };
    PyObject *timeout = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O", names, &timeout))
        return -1;
    *until = until_of(timeout);
    return *until < 0 ? -1 : 0;
}

static PyObject *Request_result(Request *r, PyObject *args, PyObject *kwargs) {
    int64_t until;
    if (timeout_of(args, kwargs, &until))
        return NULL;
    int status = await(r, until);
    if (status < 0)
        return NULL;
    if (status)
        return PyErr_Format(PyExc_TimeoutError, "the call of %U has not ended yet", r->function->name);
    if (r->status)
        return Function_raise_text(r->function, r->status, r->cancelled ? "the call was cancelled" : r->text ? r->text : "", r->started, r->code);
    if (!r->result) {
        r->result = Plan_result(&r->plan, r->function, r->size);
        if (r->result)
            Plan_free(&r->plan);
    }
    return Py_XNewRef(r->result);
}

static PyObject *Request_wait(Request *r, PyObject *args, PyObject *kwargs) {
    int64_t until;
    if (timeout_of(args, kwargs, &until))
        return NULL;
    int status = await(r, until);
    return status < 0 ? NULL : PyBool_FromLong(!status);
}

static PyObject *Request_done(Request *r, PyObject *none) {
    (void)none;
    int done = !r->id;
    if (!done && !is_watched(r)) {
        ending e = { 0 };
        rfaas_request id = r->id;
        r->watched++;
        BEGIN_CALL
        e.status = RFAAS.test(&id, &done, &e.size);
        note(&e);
        END_CALL
        r->watched--;
        if (done)
            finish(r, &e);
        else
            free(e.text);
    }
    return PyBool_FromLong(done);
}

static PyObject *Request_cancel(Request *r, PyObject *none) {
    (void)none;
    if (!r->id)
        Py_RETURN_FALSE; /* it has ended */
    rfaas_request id = r->id;
    r->cancelled = true;
    r->watched++;
    int status;
    BEGIN_CALL
    status = RFAAS.cancel(&id);
    END_CALL
    r->watched--;
    if (!r->id) /* another thread has seen its end meanwhile */
        Py_RETURN_TRUE;
    if (status) {
        r->cancelled = false;
        return binding_raise(status);
    }
    finish(r, &(ending){ .worker = RFAAS_ANY_WORKER });
    Py_RETURN_TRUE;
}

/* wait_any(requests: list, timeout) returns the index of one that has ended, or None after the timeout. */
PyObject *binding_wait_any(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *list, *timeout = Py_None;
    if (!PyArg_ParseTuple(args, "O!|O", &PyList_Type, &list, &timeout))
        return NULL;
    int64_t until = until_of(timeout);
    if (until < 0)
        return NULL;
    Py_ssize_t count = PyList_Size(list);
    Request **all = PyMem_Calloc((size_t)count + 1, sizeof *all), **free_ones = PyMem_Calloc((size_t)count + 1, sizeof *all);
    PyObject *result = NULL;
    Py_ssize_t have = 0;
    for (; all && free_ones && have < count; have++) {
        PyObject *r = PyList_GetItem(list, have);
        if (!PyObject_TypeCheck(r, Request_type)) {
            PyErr_Format(PyExc_TypeError, "item %zd is %R, want a Request", have, r);
            break;
        }
        all[have] = (Request *)Py_NewRef(r);
    }
    for (bool first = true; have == count && !result; first = false) {
        size_t n = 0;
        for (Py_ssize_t i = 0; i < count && !result; i++)
            if (!all[i]->id)
                result = PyLong_FromSsize_t(i);
            else if (!is_watched(all[i]))
                free_ones[n++] = all[i];
        if (result)
            break;
        if (!count || (!first && until && now() >= until)) {
            result = Py_NewRef(Py_None);
            break;
        }
        if (n)
            watch(free_ones, n, until);
        else {
            int64_t left = until ? until - now() : BINDING_LOOK_NS;
            await_another(left < BINDING_LOOK_NS ? left > 0 ? left : 0 : BINDING_LOOK_NS);
        }
        if (PyErr_CheckSignals())
            break;
    }
    while (have > 0)
        Py_DECREF((PyObject *)all[--have]);
    if (!all || !free_ones)
        PyErr_NoMemory();
    PyMem_Free(all);
    PyMem_Free(free_ones);
    return result;
}

static void Request_dealloc(Request *r) {
    if (r->id) {
        unlink_request(r); /* before another thread can see it in the list */
        BEGIN_CALL
        RFAAS.cancel(&r->id); /* from now on, the library does not write to the result */
        END_CALL
    }
    Plan_free(&r->plan);
    free(r->text);
    Py_CLEAR(r->result);
    Py_CLEAR(r->function);
    binding_free((PyObject *)r);
}

static PyObject *Request_function(Request *r, void *unused) {
    (void)unused;
    return Py_NewRef((PyObject *)r->function);
}

/* The index of the worker that executed the call; None: it has not ended, it was cancelled, or it ran in this process. */
static PyObject *Request_worker(Request *r, void *unused) {
    (void)unused;
    return r->id || r->worker < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(r->worker);
}

static PyObject *Request_await(PyObject *r) { return PyObject_CallFunctionObjArgs(binding_hook_of(HOOK_AWAIT), r, NULL); }

static PyMethodDef methods[] = {
    { "result", (PyCFunction)(void *)Request_result, METH_VARARGS | METH_KEYWORDS, "Waits for the call and returns its result." },
    { "wait", (PyCFunction)(void *)Request_wait, METH_VARARGS | METH_KEYWORDS, "Waits for the call. Returns whether it has ended." },
    { "done", (PyCFunction)Request_done, METH_NOARGS, "Whether the call has ended. Does not block." },
    { "cancel", (PyCFunction)Request_cancel, METH_NOARGS, "Abandons the call. Returns whether it was in flight." },
    { 0 },
};
static PyGetSetDef properties[] = {
    { "function", (getter)Request_function, NULL, "The function that was called.", NULL },
    { "worker", (getter)Request_worker, NULL, "The index of the worker that executed the call, or None.", NULL },
    { 0 },
};
static PyType_Slot slots[] = {
    { Py_tp_dealloc, Request_dealloc }, { Py_tp_methods, methods }, { Py_tp_getset, properties }, { Py_am_await, Request_await }, { 0 },
};
PyType_Spec Request_spec = { "_rfaas.Request", sizeof(Request), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots };
