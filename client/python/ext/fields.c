/* Conversion of the structures of rfaas.h from and to Python. */
#include <math.h>
#include <string.h>

#include "binding.h"

static int out_of_range(const char *name, PyObject *value, const char *most) {
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s is %R, want a number of at most %s", name, value, most);
    return -1;
}

int binding_size(const char *name, PyObject *value, size_t *size) {
    *size = PyLong_AsSize_t(value);
    if (!PyErr_Occurred())
        return 0;
    bool number = PyErr_ExceptionMatches(PyExc_OverflowError);
    PyErr_Clear();
    PyErr_Format(number ? PyExc_ValueError : PyExc_TypeError, "%s is %R, want a number of bytes", name, value);
    return -1;
}

static int set_number(char *to, const binding_field *field, PyObject *value) {
    PyObject *number = PyNumber_Index(value);
    if (!number) {
        PyErr_Format(PyExc_TypeError, "%s is %R, want an integer", field->name, value);
        return -1;
    }
    unsigned long long u = 0;
    long long i = 0;
    if (field->kind == FIELD_INT32)
        i = PyLong_AsLongLong(number);
    else
        u = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (PyErr_Occurred())
        return out_of_range(field->name, value, field->kind == FIELD_INT32    ? "2**31 - 1"
                                                : field->kind == FIELD_UINT32 ? "2**32 - 1, and at least 0"
                                                                              : "2**64 - 1, and at least 0");
    switch (field->kind) {
    case FIELD_INT32:
        if (i < INT32_MIN || i > INT32_MAX)
            return out_of_range(field->name, value, "2**31 - 1");
        *(int32_t *)(void *)to = (int32_t)i;
        break;
    case FIELD_UINT32:
        if (u > UINT32_MAX)
            return out_of_range(field->name, value, "2**32 - 1, and at least 0");
        *(uint32_t *)(void *)to = (uint32_t)u;
        break;
    default:
        *(uint64_t *)(void *)to = u;
    }
    return 0;
}

static int set_seconds(int64_t *to, const char *name, PyObject *value) {
    double s = PyFloat_AsDouble(value);
    if (s == -1 && PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "%s is %R, want a number of seconds", name, value);
        return -1;
    }
    if (!(s >= 0 && s < 9e9)) {
        PyErr_Format(PyExc_ValueError, "%s is %R, want seconds from 0 to 9e9", name, value);
        return -1;
    }
    *to = (int64_t)ceil(s * 1e9);
    return 0;
}

static int set_string(const char **to, const char *name, PyObject *value, PyObject *keep) {
    PyObject *path = PyOS_FSPath(value), *bytes = NULL;
    if (path && !PyUnicode_FSConverter(path, &bytes)) { /* refuses text with a NUL */
        if (PyErr_ExceptionMatches(PyExc_ValueError))
            PyErr_Format(PyExc_ValueError, "%s is %R, which contains a NUL character", name, value);
    } else if (!path) {
        PyErr_Format(PyExc_TypeError, "%s is %R, want a str", name, value);
    }
    Py_XDECREF(path);
    if (!bytes)
        return -1;
    *to = PyBytes_AsString(bytes);
    int status = PyList_Append(keep, bytes);
    Py_DECREF(bytes);
    return status;
}

/* A copy: structures with buffers are small, and used once. */
static int set_buffer(const void **to, size_t *size, const char *name, PyObject *value, PyObject *keep) {
    PyObject *bytes = PyUnicode_Check(value) ? NULL : PyBytes_FromObject(value);
    if (!bytes) {
        PyErr_Format(PyExc_TypeError, "%s is %R, want bytes or another buffer", name, value);
        return -1;
    }
    *to = PyBytes_AsString(bytes);
    *size = (size_t)PyBytes_Size(bytes);
    int status = PyList_Append(keep, bytes);
    Py_DECREF(bytes);
    return status;
}

int binding_set(void *options, const binding_field *fields, const binding_flag *flags, uint32_t *bits, PyObject *name, PyObject *value,
                PyObject *keep) {
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    if (!text)
        return -1;
    const binding_field *same = fields;
    while (same->name && strcmp(same->name, text))
        same++;
    bool names = same->name && value != Py_None && !PyBool_Check(value); /* a field that has the name of a flag */
    for (const binding_flag *f = flags; f->name && !names; f++) {
        if (strcmp(f->name, text))
            continue;
        int on = PyObject_IsTrue(value);
        if (on > 0)
            *bits |= f->value;
        else if (on == 0)
            *bits &= ~f->value;
        return on < 0 ? -1 : 0;
    }
    for (const binding_field *f = fields; f->name; f++) {
        if (strcmp(f->name, text))
            continue;
        char *to = (char *)options + f->offset;
        if (value == Py_None)
            return 0; /* the default */
        switch (f->kind) {
        case FIELD_SECONDS:
            return set_seconds((int64_t *)(void *)to, f->name, value);
        case FIELD_STRING:
            return set_string((const char **)(void *)to, f->name, value, keep);
        case FIELD_BUFFER:
            return set_buffer((const void **)(void *)to, (size_t *)(void *)((char *)options + f->size), f->name, value, keep);
        default:
            return set_number(to, f, value);
        }
    }
    return 1;
}

int binding_set_all(const char *what, void *options, const binding_field *fields, const binding_flag *flags, uint32_t *bits, PyObject *dict,
                    PyObject *keep) {
    PyObject *name, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &name, &value);) {
        int status = binding_set(options, fields, flags, bits, name, value, keep);
        if (status < 0)
            return -1;
        if (!status)
            continue;
        PyObject *known = PyList_New(0), *comma = PyUnicode_FromString(", "), *all = NULL;
        for (const binding_field *f = fields; known && f->name; f++) {
            PyObject *s = PyUnicode_FromString(f->name);
            if (s)
                PyList_Append(known, s);
            Py_XDECREF(s);
        }
        for (const binding_flag *f = flags; known && f->name; f++) {
            PyObject *s = PyUnicode_FromString(f->name);
            if (s && PySequence_Contains(known, s) == 0) /* seed is a field and a flag */
                PyList_Append(known, s);
            Py_XDECREF(s);
        }
        if (known && comma && (all = PyUnicode_Join(comma, known)))
            PyErr_Format(PyExc_TypeError, "%s has no option %R. The options are %U", what, name, all);
        Py_XDECREF(known);
        Py_XDECREF(comma);
        Py_XDECREF(all);
        return -1;
    }
    return 0;
}

PyObject *binding_dict(const void *from, const binding_field *fields) {
    PyObject *dict = PyDict_New();
    for (const binding_field *f = fields; dict && f->name; f++) {
        const char *at = (const char *)from + f->offset;
        PyObject *v = NULL;
        switch (f->kind) {
        case FIELD_UINT32:
            v = PyLong_FromUnsignedLong(*(const uint32_t *)(const void *)at);
            break;
        case FIELD_INT32:
            v = PyLong_FromLong(*(const int32_t *)(const void *)at);
            break;
        case FIELD_SECONDS:
            v = PyFloat_FromDouble((double)*(const int64_t *)(const void *)at * 1e-9);
            break;
        case FIELD_TEXT:
            v = PyUnicode_DecodeUTF8(at, (Py_ssize_t)strnlen(at, f->size), "replace");
            break;
        default:
            v = PyLong_FromUnsignedLongLong(*(const uint64_t *)(const void *)at);
        }
        if (!v || PyDict_SetItemString(dict, f->name, v))
            Py_CLEAR(dict);
        Py_XDECREF(v);
    }
    return dict;
}
