"""Finds the command `cohort` that belongs to this package, runs it, and shows its output immediately."""

from __future__ import annotations

import codecs
import os
import pathlib
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import time

from cohort import _core
from cohort.errors import Unavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# The command gives its ranks a few seconds to end, then kills them; this limit is for a command that hangs.
_SECONDS_TO_END = 45.0


def _beside_package() -> Iterator[pathlib.Path]:
    package = pathlib.Path(__file__).resolve().parents[1]
    # In a build folder: build/PRESET/python/cohort beside build/PRESET/bin. The files are links, so resolve one.
    for folder in (pathlib.Path(_core.__file__).resolve().parent, package):
        if folder.parent.name == "python":
            yield folder.parent.parent / "bin" / "cohort"
    yield package.parent / "bin" / "cohort"  # for `pip install --target`
    # In an installed wheel: in the scripts folder beside its site-packages, whatever scheme it was installed with.
    for parent in package.parents:
        if parent.name in ("lib", "lib64"):
            yield parent.parent / "bin" / "cohort"
            break


def _elsewhere() -> Iterator[pathlib.Path]:
    yield pathlib.Path(sysconfig.get_path("scripts")) / "cohort"
    yield pathlib.Path(sysconfig.get_path("scripts", f"{os.name}_user")) / "cohort"
    yield pathlib.Path(sys.executable).parent / "cohort"
    found = shutil.which("cohort")
    if found:
        yield pathlib.Path(found)


def _version_of(command: pathlib.Path) -> str:
    try:
        asked = subprocess.run([command, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return asked.stdout.decode(errors="replace").strip().replace("cohort ", "", 1)


def find() -> str:
    """Returns the path of the command. It is beside the package, or has the package's version and is in a scripts folder
    of this Python or on PATH.

    Raises Unavailable, naming the places searched.
    """
    looked = {}
    for is_beside, paths in ((True, _beside_package()), (False, _elsewhere())):
        for path in paths:
            if str(path) in looked:
                continue
            looked[str(path)] = str(path)
            if os.access(path, os.X_OK) and path.is_file():
                version = _core.__version__ if is_beside else _version_of(path)
                if version == _core.__version__:
                    return str(path)
                looked[str(path)] += f" (that is of version {version})"
    raise Unavailable(
        f"cannot start ranks -- there is no command `cohort` of this package's version, {_core.__version__}, at "
        f"{', '.join(looked.values())} or on PATH -- install package and command together: `pip install` of the wheel or of "
        "a clone, with an empty folder for --target; in a build folder, `ninja cohort` builds it"
    )


class _Stream:
    """One of the command's two streams, copied to the current sys.stdout or sys.stderr (which a notebook replaces)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_silent = False

    def show(self, data: bytes) -> None:
        text = self.decoder.decode(data, final=not data)
        target = None if self.is_silent else getattr(sys, self.name)
        if text and target is not None:
            try:
                target.write(text)
            except UnicodeEncodeError:
                encoding = target.encoding or "ascii"
                target.write(text.encode(encoding, "replace").decode(encoding))
            target.flush()


class Job:
    """A `cohort run`. Its output appears while `run` waits, in the waiting thread."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], folder: os.PathLike[str], *, agents: int = 0
    ) -> None:
        """`words`: options and program. `folder`: removed by the caller, or by the command if the caller dies first.
        `agents`: the number of agents that the caller starts, with the line from `invitation`."""
        own = ["--owner", f"{os.getpid()},{os.fspath(folder)}"]
        self._invitation, self._inherited = -1, -1
        if agents:
            self._invitation, self._inherited = os.pipe()
            own += ["--agents", f"{agents},{self._inherited}"]
        self._command = [find(), "run", *own, *words]
        self._environment = dict(environment)
        self._folder = pathlib.Path(folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._streams = (_Stream("stdout"), _Stream("stderr"))

    def refusal(self) -> str:
        """The reason that the command did not start the job; empty if it did, and then the record says how the job
        ended."""
        try:
            return (self._folder / "refused").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def invitation(self) -> str:
        """Waits, in another thread than `run`, for the command's line for agents, which holds the job's secret. Empty
        if the command has ended before."""
        with open(self._invitation, encoding="ascii") as pipe:
            return pipe.read()

    def stop(self) -> None:
        """Ends the command while another thread is in `run`, as SIGTERM to the command does."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)

    def is_running(self) -> bool:
        process = self._process
        return process is not None and process.poll() is None

    def be_silent(self) -> None:
        """Hides the command's output from now on, because the job will be started again."""
        for stream in self._streams:
            stream.is_silent = True

    def run(self) -> int:
        """Runs the command and shows its output. Returns its exit status (128 + signal if a signal killed it).

        An exception during the wait (a KeyboardInterrupt, an error of sys.stdout) ends the job and is raised again when
        no process of the job is left; a second KeyboardInterrupt sends the ranks SIGTERM, a third one kills them.
        """
        try:
            # In its own session: Ctrl-C at the terminal then reaches only this process, which forwards it once.
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(self._inherited,) if self._inherited >= 0 else (),
            )
            self._close_inherited()
            self._pump(self._process, None)
            status = self._process.wait(_SECONDS_TO_END)
        except BaseException as reason:
            if self._process is not None:
                self._end(self._process, signal.SIGINT if isinstance(reason, KeyboardInterrupt) else signal.SIGTERM)
            raise
        finally:
            self._close_inherited()
        return status if status >= 0 else 128 - status

    def _close_inherited(self) -> None:
        if self._inherited >= 0:
            os.close(self._inherited)
            self._inherited = -1

    def _end(self, process: subprocess.Popen[bytes], number: int) -> None:
        deadline = time.monotonic() + _SECONDS_TO_END
        process.send_signal(number)
        while True:
            try:
                self._pump(process, deadline)
                process.wait(max(0.1, deadline - time.monotonic()))
                break
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
            except subprocess.TimeoutExpired:
                process.kill()  # the command's guard ends the ranks
                process.wait()
                break
            except Exception:
                # Nobody here reads the output any more; the command should not block on it.
                for pipe in (process.stdout, process.stderr):
                    if pipe is not None:
                        pipe.close()

    def _pump(self, process: subprocess.Popen[bytes], deadline: float | None) -> None:
        """Waits until both streams have ended, or the deadline (time.monotonic) has passed."""
        with selectors.DefaultSelector() as selector:
            for pipe, stream in zip((process.stdout, process.stderr), self._streams):
                if pipe is not None and not pipe.closed:
                    selector.register(pipe, selectors.EVENT_READ, stream)
            while selector.get_map():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 65536)
                    key.data.show(data)
                    if not data:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]  # a pipe
