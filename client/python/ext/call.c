/* Functions: calls, and applying a function to every item of an array. */
#include <stdio.h>
#include <string.h>

#include "rfaas_fields.h"
#include <structmember.h> /* after Python.h */

PyTypeObject *Function_type;

/* ---- options ---- */

int Function_option(Function *f, rfaas_call_options *o, PyObject *name, PyObject *value) {
    int status = binding_set(o, rfaas_call_options_fields, rfaas_call_options_flags, &o->flags, name, value, NULL);
    if (status > 0)
        PyErr_Format(PyExc_TypeError, "a call of %U has no option %R. The options are out, dtype, shape, capacity, copy, timeout, worker, "
                     "repeats, attempt, kill, keep and in_place", f->name, name);
    return status ? -1 : 0;
}

/* dtype(value) of numpy; None: NULL. */
static int set_dtype(PyObject **to, PyObject *value) {
    PyObject *dtype = value == Py_None ? NULL : PyObject_CallFunctionObjArgs(binding_hook_of(HOOK_DTYPE), value, NULL);
    if (!dtype && value != Py_None)
        return -1;
    replace_reference(to, dtype);
    return 0;
}

static int set_takes(Function *f, PyObject *value) {
    bool several = PyTuple_Check(value) || PyList_Check(value);
    PyObject *all = several ? PySequence_List(value) : PyList_New(0);
    if (!all || (!several && PyList_Append(all, value)))
        return Py_XDECREF(all), -1;
    for (Py_ssize_t i = 0; i < PyList_Size(all); i++) {
        PyObject *item = PyList_GetItem(all, i);
        PyObject *dtype = item == Py_None ? Py_NewRef(item) : PyObject_CallFunctionObjArgs(binding_hook_of(HOOK_DTYPE), item, NULL);
        if (!dtype || PyList_SetItem(all, i, dtype))
            return Py_DECREF(all), -1;
    }
    replace_reference(&f->takes, PyList_AsTuple(all));
    Py_DECREF(all);
    return f->takes ? 0 : -1;
}

static int default_option(Function *f, PyObject *name, PyObject *value) {
    if (!PyUnicode_CompareWithASCIIString(name, "takes"))
        return set_takes(f, value);
    if (!PyUnicode_CompareWithASCIIString(name, "dtype"))
        return set_dtype(&f->returns, value);
    if (!PyUnicode_CompareWithASCIIString(name, "shape")) {
        replace_reference(&f->shape, value == Py_None ? NULL : Py_NewRef(value));
        return 0;
    }
    if (!PyUnicode_CompareWithASCIIString(name, "capacity"))
        return binding_size("capacity", value, &f->capacity);
    if (!PyUnicode_CompareWithASCIIString(name, "copy")) {
        int on = PyObject_IsTrue(value);
        f->refuse = on == 0;
        return on < 0 ? -1 : 0;
    }
    f->plain = false;
    int status = binding_set(&f->options, rfaas_call_options_fields, rfaas_call_options_flags, &f->options.flags, name, value, NULL);
    if (status > 0)
        PyErr_Format(PyExc_TypeError, "%U has no option %R. The options are takes, dtype, shape, capacity, copy, timeout, worker, repeats, attempt, "
                     "kill, keep and in_place", f->name, name);
    return status ? -1 : 0;
}

static PyObject *vectorcall(Function *f, PyObject *const *values, size_t nargs, PyObject *names);

PyObject *Function_make(Lease *l, PyObject *name, rfaas_function index, PyObject *options) {
    Function *f = (Function *)PyType_GenericAlloc(Function_type, 0);
    if (!f)
        return NULL;
    f->vectorcall = (void *)vectorcall;
    f->lease = (Lease *)Py_NewRef((PyObject *)l);
    f->name = Py_NewRef(name);
    f->index = index;
    f->options = (rfaas_call_options)RFAAS_CALL_OPTIONS_INIT;
    f->plain = true;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; options && PyDict_Next(options, &at, &key, &value);)
        if (default_option(f, key, value)) {
            Py_DECREF(f);
            return NULL;
        }
    return (PyObject *)f;
}

/* ---- calls ---- */

/* The library's texts have the exported name. */
PyObject *Function_raise_text(Function *f, int status, const char *text, int started, int32_t code) {
    PyObject *words = f->exported ? PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace") : NULL;
    PyObject *own = words ? PyUnicode_Replace(words, f->exported, f->name, -1) : NULL;
    const char *utf8 = own ? PyUnicode_AsUTF8AndSize(own, NULL) : NULL;
    if (utf8 || !f->exported)
        binding_raise_text(status, utf8 ? utf8 : text, started, code);
    Py_XDECREF(words);
    Py_XDECREF(own);
    return NULL;
}

