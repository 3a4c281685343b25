/* The payload and the result of a call. */
#include <stdlib.h>
#include <string.h>

#include "binding.h"

/* Returns the dtype of an array and the size of its elements. Arrays of Python objects contain addresses, which mean nothing in another process.
 * numpy has one dtype object for each simple type, so the last one that was accepted is nearly always the next. */
static PyObject *dtype_of(Function *f, PyObject *array, const char *what, Py_ssize_t number, Py_ssize_t *size) {
    static PyObject *accepted;
    static Py_ssize_t accepted_size;
    PyObject *dtype = binding_dtype(array);
    if (!dtype || dtype == accepted) {
        *size = accepted_size;
        return dtype;
    }
    PyObject *has = PyObject_GetAttrString(dtype, "hasobject"), *itemsize = PyObject_GetAttrString(dtype, "itemsize");
    int objects = has && itemsize ? PyObject_IsTrue(has) : -1;
    *size = itemsize ? PyLong_AsSsize_t(itemsize) : -1;
    Py_XDECREF(has);
    Py_XDECREF(itemsize);
    if (objects > 0)
        PyErr_Format(PyExc_TypeError, "%s %zd of %U is an array of Python objects: convert it, for example by astype(float)", what, number, f->name);
    if (objects || PyErr_Occurred()) {
        Py_DECREF(dtype);
        return NULL;
    }
    replace_reference(&accepted, Py_NewRef(dtype));
    accepted_size = *size;
    return dtype;
}

static int check_dtype(Function *f, Py_ssize_t number, PyObject *x, PyObject *dtype) {
    Py_ssize_t n = PyTuple_Size(f->takes);
    PyObject *want = n ? PyTuple_GetItem(f->takes, number < n ? number : n - 1) : Py_None;
    int same = want == Py_None || want == dtype ? 1 : dtype ? PyObject_RichCompareBool(dtype, want, Py_EQ) : 0;
    if (same)
        return same < 0 ? -1 : 0;
    if (dtype)
        PyErr_Format(PyExc_TypeError, "argument %zd of %U has dtype %S, want %S: convert it by astype", number + 1, f->name, dtype, want);
    else
        PyErr_Format(PyExc_TypeError, "argument %zd of %U is of %R, which has no dtype, want %S: convert it by numpy.asarray", number + 1, f->name,
                     (PyObject *)Py_TYPE(x), want);
    return -1;
}

/* One piece for an array that consists of equal contiguous runs at equal distances, such as a column of a matrix. */
static bool as_piece(const Py_buffer *b, rfaas_piece *piece) {
    if (!b->strides || !b->shape || b->suboffsets)
        return false;
    Py_ssize_t run = b->itemsize;
    int d = b->ndim - 1;
    for (; d >= 0 && (b->shape[d] == 1 || b->strides[d] == run); d--)
        run *= b->shape[d];
    *piece = (rfaas_piece){ .base = b->buf, .size = (size_t)run, .count = 1 };
    if (d < 0)
        return true;
    piece->count = (size_t)b->shape[d];
    piece->stride = b->strides[d];
    Py_ssize_t distance = piece->stride < 0 ? -piece->stride : piece->stride;
    for (Py_ssize_t whole = b->strides[d] * b->shape[d]; --d >= 0; whole *= b->shape[d])
        if (b->shape[d] != 1) {
            if (b->strides[d] != whole)
                return false;
            piece->count *= (size_t)b->shape[d];
        }
    return distance >= run; /* broadcast arrays overlap */
}

/* A copy in C order, which lives as long as the plan. */
static int copy(Plan *p, Py_buffer *b, rfaas_piece *piece) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, b->len);
    if (!bytes || (!p->copied && !(p->copied = PyList_New(0))) || PyBuffer_ToContiguous(PyBytes_AsString(bytes), b, b->len, 'C') ||
        PyList_Append(p->copied, bytes)) {
        Py_XDECREF(bytes);
        return -1;
    }
    *piece = (rfaas_piece)RFAAS_PIECE(PyBytes_AsString(bytes), (size_t)b->len);
    Py_DECREF(bytes);
    return 0;
}

