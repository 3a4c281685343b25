/* The library of functions of rfaas.Executor and rfaas.python: runs Python code in a worker.
 *
 * It is not linked with Python. The init call opens the libpython of the client's version and looks up the functions that this file uses. They
 * are all in the stable ABI, so one binary works with CPython 3.11 and later versions. This file only starts the interpreter and gives it access
 * to the memory of a call. _remote.py, whose code is in the payload of the init call, interprets requests.
 *
 * In a worker with a runtime (worker/runtime.c) the interpreter runs already. The worker is a clone of the process that started it, as after
 * fork(), but no handler of fork() has run. */
#include <Python.h>
#include <dlfcn.h>
#include <link.h>
#include <rfaas_function.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* Codes of rfaas_fail_code, as in _executor.py and _python.py. */
enum { FAILED_PYTHON = 1, FAILED_START = 2, FAILED_KEPT = 3, FAILED_RAISED = 0x50797468 };

/* Functions of libpython: PY.DecRef is Py_DecRef. */
#define PY_FUNCTIONS(_)                                                                                                                     \
    _(PyOS, AfterFork_Child) _(Py, DecRef) _(Py, DecodeLocale) _(Py, GetVersion) _(Py, InitializeEx) _(PyBuffer, FillInfo) _(PyBytes, FromStringAndSize) _(PyDict, GetItemString) _(PyDict, New)      \
    _(PyDict, SetItemString) _(PyErr, Clear) _(PyErr, Fetch) _(PyErr, NormalizeException) _(PyErr, Occurred) _(PyErr, Print) _(PyErr, Restore) _(PyErr, SetString)        \
    _(PyEval, EvalCode) _(PyEval, GetBuiltins) _(PyEval, SaveThread) _(PyException, SetTraceback) _(PyGC, Collect) _(PyGILState, Ensure) _(PyGILState, Release)            \
    _(PyImport, ImportModule) _(PyList, GetItem) _(PyList, Size) _(PyLong, AsLong) _(PyMemoryView, FromObject) _(PyModule, GetDict) _(PyObject, CallFunctionObjArgs)           \
    _(PyObject, CallMethod) _(PyObject, Str) _(PySys, GetObject) _(PyType, FromSpec) _(PyType, GenericAlloc) _(PyUnicode, AsUTF8AndSize) _(PyUnicode, FromString)
#define PY_DECLARE(group, name) __typeof__(group##_##name) *group##_##name;
static struct {
    PY_FUNCTIONS(PY_DECLARE)
    void (*Py_SetProgramName)(const wchar_t *); /* newer header files do not declare it, but the stable ABI has it */
} PY;