PyObject *Function_raise(Function *f, int status) { return Function_raise_text(f, status, RFAAS.last_error(), RFAAS.started(), RFAAS.function_code()); }

static int start(Function *f, Plan *p, const rfaas_call_options *o, rfaas_request *r) {
    rfaas_lease *l = f->lease->handle;
    void *room = Plan_room(p);
    if (!p->pieces)
        return RFAAS.iinvoke(l, f->index, p->first.buf, (size_t)p->first.len, room, p->capacity, o, r);
    rfaas_piece out = RFAAS_PIECE(room, p->capacity);
    return RFAAS.iinvokev(l, f->index, p->pieces, (size_t)p->count, &out, 1, o, r);
}

int Function_start(Function *f, Plan *p, rfaas_request *r) {
    const rfaas_call_options *o = p->options;
    int64_t begin = 0, limit = o ? o->timeout_ns : 0; /* p->own, which changes below, may be what o points to */
    for (unsigned turn = 0;;) {
        if (!Lease_open(f->lease))
            return -1;
        int status;
        BEGIN_CALL /* over tcp, it may block */
        status = start(f, p, o, r);
        END_CALL
        if (!status)
            return 0;
        if (status != RFAAS_BUSY)
            return Function_raise(f, status), -1;
        int64_t t = now();
        if (!begin)
            begin = t;
        if (Request_await_slot(f->lease, &turn))
            return -1;
        if (!limit)
            continue;
        int64_t left = limit - (now() - begin);
        if (left <= 0) {
            binding_raise_text(RFAAS_DEADLINE, "no worker had a free slot until the deadline", RFAAS_NOT_STARTED, 0);
            return -1;
        }
        if (o != &p->own)
            p->own = *o;
        p->own.timeout_ns = left;
        o = &p->own;
    }
}

/* Python runs signal handlers in the main thread only, so other threads wait in one piece. */
static int call_here(Function *f, Plan *p, size_t *size) {
    if (!Lease_open(f->lease))
        return -1;
    rfaas_lease *l = f->lease->handle;
    void *room = Plan_room(p);
    int status;
    BEGIN_CALL
    if (!p->pieces) {
        status = RFAAS.invoke(l, f->index, p->first.buf, (size_t)p->first.len, room, p->capacity, size, p->options);
    } else {
        rfaas_piece out = RFAAS_PIECE(room, p->capacity);
        status = RFAAS.invokev(l, f->index, p->pieces, (size_t)p->count, &out, 1, size, p->options);
    }
    END_CALL
    status = Plan_keep(p, status, *size);
    return status ? (Function_raise(f, status), -1) : 0;
}

/* Before a wait with a time limit, which reads the clock. Saves 60 ns of a call that takes 300 ns. */
#define QUICK_LOOKS 64

/* Starts the call and waits for it, in the main thread. Ctrl-C abandons it. */
static int call_main(Function *f, Plan *p, size_t *size) {
    rfaas_request r = RFAAS_REQUEST_NULL;
    size_t index = RFAAS_UNDEFINED;
    int status;
    if (!Lease_open(f->lease))
        return -1;
    BEGIN_CALL
    status = start(f, p, p->options, &r);
    int done = 0;
    for (int i = 0; i < QUICK_LOOKS && !status && !done; i++)
        status = RFAAS.test(&r, &done, size);
    if (done)
        index = 0;
    else if (!status)
        status = RFAAS.waitany_for(1, &r, BINDING_LOOK_NS, &index, size);
    END_CALL
    if (status == RFAAS_BUSY && index == RFAAS_UNDEFINED) {
        if (Function_start(f, p, &r))
            return -1;
        status = RFAAS_OK;
    }
    while (!status && index == RFAAS_UNDEFINED) {
        if (PyErr_CheckSignals()) {
            BEGIN_CALL
            RFAAS.cancel(&r);
            END_CALL
            return -1;
        }
        BEGIN_CALL
        status = RFAAS.waitany_for(1, &r, BINDING_LOOK_NS, &index, size);
        END_CALL
    }
    status = Plan_keep(p, status, *size);
    return status ? (Function_raise(f, status), -1) : 0;
}

