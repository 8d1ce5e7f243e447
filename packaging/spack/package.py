# A package of Spack's: `spack repo create REPO`, this file as REPO/packages/py-cohort/package.py, `spack install py-cohort`.
# It holds what the wheel does: the Python package, the command, and headers and CMake package for C++ programs
# (`cohort --prefix`).
from spack.package import *


class PyCohort(PythonPackage):
    """Distributed training for C++ and Python: launcher, collectives, data parallelism, parameter servers, Horovod's API."""

    homepage = "https://example.org/cohort"
    # The sources of a release; tools/release/release prints the checksum.
    url = "https://example.org/cohort-0.1.0.tar.gz"

    license("Apache-2.0")
    version("0.1.0", sha256="0" * 64)

    depends_on("cxx", type="build")
    depends_on("python@3.9:", type=("build", "run"))
    depends_on("py-pybind11@2.10:", type="build")
    depends_on("cmake@3.25:", type="build")
    depends_on("ninja", type="build")
    depends_on("pkgconfig", type="build")
    for library in ("fmt", "spdlog", "nlohmann-json", "tomlplusplus", "tl-expected", "cli11", "asio", "cpp-httplib"):
        depends_on(library, type="build")
    depends_on("openssl@3:")
    depends_on("zlib-api")
    depends_on("highway")

    conflicts("platform=darwin", msg="Cohort is for Linux")

    import_modules = ["cohort"]

    def test_ranks(self):
        """two processes start"""
        which(self.prefix.bin.cohort)("run", "-np", "2", "--", "true")
