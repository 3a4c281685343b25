"""Functions in C, C++ or Fortran that are part of a Python program."""
from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ._generated import BadLibraryError


class CompiledLibrary(str):
    """The path of a library of functions of rfaas.njit. Their signatures say which dtypes their arguments and results have."""

    functions: dict[str, tuple[Any, Any]]  # dtypes of the argument and the result

    def name_in(self, lease: Any) -> None:
        """Lets the lease check arguments and make results accordingly."""
        for name, (takes, dtype) in self.functions.items():
            lease._name(name, name, takes=takes, dtype=dtype)


SUFFIXES = {"c": ".c", "c++": ".cpp", "fortran": ".f90"}


def _compiler() -> str:
    """Returns the path of rfaas-cc: from the environment variable RFAAS_CC, of this installation, or from PATH."""
    named = os.environ.get("RFAAS_CC")
    if named:
        return named
    for directory in list(Path(__file__).resolve().parents)[2:5]:
        if os.access(directory / "bin/rfaas-cc", os.X_OK):
            return str(directory / "bin/rfaas-cc")
    found = shutil.which("rfaas-cc")
    if not found:
        raise FileNotFoundError("rfaas-cc, which compiles functions, is not in PATH: install rfaas on this machine, or set RFAAS_CC to the path of rfaas-cc")
    return found


def _cache() -> Path:
    """Returns the directory of compiled libraries. No other user may write to it, because its libraries are executed."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "rfaas", "functions")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = directory.stat()
    if state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise PermissionError(f"{directory} has mode {state.st_mode & 0o777:o} and belongs to user id {state.st_uid}, so other users can write to it: "
                              "remove it, or set XDG_CACHE_HOME to a directory of your own")
    return directory


def compile(source: Any, *options: str, language: str = "c") -> str:
    """Compiles functions with rfaas-cc and returns the path of the library, for rfaas.lease. Keeps the library in ~/.cache/rfaas/functions. When the
    source and the options are the same again, returns it from there, unless one of them names a file by its path, which may have changed.

    source: the text of the functions, or a function of rfaas.njit, or a list of these.
    options: options of rfaas-cc and of the compiler, such as "-lm" or "--native".
    language: "c", "c++" or "fortran".

    Raises BadLibraryError with the compiler's messages if the source does not compile, and FileNotFoundError if rfaas-cc is missing.
    """
    if not isinstance(source, str):
        from . import _numba

        functions = source if isinstance(source, (list, tuple)) else [source]
        text, objects = _numba.source_of(functions)
        library = CompiledLibrary(_compiled(text, (*options, "-lm"), language, objects))  # numba calls the functions of libm
        library.functions = {f.name: f.dtypes for f in functions}
        return library
    return _compiled(source, options, language, [])


def _compiled(source: str, options: tuple[str, ...], language: str, objects: list[bytes]) -> str:
    if language not in SUFFIXES:
        raise ValueError(f"language is {language!r}, want one of {', '.join(map(repr, SUFFIXES))}")
    compiler = _compiler()
    try:
        state = os.stat(compiler)
    except OSError as e:
        raise FileNotFoundError(f"RFAAS_CC names {compiler}: {e.strerror}") from None
    native = platform.node() if any("native" in option for option in options) else ""  # --native compiles for this node's processor
    key = [source, *objects, language, *options, native, platform.machine(), compiler, state.st_mtime_ns, state.st_size,
           *(os.environ.get(name, "") for name in ("CC", "CXX", "FC"))]
    library = _cache() / f"{blake2b(repr(key).encode(), digest_size=16).hexdigest()}.so"
    if library.exists() and not any("/" in option for option in options) and not re.search("""include *["'<]/""", source):
        return str(library)
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        text, built = Path(directory, "functions" + SUFFIXES[language]), Path(directory, "functions.so")
        text.write_text(source)
        files = [Path(directory, f"{i}.o") for i in range(len(objects))]
        for file, content in zip(files, objects):
            file.write_bytes(content)
        done = subprocess.run([compiler, "-o", str(built), str(text), *map(str, files), *options], cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise BadLibraryError(f"the functions do not compile:\n{done.stderr.replace(str(text), 'source')}".rstrip(), -204, False)
        built.rename(library)  # atomic, because other processes may compile the same
    return str(library)
