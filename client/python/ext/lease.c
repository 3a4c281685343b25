/* Leases. */
#include <stdio.h>

#include "rfaas_fields.h"

PyTypeObject *Lease_type;

/* The longest that an open waits for room before it looks for Ctrl-C. */
#define WAIT_SLICE_NS 200000000

/* rfaas_lease_open, rfaas_lease_open_at if `at` is not NULL, or rfaas_lease_open_across if there is room for several leases, with a `wait` that Ctrl-C
 * ends. Sets *count to the number of leases. Returns -1 with an exception. */
static int open_leases(rfaas_session *session, rfaas_lease_options *o, const rfaas_place *at, rfaas_lease *handles[], size_t room, size_t *count) {
    *count = 1;
    int64_t end = now() + o->wait_ns;
    bool waits = o->wait_ns > 0;
    for (;;) {
        int status;
        int64_t left = end - now();
        if (waits)
            o->wait_ns = left > WAIT_SLICE_NS ? WAIT_SLICE_NS : left > 1 ? left : 1;
        BEGIN_CALL
        status = at         ? RFAAS.lease_open_at(session, o, at, handles)
                 : room > 1 ? RFAAS.lease_open_across(session, o, room, handles, count)
                            : RFAAS.lease_open(session, o, handles);
        END_CALL
        bool again = waits && left > WAIT_SLICE_NS && (status == RFAAS_BUSY || status == RFAAS_PEER_GONE);
        if (status && !again)
            return binding_raise(status), -1;
        if (interrupted()) {
            for (size_t i = 0; !status && i < *count; i++)
                RFAAS.lease_release(handles[i]);
            return -1;
        }
        if (!status)
            return 0;
    }
}

/* The most leases of one Lease._across. */
#define ACROSS 1024

/* Makes a Lease, which owns the handle. If that fails, it releases the handle. */
static PyObject *adopt(PyTypeObject *type, Session *session, rfaas_lease *handle) {
    Lease *l = (Lease *)PyType_GenericAlloc(type, 0);
    if (!l) {
        RFAAS.lease_release(handle);
        return NULL;
    }
    l->handle = handle;
    l->session = Py_NewRef((PyObject *)session);
    rfaas_lease_details d = { .struct_size = sizeof d };
    l->eager = RFAAS.lease_info(handle, &d) ? 0 : d.eager;
    if (!(l->functions = PyDict_New()))
        Py_CLEAR(l);
    return (PyObject *)l;
}

/* Opens leases with the arguments (session, options: dict, at: str, which may be missing). Returns their number, or -1 with an exception. */
static Py_ssize_t open_all(PyObject *args, Session **session, rfaas_lease *handles[], size_t room) {
    PyObject *dict, *keep;
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    size_t count = 0;
    const char *at = NULL;
    rfaas_place place;
    if (!PyArg_ParseTuple(args, "O!O!|s", Session_type, session, &PyDict_Type, &dict, &at) || !Session_is_open(*session))
        return -1;
    if (at && (size_t)snprintf(place.executor, sizeof place.executor, "%s", at) >= sizeof place.executor) {
        PyErr_Format(PyExc_ValueError, "the address of the executor has more than %zu bytes: %s", sizeof place.executor - 1, at);
        return -1;
    }
    if (!(keep = PyList_New(0)))
        return -1;
    int status = binding_set_all("Lease", &o, rfaas_lease_options_fields, rfaas_lease_options_flags, &o.flags, dict, keep);
    if (!status)
        status = open_leases((*session)->handle, &o, at ? &place : NULL, handles, room, &count);
    Py_DECREF(keep);
    return status ? -1 : (Py_ssize_t)count;
}

static PyObject *Lease_across(PyObject *type, PyObject *args) {
    Session *session;
    rfaas_lease **handles = PyMem_Calloc(ACROSS, sizeof *handles);
    if (!handles)
        return PyErr_NoMemory();
    Py_ssize_t count = open_all(args, &session, handles, ACROSS);
    PyObject *list = count >= 0 ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *l = list ? adopt((PyTypeObject *)type, session, handles[i]) : NULL;
        if (!list)
            RFAAS.lease_release(handles[i]);
        else if (!l || PyList_Append(list, l))
            Py_CLEAR(list);
        Py_XDECREF(l);
    }
    PyMem_Free(handles);
    return list;
}

