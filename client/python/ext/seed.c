/* Named seeds. */
#include "rfaas_fields.h"

PyTypeObject *Seed_type;

static PyObject *Seed_adopt(PyTypeObject *type, PyObject *session, rfaas_seed *handle) {
    Seed *d = (Seed *)PyType_GenericAlloc(type, 0);
    if (!d) {
        RFAAS.seed_release(handle);
        return NULL;
    }
    d->handle = handle;
    d->session = Py_NewRef(session);
    return (PyObject *)d;
}

/* _create(lease, function, payload, name, ttl) */
static PyObject *Seed_create(PyObject *type, PyObject *args) {
    Lease *l;
    const char *function;
    Py_buffer in = { 0 };
    double ttl;
    int status;
    rfaas_seed *handle;
    rfaas_seed_options o = RFAAS_SEED_OPTIONS_INIT;
    if (!PyArg_ParseTuple(args, "O!sz*sd", Lease_type, &l, &function, &in, &o.name, &ttl))
        return NULL;
    if (!(ttl >= 0 && ttl < 9e9))
        PyErr_Format(PyExc_ValueError, "create_seed: ttl must be from 0 to 9e9 seconds");
    else if (Lease_open(l)) {
        o.ttl_ns = (int64_t)(ttl * 1e9);
        BEGIN_CALL
        status = RFAAS.seed_create(l->handle, function, in.buf, (size_t)in.len, &o, &handle);
        END_CALL
        if (status)
            binding_raise(status);
    }
    if (in.obj)
        PyBuffer_Release(&in);
    return PyErr_Occurred() ? NULL : Seed_adopt((PyTypeObject *)type, l->session, handle);
}

/* _open(session, name) */
static PyObject *Seed_open(PyObject *type, PyObject *args) {
    Session *s;
    const char *name;
    int status;
    rfaas_seed *handle;
    if (!PyArg_ParseTuple(args, "O!s", Session_type, &s, &name) || !Session_is_open(s))
        return NULL;
    BEGIN_CALL
    status = RFAAS.seed_open(s->handle, name, &handle);
    END_CALL
    return status ? binding_raise(status) : Seed_adopt((PyTypeObject *)type, (PyObject *)s, handle);
}

static bool has_seed(const Seed *d) {
    if (!d->handle)
        PyErr_SetString(PyExc_ValueError, "the seed is released");
    return d->handle;
}

static PyObject *Seed_name(Seed *d, void *unused) {
    (void)unused;
    const char *name = has_seed(d) ? RFAAS.seed_name(d->handle) : NULL;
    return name ? PyUnicode_FromString(name) : PyErr_Occurred() ? NULL : binding_raise(RFAAS_INVALID);
}

static PyObject *Seed_info(Seed *d, PyObject *none) {
    rfaas_seed_details i = { .struct_size = sizeof i };
    int status;
    (void)none;
    if (!has_seed(d))
        return NULL;
    BEGIN_CALL
    status = RFAAS.seed_info(d->handle, &i);
    END_CALL
    return status ? binding_raise(status) : binding_dict(&i, rfaas_seed_details_fields);
}

static PyObject *Seed_release(Seed *d, PyObject *none) {
    rfaas_seed *handle = d->handle;
    int status = RFAAS_OK;
    (void)none;
    d->handle = NULL;
    if (handle) {
        BEGIN_CALL
        status = RFAAS.seed_release(handle);
        END_CALL
    }
    return status ? binding_raise(status) : Py_NewRef(Py_None);
}

/* A seed that the program has not released ends when its lease expires. */
static void Seed_dealloc(Seed *d) {
    Py_CLEAR(d->session);
    binding_free((PyObject *)d);
}

static PyMethodDef seed_methods[] = {
    { "_create", (PyCFunction)Seed_create, METH_VARARGS | METH_CLASS, NULL },
    { "_open", (PyCFunction)Seed_open, METH_VARARGS | METH_CLASS, NULL },
    { "_info", (PyCFunction)Seed_info, METH_NOARGS, NULL },
    { "release", (PyCFunction)Seed_release, METH_NOARGS, "Withdraws a seed that this process has created; else only frees the handle." },
    { 0 },
};
static PyGetSetDef seed_properties[] = {
    { "name", (getter)Seed_name, NULL, "The full name, for the lease option `seed` and Session.open_seed in any program of the tenant.", NULL },
    { 0 },
};
static PyType_Slot seed_slots[] = { { Py_tp_dealloc, Seed_dealloc }, { Py_tp_methods, seed_methods }, { Py_tp_getset, seed_properties }, { 0 } };
PyType_Spec Seed_spec = { "_rfaas.Seed", sizeof(Seed), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, seed_slots };
