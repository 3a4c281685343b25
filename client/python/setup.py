"""Builds the extension for the stable ABI: one wheel for CPython 3.11 and later versions.

Environment: RFAAS_VERSION is the version of the package, by default that of rfaas.h. RFAAS_INCLUDE is the directory of rfaas.h and rfaas_function.h, outside of a clone of the repository. RFAAS_BUNDLE is the path of a
librfaas.so.0 to include in the package, for machines where the library is not installed.
"""
import glob
import os
import re
import shutil

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

include = os.environ.get("RFAAS_INCLUDE") or "../c"
with open(os.path.join(include, "rfaas.h")) as header:
    version = os.environ.get("RFAAS_VERSION") or ".".join(re.findall(r"^#define RFAAS_VERSION_M[A-Z]*OR (\d+)", header.read(), re.MULTILINE))


class BuildPackage(build_py):
    def run(self):
        super().run()
        bundled = os.environ.get("RFAAS_BUNDLE")
        if bundled:
            shutil.copy(bundled, os.path.join(self.build_lib, "rfaas", "librfaas.so.0"))


setup(
    version=version,
    cmdclass={"build_py": BuildPackage},
    ext_modules=[
        Extension(name, sources, include_dirs=[include, "../../worker"], define_macros=[("Py_LIMITED_API", "0x030b0000")],
                  extra_compile_args=["-std=gnu11", "-fvisibility=hidden"], py_limited_api=True)
        # The second extension is not a module, but the library that workers of rfaas.Executor load.
        for name, sources in (("rfaas._rfaas", sorted(glob.glob("ext/*.c"))), ("rfaas._worker", ["worker/worker.c"]))
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
