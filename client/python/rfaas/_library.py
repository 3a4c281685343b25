"""Finds librfaas.so. It is loaded when the first session is opened, so a program can import rfaas where the library is missing."""
import os
from pathlib import Path

from . import _rfaas

NAME = "librfaas.so.0"


def candidates() -> list[str]:
    """RFAAS_LIBRARY alone if it is set; else the system's library, the one of the installation of this package, and one inside the package."""
    named = os.environ.get("RFAAS_LIBRARY")
    if named:
        return [named]
    beside = [directory / NAME for directory in list(Path(__file__).resolve().parents)[:4]]
    return [NAME, *(str(path) for path in reversed(beside) if path.exists())]


def load() -> None:
    reasons = []
    for path in candidates():
        try:
            return _rfaas.load(path)
        except ImportError as e:
            reasons.append(str(e))
    raise ImportError("rfaas cannot load its C library; set RFAAS_LIBRARY to the path of " + NAME + ": " + "; ".join(reasons))
