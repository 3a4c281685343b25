/* Direct access to arrays of numpy. The buffer protocol and the attribute dtype would take 120 ns of a call that takes 350 ns, and 300 ns if
 * the result is a new array. */
#include <string.h>

#include "binding.h"

/* The beginning of PyArrayObject_fields in numpy's ndarraytypes.h, which is the same in all releases of numpy 1 and 2. */
typedef struct array_object {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions, *strides;
    PyObject *base, *descr;
    int flags;
} array_object;

#define C_CONTIGUOUS 0x1
#define WRITEABLE 0x400

static PyObject *ndarray;
static bool direct; /* arrays have the layout above */

static long number_of(PyObject *of, const char *attribute) {
    PyObject *v = of ? PyObject_GetAttrString(of, attribute) : NULL;
    long n = v ? PyLong_AsLong(v) : -1;
    Py_XDECREF(v);
    return n;
}

/* Compares an array of 3 x 5 with what its attributes say. */
static bool has_layout(PyObject *array) {
    const array_object *a = (array_object *)array;
    PyObject *dtype = PyObject_GetAttrString(array, "dtype"), *flags = PyObject_GetAttrString(array, "flags");
    PyObject *ctypes = PyObject_GetAttrString(array, "__array_interface__");
    PyObject *data = ctypes ? PyDict_GetItemString(ctypes, "data") : NULL;
    bool same = dtype && flags && data && PyTuple_Check(data) && a->nd == 2 && a->descr == dtype && !a->base &&
                a->data == PyLong_AsVoidPtr(PyTuple_GetItem(data, 0)) && a->flags == number_of(flags, "num") && a->dimensions && a->strides;
    same = same && a->dimensions[0] == 3 && a->dimensions[1] == 5 && a->strides[0] == 40 && a->strides[1] == 8 &&
           (a->flags & (C_CONTIGUOUS | WRITEABLE)) == (C_CONTIGUOUS | WRITEABLE);
    Py_XDECREF(dtype);
    Py_XDECREF(flags);
    Py_XDECREF(ctypes);
    return same;
}

/* A Py_buffer without an export needs a type that does nothing at its release. */
static bool check_layout(void) {
    if (PyType_GetSlot((PyTypeObject *)ndarray, Py_bf_releasebuffer) || number_of(ndarray, "__basicsize__") < (long)sizeof(array_object))
        return false;
    PyObject *array = PyObject_CallFunction(ndarray, "((ii))", 3, 5);
    bool same = array && has_layout(array);
    Py_XDECREF(array);
    return same;
}

PyObject *binding_ndarray(void) {
    if (ndarray)
        return ndarray;
    PyObject *modules = PyImport_GetModuleDict(), *numpy = modules ? PyDict_GetItemString(modules, "numpy") : NULL;
    if (numpy && (ndarray = PyObject_GetAttrString(numpy, "ndarray")))
        direct = check_layout();
    PyErr_Clear(); /* numpy is just being imported, or has another layout */
    return ndarray;
}

PyObject *binding_dtype(PyObject *array) {
    static PyObject *name;
    if (direct)
        return Py_NewRef(((array_object *)array)->descr);
    if (!name && !(name = PyUnicode_InternFromString("dtype")))
        return NULL;
    return PyObject_GetAttr(array, name);
}

bool binding_view(PyObject *array, Py_ssize_t itemsize, bool writable, Py_buffer *b) {
    const array_object *a = (array_object *)array;
    int want = C_CONTIGUOUS | (writable ? WRITEABLE : 0);
    if (!direct || (a->flags & want) != want)
        return false;
    memset(b, 0, sizeof *b);
    b->buf = a->data;
    b->len = itemsize;
    for (int i = 0; i < a->nd; i++)
        b->len *= a->dimensions[i];
    b->obj = Py_NewRef(array);
    return true;
}
