/* Sessions. */
#include "rfaas_fields.h"

PyTypeObject *Session_type;

/* Session(options: dict) */
static PyObject *Session_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *dict, *keep;
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!", &PyDict_Type, &dict) || binding_start() || !(keep = PyList_New(0)))
        return NULL;
    Session *s = NULL;
    if (!binding_set_all("Session", &o, rfaas_session_options_fields, rfaas_session_options_flags, &o.flags, dict, keep) &&
        (s = (Session *)PyType_GenericAlloc(type, 0))) {
        int status;
        BEGIN_CALL
        status = RFAAS.session_open(&o, &s->handle);
        END_CALL
        if (status) {
            binding_raise(status);
            Py_CLEAR(s);
        } else if (interrupted()) {
            Py_CLEAR(s);
        }
    }
    Py_DECREF(keep);
    return (PyObject *)s;
}

static PyObject *Session_close(Session *s, PyObject *none) {
    (void)none;
    rfaas_session *handle = s->handle;
    int status = RFAAS_OK;
    s->handle = NULL;
    if (handle) {
        BEGIN_CALL
        status = RFAAS.session_close(handle);
        END_CALL
    }
    if (status)
        return binding_raise(status);
    Py_RETURN_NONE;
}

static void Session_dealloc(Session *s) {
    if (s->handle) {
        BEGIN_CALL
        RFAAS.session_close(s->handle);
        END_CALL
    }
    binding_free((PyObject *)s);
}

bool Session_is_open(const Session *s) {
    if (!s->handle)
        PyErr_SetString(PyExc_ValueError, "the session is closed");
    return s->handle;
}

static PyObject *Session_cached(Session *s, void *unused) {
    (void)unused;
    int n = Session_is_open(s) ? RFAAS.session_cached(s->handle) : 0;
    return PyErr_Occurred() ? NULL : n < 0 ? binding_raise(n) : PyLong_FromLong(n);
}

static PyObject *Session_is_closed(Session *s, void *unused) {
    (void)unused;
    return PyBool_FromLong(!s->handle);
}

#define CHANGES 64 /* at a time */