int Plan_argument(Plan *p, Function *f, Py_ssize_t number, PyObject *x, Py_buffer *b, rfaas_piece *piece) {
    PyObject *ndarray = binding_ndarray(), *dtype = NULL;
    bool array = ndarray && PyObject_TypeCheck(x, (PyTypeObject *)ndarray);
    Py_ssize_t size;
    if (array && !(dtype = dtype_of(f, x, "argument", number + 1, &size)))
        return -1;
    int bad = f->takes ? check_dtype(f, number, x, dtype) : 0;
    Py_XDECREF(dtype);
    if (bad)
        return -1;
    *piece = (rfaas_piece){ 0 };
    if (array && binding_view(x, size, false, b))
        return 0;
    if (!PyObject_GetBuffer(x, b, array || PyBytes_CheckExact(x) ? PyBUF_SIMPLE : PyBUF_ND | PyBUF_FORMAT)) {
        if (!b->format || !strchr(b->format, 'O'))
            return 0;
        PyBuffer_Release(b);
        PyErr_Format(PyExc_TypeError, "argument %zd of %U contains Python objects", number + 1, f->name);
        return -1;
    }
    PyErr_Clear();
    if (PyObject_GetBuffer(x, b, PyBUF_FULL_RO)) {
        PyErr_Clear();
        PyObject *type = PyType_GetName(Py_TYPE(x));
        if (type)
            PyErr_Format(PyExc_TypeError, "argument %zd of %U has the type %U: pass an array, bytes or another buffer", number + 1, f->name, type);
        Py_XDECREF(type);
        return -1;
    }
    int status = -1;
    if (p->refuse)
        PyErr_Format(PyExc_ValueError, "argument %zd of %U is not contiguous, and copy=False refuses it: pass numpy.ascontiguousarray of it",
                     number + 1, f->name);
    else if (b->format && strchr(b->format, 'O'))
        PyErr_Format(PyExc_TypeError, "argument %zd of %U contains Python objects", number + 1, f->name);
    else
        status = as_piece(b, piece) ? 0 : copy(p, b, piece);
    if (status)
        PyBuffer_Release(b);
    return status;
}

static int take_arguments(Plan *p, Function *f, PyObject *const *values, Py_ssize_t n) {
    p->in = &p->first;
    if (n == 1) {
        if (Plan_argument(p, f, 0, values[0], &p->first, &p->one))
            return -1;
        p->count = 1;
        if (p->one.size)
            p->pieces = &p->one;
        return 0;
    }
    if (!n)
        return 0;
    p->in = p->copies[0] = calloc((size_t)n, sizeof *p->in);
    p->pieces = p->copies[1] = calloc((size_t)n, sizeof *p->pieces);
    if (!p->in || !p->pieces)
        return PyErr_NoMemory(), -1;
    for (; p->count < n; p->count++) {
        Py_buffer *b = &p->in[p->count];
        rfaas_piece *piece = &p->pieces[p->count];
        if (Plan_argument(p, f, p->count, values[p->count], b, piece))
            return -1;
        if (!piece->size)
            *piece = (rfaas_piece)RFAAS_PIECE(b->buf, (size_t)b->len);
    }
    return 0;
}

/* ---- results ---- */

static int take_out(Plan *p, Function *f, PyObject *out, PyObject *want) {
    PyObject *ndarray = binding_ndarray(), *dtype = NULL;
    if (ndarray && PyObject_TypeCheck(out, (PyTypeObject *)ndarray)) {
        Py_ssize_t size;
        if (!(dtype = dtype_of(f, out, "result", 1, &size)))
            return -1;
        int same = want && dtype != want ? PyObject_RichCompareBool(dtype, want, Py_EQ) : 1; /* numpy compares with 'f8' and float, too */
        if (!same)
            PyErr_Format(PyExc_TypeError, "out of %U has dtype %S, want %S", f->name, dtype, want);
        Py_DECREF(dtype);
        if (same != 1)
            return -1;
        p->has_out = binding_view(out, size, true, &p->out);
    }
    if (p->has_out || !PyObject_GetBuffer(out, &p->out, PyBUF_WRITABLE)) {
        p->has_out = true;
        p->result = Py_NewRef(out);
        return 0;
    }
    PyErr_Clear();
    Py_buffer b;
    if (PyObject_GetBuffer(out, &b, PyBUF_FULL_RO))
        PyErr_Clear(), PyErr_Format(PyExc_TypeError, "out of %U is %R: pass an array, a bytearray or another writable buffer", f->name, out);
    else {
        PyErr_Format(PyExc_ValueError, b.readonly ? "out of %U is read-only" : "out of %U is not contiguous: pass a contiguous array", f->name);
        PyBuffer_Release(&b);
    }
    return -1;
}

/* A new array for the result. numpy.ndarray(shape, dtype) leaves its memory as it is. */
static int new_array(Plan *p, Function *f, PyObject *first, PyObject *dtype, PyObject *shape) {
    static PyObject *shape_name;
    PyObject *ndarray = binding_ndarray(), *own_dtype = NULL, *own_shape = NULL, *checked;
    Py_ssize_t size;
    if (!shape_name && !(shape_name = PyUnicode_InternFromString("shape")))
        return -1;
    if (!ndarray || !first) { /* numpy is not imported, or there is no array to take the rest from */
        p->result = PyObject_CallFunctionObjArgs(binding_hook_of(HOOK_RESULT), f->name, dtype ? dtype : Py_None, shape ? shape : Py_None, NULL);
    } else {
        if (!dtype)
            dtype = own_dtype = binding_dtype(first);
        if (!shape)
            shape = own_shape = PyObject_GetAttr(first, shape_name);
        if (dtype && shape)
            p->result = PyObject_CallFunctionObjArgs(ndarray, shape, dtype, NULL);
        Py_XDECREF(own_dtype);
        Py_XDECREF(own_shape);
    }
    if (!p->result || !(checked = dtype_of(f, p->result, "result", 1, &size)))
        return -1;
    Py_DECREF(checked);
    if (!binding_view(p->result, size, true, &p->out) && PyObject_GetBuffer(p->result, &p->out, PyBUF_WRITABLE))
        return -1;
    p->has_out = true;
    return 0;
}

static int make_result(Plan *p, Function *f, PyObject *first, PyObject *dtype, PyObject *shape) {
    PyObject *ndarray = binding_ndarray();
    if (first && (!ndarray || !PyObject_TypeCheck(first, (PyTypeObject *)ndarray)))
        first = NULL;
    if ((first && !p->capacity) || dtype || shape)
        return new_array(p, f, first, dtype, shape);
    if (!p->capacity) {
        size_t sum = p->pieces || !p->count ? 0 : (size_t)p->first.len;
        for (Py_ssize_t i = 0; p->pieces && i < p->count; i++)
            sum += p->pieces[i].size * p->pieces[i].count;
        p->capacity = sum > f->lease->eager ? sum : f->lease->eager;
    }
    if (!(p->bytes = malloc(p->capacity ? p->capacity : 1)))
        return PyErr_NoMemory(), -1;
    return 0;
}

int Plan_keep(Plan *p, int status, size_t size) {
    if (status != RFAAS_RESULT_TOO_LARGE || p->given || !p->options || size > p->options->keep || !(p->kept = malloc(size)))
        return status;
    if (RFAAS.kept_result(p->kept, size, NULL)) {
        free(p->kept);
        p->kept = NULL;
    }
    return p->kept ? RFAAS_OK : status;
}

/* A new array with one dimension for a result that was larger than the array for it. */
static PyObject *kept_array(Plan *p, Function *f, size_t size) {
    Py_ssize_t itemsize;
    Py_buffer b;
    PyObject *dtype = dtype_of(f, p->result, "result", 1, &itemsize), *array = NULL;
    if (dtype && size % (size_t)itemsize)
        PyErr_Format(PyExc_ValueError, "%U returned %zu bytes, which is not a multiple of the %zd bytes of %S", f->name, size, itemsize, dtype);
    else if (dtype) {
        PyObject *n = PyLong_FromSize_t(size / (size_t)itemsize);
        array = n ? PyObject_CallFunctionObjArgs(binding_hook_of(HOOK_RESULT), f->name, dtype, n, NULL) : NULL;
        Py_XDECREF(n);
    }
    Py_XDECREF(dtype);
    if (array && PyObject_GetBuffer(array, &b, PyBUF_WRITABLE)) {
        Py_CLEAR(array);
    } else if (array) {
        memcpy(b.buf, p->kept, size);
        PyBuffer_Release(&b);
    }
    return array;
}