/* Lease(session, options: dict) */
static PyObject *Lease_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Session *session;
    rfaas_lease *handle;
    (void)kwargs;
    return open_all(args, &session, &handle, 1) < 0 ? NULL : adopt(type, session, handle);
}

rfaas_lease *Lease_open(Lease *l) {
    if (!l->handle)
        PyErr_SetString(PyExc_ValueError, "the lease is released");
    return l->handle;
}

static PyObject *Lease_release(Lease *l, PyObject *none) {
    (void)none;
    rfaas_lease *handle = l->handle;
    int status = RFAAS_OK;
    l->handle = NULL;
    if (handle) {
        BEGIN_CALL
        status = RFAAS.lease_release(handle);
        END_CALL
    }
    if (l->functions) /* the garbage collector may have taken it */
        PyDict_Clear(l->functions);
    return status ? binding_raise(status) : Py_NewRef(Py_None);
}

static int Lease_traverse(Lease *l, visitproc visit, void *arg) {
    Py_VISIT((PyObject *)Py_TYPE((PyObject *)l));
    Py_VISIT(l->session);
    Py_VISIT(l->functions);
    return 0;
}

static int Lease_clear(Lease *l) {
    Py_CLEAR(l->functions);
    return 0;
}

static void Lease_dealloc(Lease *l) {
    PyObject_GC_UnTrack(l);
    if (l->handle) {
        BEGIN_CALL
        RFAAS.lease_release(l->handle);
        END_CALL
    }
    Py_CLEAR(l->functions);
    Py_CLEAR(l->session);
    binding_free((PyObject *)l);
}

/* Looks a function up in the library, and keeps it by the given name. options: a dict of options of all its calls, or NULL. */
static PyObject *find(Lease *l, PyObject *name, PyObject *exported, PyObject *options) {
    rfaas_function index;
    const char *text = PyUnicode_Check(exported) ? PyUnicode_AsUTF8AndSize(exported, NULL) : NULL;
    if (!text)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "a function has a str as its name, not %R", exported);
    if (!Lease_open(l))
        return NULL;
    int status = RFAAS.lease_function(l->handle, text, &index);
    if (status)
        return binding_raise(status);
    PyObject *f = Function_make(l, name, index, options);
    if (f && name != exported)
        ((Function *)f)->exported = Py_NewRef(exported);
    if (f && PyDict_SetItem(l->functions, name, f))
        Py_CLEAR(f);
    return f;
}

/* lease["name"] */
static PyObject *Lease_get(Lease *l, PyObject *name) {
    PyObject *f = l->functions ? PyDict_GetItemWithError(l->functions, name) : NULL;
    if (f || PyErr_Occurred())
        return Py_XNewRef(f);
    if (l->named && Lease_open(l)) {
        PyObject *text = PyUnicode_FromFormat("the lease has no function %R", name);
        const char *utf8 = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
        if (utf8)
            binding_raise_text(RFAAS_NO_FUNCTION, utf8, RFAAS_NOT_STARTED, 0);
        Py_XDECREF(text);
        return NULL;
    }
    return find(l, name, name, NULL);
}

/* _name(name, exported, **options) */
static PyObject *Lease_name(Lease *l, PyObject *args, PyObject *kwargs) {
    PyObject *name, *exported;
    if (!PyArg_ParseTuple(args, "UU", &name, &exported))
        return NULL;
    PyObject *f = find(l, name, exported, kwargs);
    Py_XDECREF(f);
    l->named = true;
    return f ? Py_NewRef(Py_None) : NULL;
}

/* function(name, **options) */
static PyObject *Lease_function(Lease *l, PyObject *args, PyObject *kwargs) {
    PyObject *name;
    if (!PyArg_ParseTuple(args, "U", &name))
        return NULL;
    Function *base = (Function *)Lease_get(l, name);
    if (!base || !kwargs || !PyDict_Size(kwargs))
        return (PyObject *)base;
    Function *f = (Function *)Function_make(l, name, base->index, kwargs);
    if (f) {
        f->exported = Py_XNewRef(base->exported);
        f->takes = f->takes ? f->takes : Py_XNewRef(base->takes);
        f->returns = f->returns ? f->returns : Py_XNewRef(base->returns);
    }
    Py_DECREF(base);
    return (PyObject *)f;
}