static PyObject *Session_changes(Session *s, PyObject *none) {
    (void)none;
    PyObject *list = Session_is_open(s) ? PyList_New(0) : NULL;
    rfaas_change *changes = list ? PyMem_Malloc(CHANGES * sizeof *changes) : NULL;
    int status = RFAAS_OK;
    for (size_t count = CHANGES; changes && count == CHANGES && !status;) {
        BEGIN_CALL
        status = RFAAS.session_changes(s->handle, changes, CHANGES, &count);
        END_CALL
        for (size_t i = 0; !status && i < count; i++) {
            PyObject *d = binding_dict(&changes[i], rfaas_change_fields);
            if (!d || PyList_Append(list, d))
                count = 0;
            Py_XDECREF(d);
        }
    }
    PyMem_Free(changes);
    if (status)
        binding_raise(status);
    if (!changes || PyErr_Occurred())
        Py_CLEAR(list);
    return list ? list : PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

/* put_table(name, address, *buffers) */
static PyObject *Session_put_table(Session *s, PyObject *args) {
    Py_ssize_t n = PyTuple_Size(args) - 2;
    const char *name = n >= 0 ? PyUnicode_AsUTF8AndSize(PyTuple_GetItem(args, 0), NULL) : NULL;
    uint64_t address = name ? PyLong_AsUnsignedLongLong(PyTuple_GetItem(args, 1)) : 0;
    if (!name || PyErr_Occurred() || !Session_is_open(s))
        return NULL;
    Py_buffer *buffers = PyMem_Calloc((size_t)n + 1, sizeof *buffers);
    rfaas_piece *pieces = PyMem_Calloc((size_t)n + 1, sizeof *pieces);
    int status = RFAAS_OK;
    Py_ssize_t have = 0;
    while (buffers && pieces && have < n && !PyObject_GetBuffer(PyTuple_GetItem(args, have + 2), &buffers[have], PyBUF_SIMPLE)) {
        pieces[have] = (rfaas_piece)RFAAS_PIECE(buffers[have].buf, (size_t)buffers[have].len);
        have++;
    }
    if (have == n && buffers && pieces) {
        BEGIN_CALL
        status = RFAAS.table_put_at(s->handle, name, pieces, (size_t)n, address);
        END_CALL
        if (status)
            binding_raise(status);
    } else if (!PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    while (have > 0)
        PyBuffer_Release(&buffers[--have]);
    PyMem_Free(buffers);
    PyMem_Free(pieces);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* put_table_seed(name, full name) */
static PyObject *Session_put_table_seed(Session *s, PyObject *args) {
    const char *name, *seed;
    int status;
    if (!PyArg_ParseTuple(args, "ss", &name, &seed) || !Session_is_open(s))
        return NULL;
    BEGIN_CALL
    status = RFAAS.table_put_seed(s->handle, name, seed);
    END_CALL
    return status ? binding_raise(status) : Py_NewRef(Py_None);
}

static PyObject *Session_drop_table(Session *s, PyObject *arg) {
    const char *name = PyUnicode_AsUTF8AndSize(arg, NULL);
    int status = RFAAS_OK;
    if (name && Session_is_open(s)) {
        BEGIN_CALL
        status = RFAAS.table_drop(s->handle, name);
        END_CALL
    }
    return PyErr_Occurred() ? NULL : status ? binding_raise(status) : Py_NewRef(Py_None);
}

/* session._places(count, options: dict) returns the addresses of executors. */
static PyObject *Session_places(Session *s, PyObject *args) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    Py_ssize_t count;
    PyObject *dict, *keep, *list = NULL;
    if (!PyArg_ParseTuple(args, "nO!", &count, &PyDict_Type, &dict) || !Session_is_open(s))
        return NULL;
    if (count < 0)
        return PyErr_Format(PyExc_ValueError, "places: the count is %zd", count);
    rfaas_place *places = PyMem_Calloc((size_t)count + 1, sizeof *places);
    if (!places)
        return PyErr_NoMemory();
    if ((keep = PyList_New(0)) && !binding_set_all("places", &o, rfaas_lease_options_fields, rfaas_lease_options_flags, &o.flags, dict, keep)) {
        int status;
        BEGIN_CALL
        status = RFAAS.places(s->handle, &o, (size_t)count, places);
        END_CALL
        list = status ? binding_raise(status) : PyList_New(0);
    }
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *address = PyUnicode_FromString(places[i].executor);
        if (!address || PyList_Append(list, address))
            Py_CLEAR(list);
        Py_XDECREF(address);
    }
    PyMem_Free(places);
    Py_XDECREF(keep);
    return list;
}

static PyMethodDef session_methods[] = {
    { "close", (PyCFunction)Session_close, METH_NOARGS, "Releases the leases of the session and closes it." },
    { "_changes", (PyCFunction)Session_changes, METH_NOARGS, NULL },
    { "_places", (PyCFunction)Session_places, METH_VARARGS, NULL },
    { "_put_table", (PyCFunction)Session_put_table, METH_VARARGS, NULL },
    { "_put_table_seed", (PyCFunction)Session_put_table_seed, METH_VARARGS, NULL },
    { "drop_table", (PyCFunction)Session_drop_table, METH_O, "Withdraws a table." },
    { 0 },
};
static PyGetSetDef session_properties[] = {
    { "cached", (getter)Session_cached, NULL, "The number of released leases that the session caches.", NULL },
    { "closed", (getter)Session_is_closed, NULL, "Whether the session is closed.", NULL },
    { 0 },
};
static PyType_Slot session_slots[] = {
    { Py_tp_new, Session_new }, { Py_tp_dealloc, Session_dealloc }, { Py_tp_methods, session_methods }, { Py_tp_getset, session_properties }, { 0 },
};
PyType_Spec Session_spec = { "_rfaas.Session", sizeof(Session), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, session_slots };