PyObject *Plan_result(Plan *p, Function *f, size_t size) {
    if (p->kept)
        return p->result ? kept_array(p, f, size) : PyBytes_FromStringAndSize(p->kept, (Py_ssize_t)size);
    if (!p->result)
        return PyBytes_FromStringAndSize(p->bytes, (Py_ssize_t)size);
    if (size == (size_t)p->out.len)
        return Py_NewRef(p->result);
    PyObject *n = PyLong_FromSize_t(size);
    PyObject *part = n ? PyObject_CallFunctionObjArgs(binding_hook_of(HOOK_PART), f->name, p->result, n, NULL) : NULL;
    Py_XDECREF(n);
    return part;
}

/* ---- the whole call ---- */

typedef struct keywords {
    PyObject *out, *dtype, *shape;
} keywords;

static bool is(PyObject *name, PyObject *interned) {
    return name == interned || (PyUnicode_Check(name) && !PyUnicode_Compare(name, interned));
}

static int keyword(Plan *p, Function *f, PyObject *name, PyObject *value, keywords *k) {
    static PyObject *out, *dtype, *shape, *copied, *capacity;
    if (!capacity) {
        out = PyUnicode_InternFromString("out");
        dtype = PyUnicode_InternFromString("dtype");
        shape = PyUnicode_InternFromString("shape");
        copied = PyUnicode_InternFromString("copy");
        if (!out || !dtype || !shape || !copied || !(capacity = PyUnicode_InternFromString("capacity")))
            return -1;
    }
    PyObject **to = is(name, out) ? &k->out : is(name, dtype) ? &k->dtype : is(name, shape) ? &k->shape : NULL;
    if (to) {
        *to = value == Py_None ? NULL : value;
        return 0;
    }
    if (is(name, capacity))
        return binding_size("capacity", value, &p->capacity);
    if (is(name, copied)) {
        int on = PyObject_IsTrue(value);
        p->refuse = on == 0;
        return on < 0 ? -1 : 0;
    }
    p->options = &p->own;
    return Function_option(f, &p->own, name, value);
}

int Plan_make(Plan *p, Function *f, const call_arguments *a) {
    memset(p, 0, sizeof *p);
    keywords k = { NULL, f->returns, f->shape };
    p->capacity = f->capacity;
    p->refuse = f->refuse;
    p->options = f->plain ? NULL : &f->options;
    if (a->names) {
        p->own = f->options;
        for (Py_ssize_t i = 0, n = PyTuple_Size(a->names); i < n; i++)
            if (keyword(p, f, PyTuple_GetItem(a->names, i), a->values[a->n + i], &k))
                return -1;
    }
    if (take_arguments(p, f, a->values, a->n) ||
        (k.out ? take_out(p, f, k.out, k.dtype) : make_result(p, f, a->n ? a->values[0] : NULL, k.dtype, k.shape)))
        return Plan_free(p), -1;
    p->given = k.out != NULL;
    if (p->has_out)
        p->capacity = (size_t)p->out.len;
    return 0;
}

void Plan_free_inputs(Plan *p) {
    for (Py_ssize_t i = 0; i < p->count; i++)
        PyBuffer_Release(&p->in[i]);
    p->count = 0;
    free(p->copies[0]);
    free(p->copies[1]);
    p->copies[0] = p->copies[1] = NULL;
    Py_CLEAR(p->copied);
}

void Plan_free(Plan *p) {
    Plan_free_inputs(p);
    if (p->has_out)
        PyBuffer_Release(&p->out);
    p->has_out = false;
    Py_CLEAR(p->result);
    free(p->bytes);
    free(p->kept);
    p->bytes = p->kept = NULL;
}