PyObject *Lease_chain(Lease *l, PyObject *args) {
    Function *first, *second;
    rfaas_function index;
    if (!PyArg_ParseTuple(args, "O!O!", Function_type, &first, Function_type, &second) || !Lease_open(l))
        return NULL;
    if (first->lease != l || second->lease != l)
        return PyErr_Format(PyExc_ValueError, "%U and %U must be functions of this lease", first->name, second->name);
    int status = RFAAS.lease_chain(l->handle, first->index, second->index, &index);
    if (status)
        return binding_raise(status);
    PyObject *name = PyUnicode_FromFormat("%U, then %U", first->name, second->name);
    PyObject *f = name ? Function_make(l, name, index, NULL) : NULL;
    Py_XDECREF(name);
    return f;
}

static PyObject *Lease_names(Lease *l, void *unused) {
    (void)unused;
    if (l->named && l->handle)
        return PyDict_Keys(l->functions);
    rfaas_lease_details d = { .struct_size = sizeof d };
    int status = Lease_open(l) ? RFAAS.lease_info(l->handle, &d) : RFAAS_OK;
    PyObject *list = PyErr_Occurred() ? NULL : status ? binding_raise(status) : PyList_New(0);
    for (uint32_t i = 0; list && i < d.functions; i++) {
        const char *name = RFAAS.lease_function_name(l->handle, i);
        PyObject *s = PyUnicode_FromString(name ? name : "");
        if (!s || PyList_Append(list, s))
            Py_CLEAR(list);
        Py_XDECREF(s);
    }
    return list;
}

static PyObject *Lease_workers(Lease *l, void *unused) {
    (void)unused;
    int n = Lease_open(l) ? RFAAS.lease_workers(l->handle) : 0;
    return PyErr_Occurred() ? NULL : n < 0 ? binding_raise(n) : PyLong_FromLong(n);
}

static PyObject *Lease_released(Lease *l, void *unused) {
    (void)unused;
    return PyBool_FromLong(!l->handle);
}

static PyObject *Lease_handle(Lease *l, void *unused) {
    (void)unused;
    return Lease_open(l) ? PyLong_FromVoidPtr(l->handle) : NULL;
}

/* A structure that a function of the library fills, as a dictionary. */
#define DESCRIBE(type, call)                                                                                                                \
    type d = { .struct_size = sizeof d };                                                                                                   \
    int status = RFAAS_OK;                                                                                                                  \
    if (!Lease_open(l))                                                                                                                     \
        return NULL;                                                                                                                        \
    BEGIN_CALL                                                                                                                              \
    status = call;                                                                                                                          \
    END_CALL                                                                                                                                \
    return status ? binding_raise(status) : binding_dict(&d, type##_fields)

static PyObject *Lease_info(Lease *l, PyObject *none) {
    (void)none;
    DESCRIBE(rfaas_lease_details, RFAAS.lease_info(l->handle, &d));
}

static PyObject *Lease_statistics(Lease *l, PyObject *none) {
    (void)none;
    DESCRIBE(rfaas_statistics, RFAAS.lease_statistics(l->handle, &d));
}

static PyObject *Lease_event(Lease *l, PyObject *none) {
    (void)none;
    DESCRIBE(rfaas_event, RFAAS.lease_event(l->handle, &d));
}

static PyObject *Lease_worker_origin(Lease *l, PyObject *args) {
    int worker;
    if (!PyArg_ParseTuple(args, "i", &worker))
        return NULL;
    DESCRIBE(rfaas_worker_start, RFAAS.worker_origin(l->handle, worker, &d));
}

static PyObject *Lease_worker_info(Lease *l, PyObject *args) {
    int worker;
    if (!PyArg_ParseTuple(args, "i", &worker))
        return NULL;
    DESCRIBE(rfaas_worker_details, RFAAS.worker_info(l->handle, worker, &d));
}

static PyObject *Lease_worker_replace(Lease *l, PyObject *args) {
    int worker, status;
    if (!PyArg_ParseTuple(args, "i", &worker) || !Lease_open(l))
        return NULL;
    BEGIN_CALL
    status = RFAAS.worker_replace(l->handle, worker);
    END_CALL
    return status ? binding_raise(status) : interrupted() ? NULL : Py_NewRef(Py_None);
}

static PyObject *Lease_renew(Lease *l, PyObject *args) {
    double seconds = 0;
    int status;
    if (!PyArg_ParseTuple(args, "|d", &seconds) || !Lease_open(l))
        return NULL;
    if (!(seconds >= 0 && seconds < 9e9))
        return PyErr_Format(PyExc_ValueError, "renew: the duration must be from 0 to 9e9 seconds");
    BEGIN_CALL
    status = RFAAS.lease_renew(l->handle, (int64_t)(seconds * 1e9));
    END_CALL
    return status ? binding_raise(status) : Py_NewRef(Py_None);
}

static PyObject *Lease_check(Lease *l, PyObject *none) {
    (void)none;
    int status = Lease_open(l) ? RFAAS.lease_status(l->handle) : RFAAS_OK;
    return PyErr_Occurred() ? NULL : status ? binding_raise(status) : Py_NewRef(Py_None);
}

static PyObject *Lease_descriptor(Lease *l, PyObject *none) {
    (void)none;
    int fd = -1, status;
    if (!Lease_open(l))
        return NULL;
    BEGIN_CALL
    status = RFAAS.lease_descriptor(l->handle, &fd);
    END_CALL
    return status ? binding_raise(status) : PyLong_FromLong(fd);
}

static PyObject *Lease_arm(Lease *l, PyObject *none) {
    (void)none;
    int status;
    if (!Lease_open(l))
        return NULL;
    BEGIN_CALL
    status = RFAAS.lease_arm(l->handle);
    END_CALL
    return status ? binding_raise(status) : Py_NewRef(Py_None);
}

static PyMethodDef lease_methods[] = {
    { "release", (PyCFunction)Lease_release, METH_NOARGS, "Releases the lease and its workers. Calls in flight are abandoned." },
    { "function", (PyCFunction)(void *)Lease_function, METH_VARARGS | METH_KEYWORDS, "Returns a function of the library, with options for all its calls." },
    { "_across", (PyCFunction)Lease_across, METH_VARARGS | METH_CLASS, NULL },
    { "_name", (PyCFunction)(void *)Lease_name, METH_VARARGS | METH_KEYWORDS, NULL },
    { "chain", (PyCFunction)Lease_chain, METH_VARARGS, "Returns a function that calls the first function, and the second with the result of the first." },
    { "renew", (PyCFunction)Lease_renew, METH_VARARGS, "Renews the lease." },
    { "check", (PyCFunction)Lease_check, METH_NOARGS, "Raises LeaseError if the lease has ended." },
    { "_info", (PyCFunction)Lease_info, METH_NOARGS, NULL },
    { "_statistics", (PyCFunction)Lease_statistics, METH_NOARGS, NULL },
    { "_event", (PyCFunction)Lease_event, METH_NOARGS, NULL },
    { "_descriptor", (PyCFunction)Lease_descriptor, METH_NOARGS, NULL },
    { "_arm", (PyCFunction)Lease_arm, METH_NOARGS, NULL },
    { "_worker_origin", (PyCFunction)Lease_worker_origin, METH_VARARGS, NULL },
    { "_worker_info", (PyCFunction)Lease_worker_info, METH_VARARGS, NULL },
    { "replace_worker", (PyCFunction)Lease_worker_replace, METH_VARARGS, "Kills a worker and starts a new one in its place." },
    { 0 },
};
static PyGetSetDef lease_properties[] = {
    { "functions", (getter)Lease_names, NULL, "The names of the library's functions.", NULL },
    { "workers", (getter)Lease_workers, NULL, "The number of workers that the lease has now.", NULL },
    { "handle", (getter)Lease_handle, NULL, "The rfaas_lease * for C code in this process, as an int.", NULL },
    { "released", (getter)Lease_released, NULL, "Whether the lease is released.", NULL },
    { 0 },
};
static PyType_Slot lease_slots[] = {
    { Py_tp_new, Lease_new }, { Py_tp_dealloc, Lease_dealloc }, { Py_tp_traverse, Lease_traverse }, { Py_tp_clear, Lease_clear },
    { Py_mp_subscript, Lease_get }, { Py_tp_methods, lease_methods }, { Py_tp_getset, lease_properties }, { 0 },
};
PyType_Spec Lease_spec = { "_rfaas.Lease", sizeof(Lease), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, lease_slots };
