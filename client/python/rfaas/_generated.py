# generated from client/api/rfaas.yaml by internal/apigen (make api): do not edit.
"""Exceptions, constants and structures of the rfaas API."""
import builtins as _builtins
import enum as _enum
import os as _os
from dataclasses import dataclass as _dataclass
from typing import TypedDict as _TypedDict


class Error(RuntimeError):
    """An operation of rfaas has failed. The text names the operation, the offending value and the reason.

    status: the status of the C API, such as -402.
    started: whether the function may have run. If it is False, repeating the call is safe.
    code: the code that the function passed to rfaas_fail_code, else 0.
    """

    def __init__(self, text: str, status: int = -700, started: bool = True, code: int = 0) -> None:
        super().__init__(text)
        self.text, self.status, self.started, self.code = text, status, started, code

    def __str__(self) -> str:
        return self.text

    def __reduce__(self):
        return type(self), (self.text, self.status, self.started, self.code)


class BusyError(Error):
    """Class BUSY: retry."""


class InvalidError(Error, ValueError):
    """Class INVALID: fix the call."""


class UnsupportedError(Error, NotImplementedError):
    """Class UNSUPPORTED: take another path."""


class FunctionError(Error):
    """Class FUNCTION: this call failed, the lease is good."""


class ConnectionError(Error, _builtins.ConnectionError):
    """Class CONNECTION: the worker is lost, the next call gets a new one."""


class LeaseError(Error):
    """Class LEASE: open a new lease."""


class FatalError(Error):
    """Class FATAL: stop."""


class CredentialError(Error, PermissionError):
    """Class CREDENTIAL: get another token or set the clock, then repeat the call."""


class TooLargeError(InvalidError):
    """RFAAS_TOO_LARGE: the payload or capacity exceeds the lease's limits."""


class NoFunctionError(InvalidError, KeyError):
    """RFAAS_NO_FUNCTION: the library has no function of this name."""


class BadBlobError(InvalidError):
    """RFAAS_BAD_BLOB: the peer sent a malformed queue pair address."""


class BadLibraryError(InvalidError):
    """RFAAS_BAD_LIBRARY: the library cannot be read or loaded; the error text says why."""


class BadRequestError(InvalidError):
    """RFAAS_BAD_REQUEST: the worker refused a malformed request."""


class WrongThreadError(InvalidError):
    """RFAAS_WRONG_THREAD: two threads used an object that only one thread may use."""


class NoDeviceError(UnsupportedError):
    """RFAAS_NO_DEVICE: no such RDMA device, port or GID."""


class ResultTooLargeError(FunctionError):
    """RFAAS_RESULT_TOO_LARGE: the result exceeds the capacity that the caller gave."""


class DeadlineError(FunctionError, TimeoutError):
    """RFAAS_DEADLINE: the deadline passed; the function may still be running."""


class CancelledError(FunctionError):
    """RFAAS_CANCELLED: the caller cancelled the call with rfaas_cancel."""


class PeerGoneError(ConnectionError):
    """RFAAS_PEER_GONE: the other process or node ended, or cannot be reached."""


class WorkerDiedError(ConnectionError):
    """RFAAS_WORKER_DIED: the worker died; the error text says how. The next call gets a new worker."""


class ProtocolError(ConnectionError):
    """RFAAS_PROTOCOL: the peer broke the protocol or speaks another version."""


class TimeLimitError(ConnectionError, TimeoutError):
    """RFAAS_TIME_LIMIT: the function exceeded the lease's call_limit_ns and its worker was killed."""


class MemoryLimitError(ConnectionError, MemoryError):
    """RFAAS_MEMORY_LIMIT: the function exceeded the lease's memory and its worker was killed."""


_BY_CLASS = {
    1: BusyError,
    2: InvalidError,
    3: UnsupportedError,
    4: FunctionError,
    5: ConnectionError,
    6: LeaseError,
    7: FatalError,
    8: CredentialError,
}
_BY_STATUS = {
    -201: TooLargeError,
    -202: NoFunctionError,
    -203: BadBlobError,
    -204: BadLibraryError,
    -205: BadRequestError,
    -206: WrongThreadError,
    -301: NoDeviceError,
    -401: ResultTooLargeError,
    -402: DeadlineError,
    -403: CancelledError,
    -501: PeerGoneError,
    -502: WorkerDiedError,
    -503: ProtocolError,
    -504: TimeLimitError,
    -505: MemoryLimitError,
}


