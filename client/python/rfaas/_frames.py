"""The bytes of requests and replies between rfaas.Executor and its workers.

A request is REQUEST, the lengths of its buffers, a pickled function or nothing, the pickled arguments, and the buffers. A reply is REPLY, the
lengths of its buffers, a pickled value, what was printed, and the buffers. Each buffer begins at a multiple of 64. This file and _remote.py
also run in the workers, where the package rfaas is missing.
"""
import struct

REQUEST = struct.Struct("<16sIIQQ")  # digest of the function, operation, number of buffers, bytes of the function and of the arguments
CALL, CHUNK, STARRED, FETCH, PING = range(5)  # operations. STARRED: a chunk of tuples of arguments. FETCH: asks for the reply that had no room

REPLY = struct.Struct("<IIQQ")  # outcome, number of buffers, bytes of the value and of what was printed
# Outcomes. PART: the results of a chunk up to an exception. UNKNOWN: the worker does not have the function. MORE: the reply has no room, and the value
# is its size.
VALUE, RAISED, PART, UNKNOWN, MORE = range(5)

PAD = bytes(63)


def lengths(buffers):
    """Returns the lengths of buffers in the form that follows a header."""
    return struct.pack(f"<{len(buffers)}Q", *map(len, buffers))


def padded(at, buffers):
    """Returns pads and buffers, one after the other. The first pad begins at `at`."""
    pieces = []
    for b in buffers:
        pad = -at % 64
        pieces += PAD[:pad], b
        at += pad + len(b)
    return pieces


def split(message, at, count, *sizes):
    """Returns the parts of a message: one part of each of `sizes`, then a list of `count` buffers, whose lengths begin at `at`. Raises ValueError if
    they exceed the message."""
    ends = struct.unpack_from(f"<{count}Q", message, at)
    at += 8 * count
    parts = []
    for size in sizes:
        parts.append(message[at:at + size])
        at += size
    buffers = []
    for size in ends:
        at += -at % 64
        buffers.append(message[at:at + size])
        at += size
    if at > len(message):
        raise ValueError(f"a message has {len(message)} bytes, but its header says {at}")
    return (*parts, buffers)