static bool find_functions(void *library) {
#define PY_FIND(group, name)                                                                                                                \
    if (!(PY.group##_##name = (__typeof__(group##_##name) *)dlsym(library, #group "_" #name)))                                               \
        return false;
    PY_FUNCTIONS(PY_FIND)
    return (PY.Py_SetProgramName = (void (*)(const wchar_t *))dlsym(library, "Py_SetProgramName"));
}

/* ---- memory of a call, as a Python buffer ---- */

typedef struct Window {
    PyObject_HEAD
    void *at;
    Py_ssize_t size;
    Py_ssize_t views; /* number of views that Python has */
} Window;

static int Window_get(Window *w, Py_buffer *b, int flags) {
    int status = PY.PyBuffer_FillInfo(b, (PyObject *)w, w->at, w->size, 0, flags);
    w->views += !status;
    return status;
}

static void Window_release(Window *w, Py_buffer *b) {
    (void)b;
    w->views--;
}

static PyType_Slot window_slots[] = { { Py_bf_getbuffer, Window_get }, { Py_bf_releasebuffer, Window_release }, { 0 } };
static PyType_Spec window_spec = { "rfaas.Window", sizeof(Window), 0, Py_TPFLAGS_DEFAULT, window_slots };
static PyTypeObject *window_type;
static Window *request_window, *result_window;
static PyObject *call_function;
static PyObject *functions; /* of rfaas.python: a list */
static PyObject *report;    /* returns the text of an exception of one of them */
static PyObject *none;

static Window *new_window(void) { return (Window *)PY.PyType_GenericAlloc(window_type, 0); }

/* ---- the start ---- */

/* The strings at the beginning of the init call's payload. Each ends with a NUL. The items of lists are separated by newlines. */
typedef struct start_options {
    const char *version;   /* "3.11." */
    const char *libraries; /* paths and names of libpython */
    const char *programs;  /* paths of the interpreter, which determine sys.prefix. A path that begins with : is in the bundle */
    const char *bundled;   /* a name in the bundle, or "" */
    const char *source;    /* hash of the source of _remote.py */
    const char *code_size; /* in decimal */
    const char *code;      /* marshal.dumps of the compiled source */
    const char *options;   /* what start() of _remote.py reads */
    size_t options_size;
} start_options;

static bool parse(start_options *o, const char *at, size_t size) {
    const char **strings[] = { &o->version, &o->libraries, &o->programs, &o->bundled, &o->source, &o->code_size }, *end = at + size;
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        size_t n = strnlen(at, (size_t)(end - at));
        if (at + n == end)
            return false;
        *strings[i] = at;
        at += n + 1;
    }
    size_t code_size = strtoul(o->code_size, NULL, 10);
    if (code_size > (size_t)(end - at))
        return false;
    o->code = at;
    o->options = at + code_size;
    o->options_size = (size_t)(end - o->options);
    return true;
}

/* Copies the next item of a list. Returns false at its end. */
static bool next_item(const char **list, char item[4096]) {
    size_t n = strcspn(*list, "\n");
    if (!**list)
        return false;
    snprintf(item, 4096, "%.*s", (int)n, *list);
    *list += n + ((*list)[n] == '\n');
    return true;
}

/* Takes over the interpreter of the worker's runtime. Reports a failure by rfaas_fail_code and returns false. */
static bool take_python(const start_options *o) {
    const char *(*version)(void) = (const char *(*)(void))dlsym(RTLD_DEFAULT, "Py_GetVersion"), *runtime = getenv("RFAAS_RUNTIME");
    if (!version || strncmp(version(), o->version, strlen(o->version))) {
        rfaas_fail_code(FAILED_PYTHON, "the client runs Python %.*s, and the runtime %s of the executor's node is version %.20s: functions are sent as bytecode, "
                        "which only the same minor version can run", (int)strlen(o->version) - 1, o->version, runtime ? runtime : "", version ? version() : "unknown");
        return false;
    }
    if (!find_functions(RTLD_DEFAULT)) {
        rfaas_fail_code(FAILED_PYTHON, "the runtime %s lacks functions of the stable ABI: %s", runtime ? runtime : "", dlerror());
        return false;
    }
    PY.PyGILState_Ensure();
    PY.PyOS_AfterFork_Child(); /* locks, thread ids, and what modules registered, such as new seeds of `random` */
    return true;
}

/* Lets a loaded library that has started with one thread use as many as the worker has cores. */
static int set_threads(struct dl_phdr_info *info, size_t size, void *cores) {
    (void)size;
    static const char *const names[] = { "openblas_set_num_threads", "openblas_set_num_threads64_", "scipy_openblas_set_num_threads64_", "omp_set_num_threads" };
    if (!strstr(info->dlpi_name, "openblas") && !strstr(info->dlpi_name, "libgomp") && !strstr(info->dlpi_name, "libblas"))
        return 0;
    void *library = dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
    for (size_t i = 0; library && i < sizeof names / sizeof *names; i++) {
        void (*set)(int) = (void (*)(int))dlsym(library, names[i]);
        if (set)
            set(*(int *)cores);
    }
    return 0;
}

/* Opens the libpython of the client's version. Makes its symbols global, because in most distributions extension modules are not linked with it.
 * Reports a failure by rfaas_fail_code and returns false. */
static bool open_python(const start_options *o) {
    char item[4096];
    void *library = NULL;
    for (const char *list = o->libraries; !library && next_item(&list, item);)
        library = dlopen(item, RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        rfaas_fail_code(FAILED_PYTHON, "the client runs Python %.*s, and the worker finds no libpython of this version: install it on the executor's node (Debian: "
                        "libpython%.*s), or name its directory in sandbox-paths: %s", (int)strlen(o->version) - 1, o->version, (int)strlen(o->version) - 1,
                        o->version, dlerror());
        return false;
    }
    const char *(*version)(void) = (const char *(*)(void))dlsym(library, "Py_GetVersion");
    if (!version || strncmp(version(), o->version, strlen(o->version))) {
        rfaas_fail_code(FAILED_PYTHON, "the client runs Python %.*s, and %s on the executor's node is version %.20s: functions are sent as bytecode, which only "
                        "the same minor version can run", (int)strlen(o->version) - 1, o->version, item, version ? version() : "unknown");
        return false;
    }
    if (!find_functions(library)) {
        rfaas_fail_code(FAILED_PYTHON, "%s lacks functions of the stable ABI: %s", item, dlerror());
        return false;
    }
    return true;
}

static void set_program(const start_options *o) {
    char item[4096], path[4096 + 256];
    for (const char *list = o->programs; next_item(&list, item);) {
        const char *in_bundle = *item == ':' ? strchr(item, '/') : NULL;
        snprintf(path, sizeof path, "%s", item);
        if (in_bundle) {
            item[in_bundle - item] = 0;
            const char *at = rfaas_bundle_path(item + 1);
            snprintf(path, sizeof path, "%s/%s", at ? at : "", in_bundle + 1);
        }
        if (access(path, X_OK))
            continue;
        wchar_t *wide = PY.Py_DecodeLocale(path, NULL); /* Python keeps it */
        if (wide)
            PY.Py_SetProgramName(wide);
        return;
    }
}

static void set_environment(bool running) {
    char cores[16];
    snprintf(cores, sizeof cores, "%u", rfaas_worker_cores());
    setenv("PYTHONDONTWRITEBYTECODE", "1", 1);
    setenv("PYTHONNOUSERSITE", "1", 1);
    unsetenv("PYTHONHASHSEED");
    /* A library that starts a thread for each processor of the node spins for ever if the worker is not allowed to start that many. */
    setenv("OPENBLAS_NUM_THREADS", cores, running); /* a runtime has started with 1 */
    setenv("OMP_NUM_THREADS", cores, running);
    setenv("USER", "rfaas", 0); /* a worker's user id may have no name */
}

/* Ends a call with the text of the Python exception. Also prints the exception with its traceback. */
static uint32_t raised(int code, const char *what) {
    PyObject *type = NULL, *value = NULL, *trace = NULL;
    PY.PyErr_Fetch(&type, &value, &trace);
    PY.PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = value ? PY.PyObject_Str(value) : NULL;
    const char *utf8 = text ? PY.PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    rfaas_fail_code(code, "%s: %s", what, utf8 ? utf8 : "an exception without text");
    PY.PyErr_Restore(type, value, trace);
    PY.PyErr_Print();
    if (text)
        PY.Py_DecRef(text);
    return 0;
}

/* Returns the namespace of _remote.py if the runtime has executed the same source as the client's (worker/runtime.c), otherwise NULL. The worker shares
 * the memory of that namespace with the runtime. */
static PyObject *find_remote(const start_options *o) {
    PyObject *modules = PY.PySys_GetObject("modules"), *module = modules ? PY.PyDict_GetItemString(modules, "rfaas_remote") : NULL;
    PyObject *globals = module ? PY.PyModule_GetDict(module) : NULL, *hash = globals ? PY.PyDict_GetItemString(globals, "SOURCE_HASH") : NULL;
    const char *text = hash ? PY.PyUnicode_AsUTF8AndSize(hash, NULL) : NULL;
    return text && !strcmp(text, o->source) ? globals : NULL;
}

/* Executes the code of _remote.py that the client has sent. Returns its namespace, or NULL with an exception. */
static PyObject *run_remote(const start_options *o) {
    PyObject *marshal = PY.PyImport_ImportModule("marshal"), *bytes = PY.PyBytes_FromStringAndSize(o->code, o->options - o->code);
    PyObject *code = marshal && bytes ? PY.PyObject_CallMethod(marshal, "loads", "O", bytes) : NULL;
    PyObject *globals = PY.PyDict_New(), *name = PY.PyUnicode_FromString("rfaas_remote");
    if (bytes)
        PY.Py_DecRef(bytes);
    if (!code || !globals || !name || PY.PyDict_SetItemString(globals, "__builtins__", PY.PyEval_GetBuiltins()) ||
        PY.PyDict_SetItemString(globals, "__name__", name) || !PY.PyEval_EvalCode(code, globals, globals))
        return NULL;
    return globals;
}

/* Calls start() of _remote.py, whose result is the list of functions of rfaas.python. cores: their number in a worker with a runtime, else "". Returns the
 * function that executes requests of rfaas.Executor, or NULL with an exception. */
static PyObject *start_remote(const start_options *o, bool running, const char *cores_text) {
    PyObject *globals = running ? find_remote(o) : NULL;
    if (!globals && !(globals = run_remote(o)))
        return NULL;
    const char *at = *o->bundled ? rfaas_bundle_path(o->bundled) : NULL;
    request_window->at = (void *)o->options, request_window->size = (Py_ssize_t)o->options_size;
    PyObject *options = PY.PyMemoryView_FromObject((PyObject *)request_window); /* a copy would stay in the heap of each worker */
    PyObject *bundle = PY.PyUnicode_FromString(at ? at : ""), *cores = PY.PyUnicode_FromString(cores_text), *start = PY.PyDict_GetItemString(globals, "start");
    if (options && bundle && cores && start)
        functions = PY.PyObject_CallFunctionObjArgs(start, options, bundle, cores, NULL); /* references are kept until the worker ends */
    if (options)
        PY.Py_DecRef(options);
    none = PY.PyDict_GetItemString(globals, "NONE");
    report = PY.PyDict_GetItemString(globals, "report");
    return functions ? PY.PyDict_GetItemString(globals, "call") : NULL;
}

/* The init call. */
EXPORT uint32_t start(void *args, uint32_t size, void *res) {
    (void)res;
    start_options o;
    if (!parse(&o, args, size))
        return rfaas_fail_code(FAILED_START, "the init call's payload of %u bytes is malformed", size);
    int (*is_running)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    bool running = is_running && is_running();
    set_environment(running);
    if (!(running ? take_python(&o) : open_python(&o)))
        return 0;
    if (running) {
        int cores = (int)rfaas_worker_cores();
        if (cores > 1)
            dl_iterate_phdr(set_threads, &cores);
    } else {
        set_program(&o);
        PY.Py_InitializeEx(0); /* without signal handlers. If there is no standard library, it prints why and ends the worker */
    }
    window_type = (PyTypeObject *)PY.PyType_FromSpec(&window_spec);
    if (!window_type || !(request_window = new_window()) || !(result_window = new_window()) || !(call_function = start_remote(&o, running, running ? getenv("OMP_NUM_THREADS") : "")))
        raised(FAILED_START, "start Python");
    PY.PyEval_SaveThread(); /* threads that functions start run on between calls */
    return 0;
}

/* ---- calls ---- */

/* Returns whether Python still has views of the window after the call. If so, replaces the window. */
static bool is_kept(Window **w) {
    if (!(*w)->views)
        return false;
    PY.PyGC_Collect(); /* an exception that is part of a cycle keeps the variables of its functions */
    if (!(*w)->views)
        return false;
    Window *next = new_window();
    if (next)
        *w = next;
    return true;
}

/* Ends a call for whose memory Python still has views by an error. */
static void check_kept(void) {
    bool request_kept = is_kept(&request_window), result_kept = is_kept(&result_window);
    if (request_kept || result_kept)
        rfaas_fail_code(FAILED_KEPT, "the function keeps an argument, such as an array, whose memory the next call overwrites: let it keep a copy");
}

static PyGILState_STATE enter(void *args, uint32_t size, void *res) {
    PyGILState_STATE state = PY.PyGILState_Ensure();
    request_window->at = args, request_window->size = size;
    result_window->at = res, result_window->size = rfaas_result_capacity();
    return state;
}

/* Executes a request of rfaas.Executor: _remote.py reads it from `args`, and writes the reply to `res`. */
EXPORT uint32_t call(void *args, uint32_t size, void *res) {
    if (!call_function)
        return rfaas_fail_code(FAILED_START, "Python has not started in this worker");
    PyGILState_STATE state = enter(args, size, res);
    PyObject *n = PY.PyObject_CallFunctionObjArgs(call_function, (PyObject *)request_window, (PyObject *)result_window, NULL);
    long length = n ? PY.PyLong_AsLong(n) : 0;
    if (n)
        PY.Py_DecRef(n);
    else
        raised(FAILED_START, "rfaas.Executor in the worker");
    check_kept();
    PY.PyGILState_Release(state);
    return (uint32_t)length;
}

/* ---- functions of rfaas.python ---- */

/* Ends a call of a function of rfaas.python with the exception that is set. */
static void fail_raised(void) {
    PyObject *type = NULL, *value = NULL, *trace = NULL;
    PY.PyErr_Fetch(&type, &value, &trace);
    PY.PyErr_NormalizeException(&type, &value, &trace);
    if (trace)
        PY.PyException_SetTraceback(value, trace);
    PyObject *text = PY.PyObject_CallFunctionObjArgs(report, value, NULL);
    const char *utf8 = text ? PY.PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    rfaas_fail_code(FAILED_RAISED, "%s", utf8 ? utf8 : "an exception without text");
    PY.PyErr_Clear();
    PyObject *const all[] = { text, type, value, trace };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i])
            PY.Py_DecRef(all[i]);
}

/* The size of the result that a function returns as a number, or as None: all of its buffer. -1: with an exception. */
static long size_of(PyObject *value) {
    if (value == none)
        return result_window->size;
    long size = PY.PyLong_AsLong(value);
    if (PY.PyErr_Occurred() || (size >= 0 && size <= UINT32_MAX))
        return size;
    PY.PyErr_SetString(PY.PyDict_GetItemString(PY.PyEval_GetBuiltins(), "ValueError"), "the function must return the size of its result, from 0 to 4294967295");
    return -1;
}

static uint32_t execute(Py_ssize_t index, void *args, uint32_t size, void *res) {
    if (!call_function)
        return rfaas_fail_code(FAILED_START, "Python has not started in this worker");
    PyGILState_STATE state = enter(args, size, res);
    long length = 0;
    if (index < PY.PyList_Size(functions)) {
        PyObject *request = PY.PyMemoryView_FromObject((PyObject *)request_window), *result = PY.PyMemoryView_FromObject((PyObject *)result_window);
        PyObject *value = request && result ? PY.PyObject_CallFunctionObjArgs(PY.PyList_GetItem(functions, index), request, result, NULL) : NULL;
        if (!value || (length = size_of(value)) < 0)
            fail_raised();
        PyObject *const all[] = { value, request, result };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            if (all[i])
                PY.Py_DecRef(all[i]);
        check_kept();
    } else {
        rfaas_fail_code(FAILED_START, "rfaas.python has fewer than %zd functions", index + 1);
    }
    PY.PyGILState_Release(state);
    return (uint32_t)length;
}

/* python_00 to python_77 in octal, FUNCTIONS_MAX of _python.py. */
#define PYTHON_1(n) EXPORT uint32_t python_##n(void *args, uint32_t size, void *res) { return execute(0##n, args, size, res); }
#define PYTHON_8(n) PYTHON_1(n##0) PYTHON_1(n##1) PYTHON_1(n##2) PYTHON_1(n##3) PYTHON_1(n##4) PYTHON_1(n##5) PYTHON_1(n##6) PYTHON_1(n##7)
PYTHON_8(0) PYTHON_8(1) PYTHON_8(2) PYTHON_8(3) PYTHON_8(4) PYTHON_8(5) PYTHON_8(6) PYTHON_8(7)