static PyObject *call(Function *f, const call_arguments *a) {
    Plan p;
    size_t size = 0;
    if (Plan_make(&p, f, a))
        return NULL;
    PyObject *result = NULL;
    if (!(binding_main_thread() ? call_main(f, &p, &size) : call_here(f, &p, &size)))
        result = Plan_result(&p, f, size);
    Plan_free(&p);
    return result;
}

/* f(...), without a tuple and a dictionary for the arguments. The limited API of 3.12 has this protocol. It is the same in 3.11, where it is not
 * in the limited API, and therefore declared here. The highest bit of nargs is a flag. */
static PyObject *vectorcall(Function *f, PyObject *const *values, size_t nargs, PyObject *names) {
    return call(f, &(call_arguments){ values, (Py_ssize_t)(nargs & (SIZE_MAX >> 1)), names });
}

#define HAVE_VECTORCALL (1UL << 11)

static PyMemberDef members[] = { { "__vectorcalloffset__", T_PYSSIZET, offsetof(Function, vectorcall), READONLY, NULL }, { 0 } };

/* f(*args, **kwargs) as the slot tp_call, which a type with the protocol must have too. */
static PyObject *Function_call(Function *f, PyObject *args, PyObject *kwargs) {
    Py_ssize_t n = PyTuple_Size(args), named = kwargs ? PyDict_Size(kwargs) : 0, i = n;
    PyObject **values = PyMem_Calloc((size_t)(n + named) + 1, sizeof *values), *list = named ? PyDict_Keys(kwargs) : NULL;
    PyObject *names = list ? PyList_AsTuple(list) : NULL, *result = NULL;
    for (Py_ssize_t k = 0; values && k < n; k++)
        values[k] = PyTuple_GetItem(args, k);
    PyObject *key, *value;
    for (Py_ssize_t at = 0; values && named && PyDict_Next(kwargs, &at, &key, &value);)
        values[i++] = value; /* in the order of PyDict_Keys */
    if (values && (names || !named))
        result = call(f, &(call_arguments){ values, n, names });
    else if (!PyErr_Occurred())
        PyErr_NoMemory();
    PyMem_Free(values);
    Py_XDECREF(list);
    Py_XDECREF(names);
    return result;
}

/* ---- map and reduce ---- */

/* How long a part of a map takes, after which the main thread looks for Ctrl-C. */
#define PART_NS 200000000

typedef struct items {
    Function *f;
    const char *in;
    char *out;
    size_t in_item, out_item, count;
    int operation, type; /* 0: map */
    rfaas_map_options options;
} items;

static int apply(items *a, size_t from, size_t n) {
    const char *in = a->in + from * a->in_item;
    rfaas_lease *l = a->f->lease->handle;
    int status;
    BEGIN_CALL
    if (a->operation)
        status = RFAAS.reduce(l, a->f->index, in, a->in_item, a->out, a->out_item, n, a->operation, a->type, &a->options);
    else
        status = RFAAS.map(l, a->f->index, in, a->in_item, a->out + from * a->out_item, a->out_item, n, &a->options);
    END_CALL
    return status;
}

static int raise_from(Function *f, int status, size_t from) {
    char text[1024];
    if (from)
        snprintf(text, sizeof text, "%s (items are counted from item %zu)", RFAAS.last_error(), from);
    else
        snprintf(text, sizeof text, "%s", RFAAS.last_error());
    Function_raise_text(f, status, text, RFAAS.started(), RFAAS.function_code());
    return -1;
}

/* In the main thread, the items are applied in parts of about PART_NS. */
static int apply_all(items *a) {
    if (!Lease_open(a->f->lease))
        return -1;
    int64_t begin = now(), limit = a->options.timeout_ns;
    int workers = RFAAS.lease_workers(a->f->lease->handle);
    size_t part = a->count, least = workers > 0 ? (size_t)workers : 1;
    if (binding_main_thread() && part > 64 * least)
        part = 64 * least;
    for (size_t from = 0; from < a->count;) {
        size_t n = a->count - from < part ? a->count - from : part;
        int64_t t = now();
        if (limit && (a->options.timeout_ns = limit - (t - begin)) <= 0)
            a->options.timeout_ns = 1;
        int status = apply(a, from, n);
        if (status)
            return raise_from(a->f, status, from);
        from += n;
        if (PyErr_CheckSignals() || !Lease_open(a->f->lease))
            return -1;
        int64_t took = now() - t;
        if (took < PART_NS / 2)
            part = took < PART_NS / 64 ? part * 16 : part * 2;
        else if (took > 2 * PART_NS && part > 2 * least)
            part /= 2;
    }
    return 0;
}

