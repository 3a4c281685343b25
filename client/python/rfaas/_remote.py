"""The worker's side of rfaas.Executor and rfaas.python. worker.c runs this file in the interpreter of a worker, after _frames.py, in the same namespace. A runtime
has executed the same text before (worker/runtime.c)."""
import functools
import importlib.abc
import importlib.machinery
import itertools
import marshal
import pickle
import sys

functions = {}  # by digest: a function, and the values of global variables that came with it and with functions that it uses
FUNCTIONS_MAX = 1024
kept = []  # the pieces of a reply that had no room
OUTPUT_MAX = 1 << 20  # characters of a call that go to the client

MPI_TEXT = "mpi4py cannot be imported in a worker of rfaas, which is not part of an MPI program: use it in the program that calls the function"
MISSING_TEXT = "; the worker's Python does not have this module: pass modules=[{!r}] to rfaas.Executor or rfaas.python, or install the module on the executors' nodes"


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the client's cloudpickle, and refuses mpi4py, whose MPI_Init would end the worker."""

    def __init__(self, sent):
        self.sent = sent  # names to marshalled code

    def find_spec(self, name, path=None, target=None):
        if name in self.sent:
            return importlib.machinery.ModuleSpec(name, self, is_package=name == "cloudpickle")
        if name.partition(".")[0] == "mpi4py":
            raise ImportError(MPI_TEXT, name=name)
        return None

    def exec_module(self, module):
        exec(marshal.loads(self.sent[module.__name__]), module.__dict__)
        adapt([module])


def adapt(modules):
    """Changes what modules of cloudpickle do with global variables."""
    for name, change in ("_make_function", with_shared_globals), ("_function_setstate", without_overwriting):
        for module in modules:
            f = getattr(module, name, None)
            if getattr(f, "__module__", None) == module.__name__:  # it is defined there. Other modules may have imported it
                changed = change(getattr(f, "__wrapped__", f))  # a runtime with other code may have changed it
                for other in modules:
                    if getattr(other, name, None) is f:
                        setattr(other, name, changed)


adapted = False  # whether a runtime has changed its cloudpickle


def adapt_own():
    """Changes the cloudpickle of a runtime, which calls this before there are workers."""
    global adapted
    adapted = True
    adapt([module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "cloudpickle"])


def use_cloudpickle(sent, version):
    """Prepares the client's cloudpickle, or uses that of the runtime if it has the same version."""
    own = sys.modules.get("cloudpickle")
    if own and getattr(own, "__version__", None) == version:
        if not adapted:
            adapt_own()
        sent = {}
    else:
        sent = marshal.loads(sent)
        for name in [name for name in sys.modules if name.partition(".")[0] == "cloudpickle"] if own else ():
            del sys.modules[name]
    sys.meta_path.insert(0, Finder(sent))


# Functions that are sent by value bring the global variables of their module. cloudpickle would give each function its own dictionary of them. Here,
# the functions of one module share a dictionary, so that one finds what another, such as the initializer, has stored there.
shared = {}  # name of a module: its dictionary
loaded = {}  # id of such a dictionary: the values that came with functions
arrived = []  # such dictionaries, and the values that have just come for them
latest = [None]  # the digest of the function whose values the dictionaries have


def with_shared_globals(make_function):
    @functools.wraps(make_function)  # so that it is pickled by name
    def make(code, variables, *rest):
        own = shared.setdefault(variables.get("__name__"), variables)
        loaded.setdefault(id(own), {})
        return make_function(code, own, *rest)

    return make


def without_overwriting(set_state):
    @functools.wraps(set_state)
    def set_function_state(f, state):
        if id(f.__globals__) in loaded:
            arrived.append((f.__globals__, state[1]["__globals__"]))
            state[1]["__globals__"] = {}
            assign(*arrived[-1])
        return set_state(f, state)

    return set_function_state


def assign(own, values):
    """Sets the global variables that the worker has not assigned itself."""
    came = loaded[id(own)]
    for name, value in values.items():
        if name not in own or own[name] is came.get(name, own):
            own[name] = came[name] = value


class Output:
    """Replaces sys.stdout or sys.stderr. Keeps what a call prints for the client, and also writes it to the worker's log."""

    def __init__(self, log):
        self.log, self.texts, self.size = log, [], 0

    def write(self, text):
        self.log.write(text)
        self.size += len(text)
        if self.size <= OUTPUT_MAX:
            self.texts.append(text)
        return len(text)

    def take(self):
        text = "".join(self.texts)
        if self.size > OUTPUT_MAX:
            text += f"\n[rfaas: {self.size - len(text)} more characters were left out]\n"
        self.texts, self.size = [], 0
        return text

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def __getattr__(self, name):
        return getattr(self.log, name)


def take_output():
    if not (sys.__stdout__.size or sys.__stderr__.size):
        return b""
    return pickle.dumps((sys.__stdout__.take(), sys.__stderr__.take()))


def dumps(value, callback=None):
    """Pickles a value. Uses cloudpickle for classes and functions that the client has sent by value."""
    try:
        return pickle.dumps(value, 5, buffer_callback=callback)
    except (pickle.PicklingError, AttributeError, TypeError):
        try:
            import cloudpickle
        except ImportError:
            cloudpickle = None
        if cloudpickle is None:
            raise
        return cloudpickle.dumps(value, 5, buffer_callback=callback)


def explain_missing(e):
    if isinstance(e, ModuleNotFoundError) and e.name and isinstance(e.msg, str) and e.name in e.msg:
        e.msg += MISSING_TEXT.format(e.name.partition(".")[0])
        e.args = (e.msg,)


def describe(e):
    """Returns the pickled exception and the text of its traceback."""
    import traceback

    trace = e.__traceback__
    while trace and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    explain_missing(e)
    text = "".join(traceback.format_exception(type(e), e, trace))
    e = e.with_traceback(None)
    e.__cause__ = e.__context__ = None  # their tracebacks would keep the function's variables
    try:
        pickled = dumps(e)
        if not isinstance(pickle.loads(pickled), BaseException):
            raise TypeError
    except Exception:
        pickled = dumps(RuntimeError(f"{type(e).__module__}.{type(e).__qualname__}: {e}; the exception cannot be pickled"))
    return pickled, text


def put(room, outcome, value, buffers=(), borrowed=False):
    """Writes a reply. If it has no room, keeps it and replies MORE. Returns the bytes written. borrowed: the buffers may lie in the request."""
    output = take_output()
    head = REPLY.pack(outcome, len(buffers), len(value), len(output))
    pieces = [head, lengths(buffers), value, output] if buffers else [head, value, output]
    pieces += padded(sum(map(len, pieces)), buffers)
    size = sum(map(len, pieces))
    if size > len(room):
        kept[:] = map(bytes, pieces) if borrowed else pieces
        size = str(size).encode()
        pieces = [REPLY.pack(MORE, 0, len(size), 0), size]
    return write(room, pieces)


def write(room, pieces):
    at = 0
    for piece in pieces:
        n = len(piece)
        room[at:at + n] = piece
        at += n
    return at


def function_of(digest, code):
    f, values = functions.get(digest, (None, ()))
    if f is None:
        if not len(code):
            return None
        if len(functions) >= FUNCTIONS_MAX:
            del functions[next(iter(functions))]
        arrived.clear()
        f = pickle.loads(code)
        functions[digest] = f, arrived[:]
    elif digest != latest[0] or arrived:  # other functions, which may have come with other values, were executed meanwhile
        for own, new in values:
            assign(own, new)
    arrived.clear()
    latest[0] = digest
    return f


def chunk(f, results_of, room, borrowed):
    """Replies with all results of an iterator, or with those before its exception."""
    results = []
    try:
        try:
            results.extend(results_of)
        except BaseException as e:
            raised = describe(e)
            del e
            return put(room, PART, dumps((results, *raised)))
        return finish(f, results, room, borrowed)
    finally:
        results_of = room = None  # as in call


def finish(f, value, room, borrowed):
    buffers = []
    try:
        pickled = dumps(value, lambda b: buffers.append(b.raw()))
    except Exception as e:
        name = getattr(f, "__qualname__", repr(f))
        return put(room, RAISED, dumps(describe(pickle.PicklingError(f"{name} returned a value that cannot be pickled: {type(e).__name__}: {e}"))))
    return put(room, VALUE, pickled, buffers, borrowed)


