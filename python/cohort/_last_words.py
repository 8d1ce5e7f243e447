"""Reports to the agent that started this process: why the process dies, and its stacks when it is asked for them.

Does nothing without such an agent. The program is not changed: `sys.excepthook` calls the one before, and signals
are handled only where nobody handles them.
"""

from __future__ import annotations

import os
import signal
import sys

from cohort import _core

_MOST_BYTES = 12 << 10

_before = None
_asked = False


def watch_exceptions() -> None:
    """From now on an exception that ends the program is reported with its traceback."""
    global _before
    # The page is this process's once it joins, or fails: not by the mere import.
    if _before is not None or "COHORT_STATUS_FD" not in os.environ:
        return
    _before = sys.excepthook
    sys.excepthook = _excepthook


def _excepthook(kind, error, trace) -> None:
    _say(error, trace)
    _before(kind, error, trace)  # type: ignore[misc]


def tell_at_exit() -> None:
    """For programs whose `sys.excepthook` is another by now: Python keeps the exception that ends it."""
    if _before is not None:
        error = getattr(sys, "last_value", None)
        _say(error, getattr(error, "__traceback__", None))


def _say(error, trace) -> None:
    # At a prompt an exception is not the end.
    if not isinstance(error, BaseException) or isinstance(error, (KeyboardInterrupt, SystemExit)) or hasattr(sys, "ps1"):
        return
    try:
        import traceback

        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # out of memory, or an exception that cannot be shown
        text = f"uncaught exception {type(error).__qualname__}"
    # The end says most.
    words = text.encode("utf-8", "replace")[-_MOST_BYTES:].decode("utf-8", "ignore")
    _core.say_last_words(words, _cause(error))


def _cause(error: BaseException) -> BaseException | None:
    """Returns the lost peer's error among an exception and its causes; else the exception, if it is Cohort's."""
    from cohort.errors import Aborted, Error, PeerLost

    at: BaseException | None = error
    for _ in range(100):  # a chain may lead back into itself
        if at is None or isinstance(at, (PeerLost, Aborted)):
            break
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    if isinstance(at, (PeerLost, Aborted)):
        return at
    return error if isinstance(error, Error) else None


def tell_stacks() -> None:
    """From now on SIGQUIT writes the stacks of all threads to the agent, and of a crash the agent learns where it was.

    For the main thread: there a stack overflow is reported.
    """
    global _asked
    fd = _core.status_fd()
    if _asked or fd < 0:
        return
    _asked = True
    _core.keep_last_words()
    try:
        import faulthandler
    except ImportError:  # the C++ core's handler will do
        return
    if not faulthandler.is_enabled():
        # It hands over to the core's handlers, which were there before, and they take what it has written.
        crash = os.memfd_create("cohort-crash")
        faulthandler.enable(file=crash, all_threads=False)
        _core.add_to_last_words(crash)
        os.register_at_fork(after_in_child=lambda: _part_from(crash))
    if signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL:
        faulthandler.register(signal.SIGQUIT, file=fd, all_threads=True, chain=False)
        # For a fork of this process SIGQUIT means what it always does.
        os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGQUIT))
        _core.announce_stacks()


def _part_from(crash: int) -> None:
    # The crash of a fork is not its parent's.
    try:
        own = os.memfd_create("cohort-crash")
        os.dup2(own, crash, inheritable=False)
        os.close(own)
    except OSError:
        pass
