# A recipe for Spack: spack repo add packaging/spack && spack install rfaas
from spack.package import *


class Rfaas(MakefilePackage):
    """Functions on idle cluster nodes, called by remote memory write: leases of
    workers in some tens of milliseconds or less, calls in little more time than the
    network needs."""

    homepage = "https://github.com/rfaas-go/rfaas"
    git = "https://github.com/rfaas-go/rfaas.git"

    license("BSD-3-Clause")

    version("main", branch="main")
    version("0.4.0", tag="v0.4.0")

    variant("python", default=True, description="Build the Python package")
    variant("fortran", default=True, description="Build the Fortran modules")

    depends_on("c", type="build")
    depends_on("fortran", type="build", when="+fortran")
    depends_on("go@1.26:", type="build")
    depends_on("gmake", type="build")
    depends_on("pkgconfig", type="build")
    # Loaded at run time when they are needed.
    depends_on("rdma-core@32:", type=("build", "run"))
    depends_on("libfabric", type=("build", "run"))
    depends_on("openssl@3:", type="run")
    depends_on("python@3.11:", type=("build", "run"), when="+python")
    depends_on("py-numpy", type="run", when="+python")

    conflicts("platform=darwin", msg="rfaas needs Linux")
    extends("python", when="+python")

    def make_arguments(self):
        arguments = ["MPI=none", "PREFIX={0}".format(self.prefix)]
        if self.spec.satisfies("~fortran"):
            arguments.append("FORTRAN=")
        if self.spec.satisfies("+python"):
            arguments.append("PYTHON={0}".format(python.path))
            arguments.append("PYTHONDIR={0}".format(python_platlib))
        else:
            arguments.append("PYTHON_PLACES=")
        return arguments

    def build(self, spec, prefix):
        make("build", *self.make_arguments())

    def install(self, spec, prefix):
        make("install", *self.make_arguments())

    def setup_run_environment(self, env):
        env.set("RFAAS_HOME", self.prefix)
        env.set("RFAAS_AGENT", self.prefix.libexec.join("rfaas-agent"))