def call(request, room):
    """Executes a request. Returns the size of the reply."""
    request, room = memoryview(request), memoryview(room)
    code = arguments = buffers = positional = named = None
    digest, operation, count, code_size, size = REQUEST.unpack_from(request)
    if operation == FETCH:
        pieces = kept[:]
        kept.clear()
        return write(room, pieces)
    if operation == PING:
        return put(room, VALUE, b"N.")
    try:
        if count:
            code, arguments, buffers = split(request, REQUEST.size, count, code_size, size)
        else:
            code, arguments, buffers = request[40:40 + code_size], request[40 + code_size:], ()
        f = function_of(digest, code)
        if f is None:
            return put(room, UNKNOWN, b"")
        positional, named = pickle.loads(arguments, buffers=buffers)
        if operation != CALL:
            return chunk(f, map(f, *positional) if operation == CHUNK else itertools.starmap(f, positional), room, count > 0)
        value = f(*positional, **named)
        if count or type(value) not in PLAIN:
            return finish(f, value, room, count > 0)
        value = pickle.dumps(value, 5)
        if sys.__stdout__.size or sys.__stderr__.size or len(value) > len(room) - 24:
            return put(room, VALUE, value)
        n = 24 + len(value)
        room[:n] = REPLY.pack(VALUE, 0, len(value), 0) + value
        return n
    except BaseException as e:
        raised = describe(e)
        del e
        return put(room, RAISED, dumps(raised))
    finally:  # if the function keeps an exception, that keeps this frame
        request = room = code = arguments = buffers = positional = named = None


PLAIN = {type(None), bool, int, float, complex, str, bytes}


def continue_runtime(environ, cores):
    """Gives the worker of a runtime what differs from the process in which the interpreter started, which had one thread."""
    environ["OPENBLAS_NUM_THREADS"] = environ["OMP_NUM_THREADS"] = cores
    environ.setdefault("USER", "rfaas")
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def use_bundle(os, path):
    """Lets the worker import what is in the bundle, of which `path` is the first entry."""
    directory = os.path.dirname(path)
    sys.path.insert(0, directory)
    if os.environ.get("RFAAS_RUNTIME"):
        import site

        for name in os.listdir(directory):
            packages = os.path.join(directory, name, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
            if os.path.isfile(os.path.join(directory, name, "pyvenv.cfg")):
                before = len(sys.path)
                site.addsitedir(packages)
                sys.path[:] = sys.path[before:] + sys.path[:before]
                sys.prefix = sys.exec_prefix = os.path.join(directory, name)


NONE = None  # for worker.c


def report(e):
    """Prints an exception of a function of rfaas.python. Returns its text for the client."""
    import traceback

    explain_missing(e)
    traceback.print_exception(type(e), e, e.__traceback__)
    where = traceback.extract_tb(e.__traceback__)[-1:]
    place = f"line {where[0].lineno} of {where[0].filename}, in {where[0].name}, " if where else "the function "
    name = type(e).__qualname__ if type(e).__module__ == "builtins" else f"{type(e).__module__}.{type(e).__qualname__}"
    return f"{place}raised {name}: {e}"


def start(message, bundle, cores):
    """Prepares the interpreter and executes the initializer. Returns the functions of rfaas.python. message: the size of the options, the options, and the
    code of cloudpickle. bundle: the path of its first entry, or "". cores: their number in a worker of a runtime, or ""."""
    sys.argv = [""]
    size = 8 + int.from_bytes(message[:8], "little")
    options = marshal.loads(message[8:size])
    use_cloudpickle(message[size:], options["version"])
    message = None  # its memory belongs to the init call
    import os

    if cores:
        continue_runtime(os.environ, cores)
    if bundle:
        use_bundle(os, bundle)
    functions = options["functions"]
    if not functions:
        sys.stdout = sys.__stdout__ = Output(sys.stdout)
        sys.stderr = sys.__stderr__ = Output(sys.stderr)
    try:
        if options["initializer"]:
            initializer, arguments = pickle.loads(options["initializer"])
            initializer(*arguments)
            if not functions:
                take_output()
        return [pickle.loads(code) for code in functions]
    except ModuleNotFoundError as e:
        explain_missing(e)
        raise
