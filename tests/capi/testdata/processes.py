"""Calls from several processes of Python, through ctypes. Arguments: librfaas.so, the library of functions, the start method of
multiprocessing, the number of processes. Exit status 0: all calls were right."""
import ctypes
import multiprocessing
import sys

P, U32, I32, U64, I64, STR = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_char_p


class LeaseOptions(ctypes.Structure):
    """rfaas_lease_options of rfaas.h"""

    _fields_ = [("struct_size", U32), ("workers", U32), ("cores_per_worker", U32), ("depth", U32), ("eager", U32), ("wait_mode", U32),
                ("bulk", U64), ("memory", U64), ("duration_ns", I64), ("library", STR), ("library_data", P), ("library_size", ctypes.c_size_t),
                ("executor", STR), ("call_limit_ns", I64), ("flags", U32), ("reserved", U32)]


def checked(rfaas, status):
    if status:
        rfaas.rfaas_last_error.restype = STR
        raise RuntimeError("%d: %s" % (status, rfaas.rfaas_last_error().decode()))


def calls(library, functions, number):
    """Opens a session and a lease of its own, calls echo, and returns how many results were right."""
    rfaas = ctypes.CDLL(library)
    session, lease, echo = P(), P(), U32()
    options = LeaseOptions(struct_size=ctypes.sizeof(LeaseOptions), library=functions.encode())
    checked(rfaas, rfaas.rfaas_init(None))
    checked(rfaas, rfaas.rfaas_session_open(None, ctypes.byref(session)))
    checked(rfaas, rfaas.rfaas_lease_open(session, ctypes.byref(options), ctypes.byref(lease)))
    checked(rfaas, rfaas.rfaas_lease_function(lease, b"echo", ctypes.byref(echo)))
    right = 0
    for i in range(200):
        sent, got, size = b"%d of process %d" % (i, number), ctypes.create_string_buffer(64), ctypes.c_size_t()
        checked(rfaas, rfaas.rfaas_invoke(lease, echo, sent, ctypes.c_size_t(len(sent)), got, ctypes.c_size_t(64), ctypes.byref(size), None))
        right += got.raw[:size.value] == sent
    checked(rfaas, rfaas.rfaas_lease_release(lease))
    checked(rfaas, rfaas.rfaas_session_close(session))
    checked(rfaas, rfaas.rfaas_finalize())
    return right


def main():
    library, functions, method, processes = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    right = [calls(library, functions, -1)]  # so that forked processes inherit a library that was used
    with multiprocessing.get_context(method).Pool(processes) as pool:
        right += pool.starmap(calls, [(library, functions, i) for i in range(2 * processes)], chunksize=1)
    print(right)
    return 0 if right == [200] * (1 + 2 * processes) else 1


if __name__ == "__main__":
    sys.exit(main())
