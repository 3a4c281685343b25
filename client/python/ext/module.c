/* The module: loads librfaas.so when it is first needed. */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "binding.h"

binding_library RFAAS;
long binding_inside;
unsigned binding_forks;

static bool loaded;
static pid_t started_in;
static pthread_t main_thread;
static PyObject *hooks[HOOK_COUNT];

PyObject *binding_hook_of(binding_hook which) { return hooks[which]; }

bool binding_main_thread(void) { return pthread_equal(pthread_self(), main_thread); }

static PyObject *load(PyObject *module, PyObject *arg) {
    (void)module;
    const char *path = PyUnicode_AsUTF8AndSize(arg, NULL);
    if (!path)
        return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return PyErr_Format(PyExc_ImportError, "%s", dlerror());
    binding_library found;
#define FIND(function)                                                                                                                      \
    if (!(found.function = (__typeof__(rfaas_##function) *)dlsym(library, "rfaas_" #function)))                                              \
        return PyErr_Format(PyExc_ImportError, "%s is older than this package: it has no rfaas_" #function "; install librfaas %d.%d", path,   \
                            RFAAS_VERSION_MAJOR, RFAAS_VERSION_MINOR);
    BINDING_FUNCTIONS(FIND)
    int version = found.version();
    if (version < RFAAS_VERSION_MAJOR * 1000 + RFAAS_VERSION_MINOR)
        return PyErr_Format(PyExc_ImportError, "%s is version %d.%d, and this package needs %d.%d", path, version / 1000, version % 1000,
                            RFAAS_VERSION_MAJOR, RFAAS_VERSION_MINOR);
    RFAAS = found;
    loaded = true;
    Py_RETURN_NONE;
}

/* A child of fork starts the library anew: handles of its parent are not valid in it. */
int binding_start(void) {
    if (!loaded) {
        PyObject *done = PyObject_CallFunctionObjArgs(hooks[HOOK_LOAD], NULL);
        if (!done)
            return -1;
        Py_DECREF(done);
    }
    if (started_in == getpid())
        return 0;
    int status = RFAAS.init(NULL);
    if (status)
        return binding_raise(status), -1;
    started_in = getpid();
    return 0;
}

/* At the end of the interpreter. A process that was forked from this one and did not start the library does nothing. Neither does one whose
 * daemon threads are still inside a call: the agent releases the leases of a process that ends. */
static PyObject *finish(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    if (started_in && started_in == getpid() && !binding_inside) {
        started_in = 0;
        Py_BEGIN_ALLOW_THREADS
        RFAAS.finalize();
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *after_fork(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    main_thread = pthread_self();
    binding_inside = 0;
    binding_forks++;
    Py_RETURN_NONE;
}

static PyObject *set_hooks(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given[HOOK_COUNT];
    unsigned long long main_ident;
    if (!PyArg_ParseTuple(args, "KOOOOOO", &main_ident, &given[0], &given[1], &given[2], &given[3], &given[4], &given[5]))
        return NULL;
    main_thread = (pthread_t)main_ident; /* threading.get_ident() is pthread_self() */
    for (int i = 0; i < HOOK_COUNT; i++) {
        replace_reference(&hooks[i], Py_NewRef(given[i]));
    }
    Py_RETURN_NONE;
}

static PyObject *version(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    if (binding_start())
        return NULL;
    int v = RFAAS.version();
    return Py_BuildValue("ii", v / 1000, v % 1000);
}

PyObject *binding_raise_text(int status, const char *text, int started, int32_t code) {
    PyObject *words = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    PyObject *e = words ? PyObject_CallFunction(hooks[HOOK_ERROR], "iOOi", status, words, started ? Py_True : Py_False, (int)code) : NULL;
    if (e)
        PyErr_SetObject((PyObject *)Py_TYPE(e), e);
    Py_XDECREF(words);
    Py_XDECREF(e);
    return NULL;
}

PyObject *binding_raise(int status) { return binding_raise_text(status, RFAAS.last_error(), RFAAS.started(), RFAAS.function_code()); }

static PyMethodDef methods[] = {
    { "load", load, METH_O, NULL },
    { "hooks", set_hooks, METH_VARARGS, NULL },
    { "after_fork", after_fork, METH_NOARGS, NULL },
    { "finish", finish, METH_NOARGS, NULL },
    { "version", version, METH_NOARGS, NULL },
    { "wait_any", binding_wait_any, METH_VARARGS, NULL },
    { 0 },
};

static struct PyModuleDef definition = { PyModuleDef_HEAD_INIT, .m_name = "_rfaas", .m_size = -1, .m_methods = methods };

static int add(PyObject *module, PyTypeObject **type, PyType_Spec *spec, const char *name) {
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return !*type || PyModule_AddObjectRef(module, name, (PyObject *)*type);
}

PyMODINIT_FUNC PyInit__rfaas(void) {
    PyObject *m = PyModule_Create(&definition);
    if (m && (add(m, &Session_type, &Session_spec, "Session") || add(m, &Lease_type, &Lease_spec, "Lease") ||
              add(m, &Seed_type, &Seed_spec, "Seed") ||
              add(m, &Function_type, &Function_spec, "Function") || add(m, &Request_type, &Request_spec, "Request")))
        Py_CLEAR(m);
    return m;
}