def error(status: int, text: str, started: bool, code: int) -> Error:
    """Returns the exception for a status."""
    return (_BY_STATUS.get(status) or _BY_CLASS.get(-status // 100, Error))(text, status, started, code)


class DataEncryption(_enum.IntEnum):
    """RFAAS_* constants of the type data_encryption."""

    OFF = 1
    ON = 2
    REQUIRE = 3


class ExecutorState(_enum.IntEnum):
    """RFAAS_* constants of the type executor_state."""

    OPEN = 1
    DRAINING = 2
    SILENT = 3
    LEFT = 4


class WaitMode(_enum.IntEnum):
    """How both sides wait for messages."""

    ADAPTIVE = 0
    HOT = 1
    WARM = 2


class EventKind(_enum.IntEnum):
    """RFAAS_* constants of the type event_kind."""

    NONE = 0
    WORKER_DIED = 1
    ENDED = 2
    DRAINING = 3
    EXPIRING = 4
    MOVED = 5
    LOCAL = 6
    WORKER_ADDED = 7


class Start(_enum.IntEnum):
    """RFAAS_* constants of the type start."""

    UNKNOWN = 0
    COLD = 1
    POOLED = 2
    CACHED = 3
    SEEDED = 4


class Operation(_enum.IntEnum):
    """RFAAS_* constants of the type operation."""

    SUM = 1
    MIN = 2
    MAX = 3


class Element(_enum.IntEnum):
    """RFAAS_* constants of the type element."""

    INT32 = 1
    INT64 = 2
    FLOAT32 = 3
    FLOAT64 = 4


class SessionOptions(_TypedDict, total=False):
    """The fields of rfaas_session_options (rfaas.h). Times are in seconds."""

    port: int
    manager: str | _os.PathLike[str]
    executor: str | _os.PathLike[str]
    provider: str | _os.PathLike[str]
    tenant: str | _os.PathLike[str]
    device: str | _os.PathLike[str]
    gid_index: int
    pkey_index: int
    traffic_class: int
    service_level: int
    mtu: int
    timeout: float
    cached_leases: int
    data_encryption: int
    secret_file: str | _os.PathLike[str]
    token_file: str | _os.PathLike[str]
    allow_plaintext: bool
    local: bool


@_dataclass(frozen=True)
class Change:
    """rfaas_change (rfaas.h). Times are in seconds."""

    state: int
    executor: str
    node: str


class LeaseOptions(_TypedDict, total=False):
    """The fields of rfaas_lease_options (rfaas.h). Times are in seconds."""

    workers: int
    cores_per_worker: int
    depth: int
    eager: int
    wait_mode: int
    bulk: int
    memory: int
    duration: float
    library: str | _os.PathLike[str]
    library_data: bytes | bytearray | memoryview
    executor: str | _os.PathLike[str]
    call_limit: float
    wait: float
    bundle: str | _os.PathLike[str]
    init_function: str | _os.PathLike[str]
    init_payload: bytes | bytearray | memoryview
    workers_min: int
    bulk_max: int
    seed: bool | str | _os.PathLike[str]
    runtime: str | _os.PathLike[str]
    renew: bool
    failover: bool
    local: bool
    reuse: bool
    seed_required: bool


@_dataclass(frozen=True)
class Event:
    """rfaas_event (rfaas.h). Times are in seconds."""

    kind: int
    worker: int
    lost: int
    left: float
    text: str


@_dataclass(frozen=True)
class LeaseDetails:
    """rfaas_lease_details (rfaas.h). Times are in seconds."""

    workers: int
    depth: int
    eager: int
    bulk: int
    lease_id: int
    functions: int
    replaced: int
    node: str
    executor: str
    provider: str
    node_name: str
    executor_address: str
    left: float
    local_reason: str
    workers_wanted: int


@_dataclass(frozen=True)
class WorkerStart:
    """rfaas_worker_start (rfaas.h). Times are in seconds."""

    start: int
    pid: int
    fork: float
    sandbox: float
    connect: float
    code: float
    unseeded: str


@_dataclass(frozen=True)
class WorkerDetails:
    """rfaas_worker_details (rfaas.h). Times are in seconds."""

    pid: int
    calls: int
    failed: int
    refused: int
    bytes_in: int
    bytes_out: int
    running: str
    output_size: int
    output: str


class CallOptions(_TypedDict, total=False):
    """The fields of rfaas_call_options (rfaas.h). Times are in seconds."""

    worker: int
    timeout: float
    repeats: int
    attempt: float
    keep: int
    kill: bool
    in_place: bool


class SeedOptions(_TypedDict, total=False):
    """The fields of rfaas_seed_options (rfaas.h). Times are in seconds."""

    name: str | _os.PathLike[str]
    ttl: float


@_dataclass(frozen=True)
class SeedDetails:
    """rfaas_seed_details (rfaas.h). Times are in seconds."""

    version: int
    bytes: int
    memory: int
    children: int
    left: float
    load: float
    setup: float
    capture: float
    executor: str
    node: str
    setup: str
    warning: str


class MapOptions(_TypedDict, total=False):
    """The fields of rfaas_map_options (rfaas.h). Times are in seconds."""

    chunk: int
    timeout: float
    repeats: int


@_dataclass(frozen=True)
class Statistics:
    """rfaas_statistics (rfaas.h). Times are in seconds."""

    replaced: int
    calls: int
    replies: int
    abandoned: int
    late: int
    busy: int
    bytes_in: int
    bytes_out: int
    blocked: int
    repeated: int
    moved: int
    local: int
    cold: int
    pooled: int
    cached: int
    queue_pairs: int
    open: float
    cached_leases: int
    seeded: int