/* _map(x, out, count, operation, type, **options): x and out are contiguous. */
static PyObject *Function_map(Function *f, PyObject *args, PyObject *kwargs) {
    items a = { .f = f, .options = RFAAS_MAP_OPTIONS_INIT };
    Py_buffer in, out;
    Py_ssize_t count;
    PyObject *x, *result;
    if (!PyArg_ParseTuple(args, "OOnii", &x, &result, &count, &a.operation, &a.type))
        return NULL;
    if (kwargs && binding_set_all("map", &a.options, rfaas_map_options_fields, rfaas_map_options_flags, &a.options.flags, kwargs, NULL))
        return NULL;
    if (PyObject_GetBuffer(x, &in, PyBUF_SIMPLE))
        return NULL;
    if (PyObject_GetBuffer(result, &out, PyBUF_WRITABLE)) {
        PyBuffer_Release(&in);
        return NULL;
    }
    a.count = (size_t)count;
    if (count > 0 && (in.len % count || (!a.operation && out.len % count))) {
        PyErr_Format(PyExc_ValueError, "%U.map: %zd bytes of items and %zd bytes of results cannot be divided among %zd items", f->name, in.len,
                     out.len, count);
    } else if (count > 0) {
        a.in = in.buf, a.out = out.buf;
        a.in_item = (size_t)(in.len / count);
        a.out_item = (size_t)(a.operation ? out.len : out.len / count);
        apply_all(&a);
    }
    PyBuffer_Release(&in);
    PyBuffer_Release(&out);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* ---- the type ---- */

static int Function_traverse(Function *f, visitproc visit, void *arg) {
    Py_VISIT((PyObject *)Py_TYPE((PyObject *)f));
    Py_VISIT((PyObject *)f->lease);
    Py_VISIT(f->shape);
    return 0;
}

static void Function_dealloc(Function *f) {
    PyObject_GC_UnTrack(f);
    Py_CLEAR(f->lease);
    Py_CLEAR(f->name);
    Py_CLEAR(f->exported);
    Py_CLEAR(f->takes);
    Py_CLEAR(f->returns);
    Py_CLEAR(f->shape);
    binding_free((PyObject *)f);
}

static PyObject *Function_get_name(Function *f, void *unused) {
    (void)unused;
    return Py_NewRef(f->name);
}

static PyObject *Function_get_lease(Function *f, void *unused) {
    (void)unused;
    return Py_NewRef((PyObject *)f->lease);
}

static PyObject *Function_get_dtype(Function *f, void *unused) {
    (void)unused;
    return Py_NewRef(f->returns ? f->returns : Py_None);
}

static PyObject *Function_get_takes(Function *f, void *unused) {
    (void)unused;
    return Py_NewRef(f->takes ? f->takes : Py_None);
}

static PyObject *Function_get_index(Function *f, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLong(f->index);
}

static PyMethodDef methods[] = {
    { "submit", (PyCFunction)(void *)Request_start, METH_FASTCALL | METH_KEYWORDS, "Starts a call and returns a Request." },
    { "_map", (PyCFunction)(void *)Function_map, METH_VARARGS | METH_KEYWORDS, NULL },
    { 0 },
};
static PyGetSetDef properties[] = {
    { "name", (getter)Function_get_name, NULL, "The name of the function.", NULL },
    { "lease", (getter)Function_get_lease, NULL, "The lease of the function.", NULL },
    { "dtype", (getter)Function_get_dtype, NULL, "The dtype of results, if it was given.", NULL },
    { "index", (getter)Function_get_index, NULL, "The rfaas_function for C code in this process.", NULL },
    { "takes", (getter)Function_get_takes, NULL, "The dtypes of the arguments, if they were given.", NULL },
    { 0 },
};
static PyObject *Function_repr(Function *f) { return PyUnicode_FromFormat("<rfaas.Function %U>", f->name); }

static PyType_Slot slots[] = {
    { Py_tp_repr, Function_repr }, { Py_tp_call, Function_call }, { Py_tp_dealloc, Function_dealloc }, { Py_tp_traverse, Function_traverse },
    { Py_tp_methods, methods }, { Py_tp_members, members }, { Py_tp_getset, properties }, { 0 },
};
PyType_Spec Function_spec = { "rfaas.Function", sizeof(Function), 0,
                              Py_TPFLAGS_DEFAULT | HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots };
