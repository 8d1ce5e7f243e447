"""Reports to the agent that started this process why the process dies, and its stacks on request.

Does nothing without such an agent. The program's behaviour is unchanged: `sys.excepthook` calls the previous hook, and
signals are handled only if they have no other handler.
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
    """From now on, reports an exception that ends the program, with its traceback."""
    global _before
    # The page belongs to this process when it forms a world, or fails, not when it only imports Cohort.
    if _before is not None or "COHORT_STATUS_FD" not in os.environ:
        return
    _before = sys.excepthook
    sys.excepthook = _excepthook


def _excepthook(kind, error, trace) -> None:
    _say(error, trace)
    _before(kind, error, trace)  # type: ignore[misc]


def tell_at_exit() -> None:
    """Reports the exception that ends the program, as Python keeps it, in case the program has replaced `sys.excepthook`."""
    if _before is not None:
        error = getattr(sys, "last_value", None)
        _say(error, getattr(error, "__traceback__", None))


def _say(error, trace) -> None:
    # In an interactive session an exception is not the end.
    if not isinstance(error, BaseException) or isinstance(error, (KeyboardInterrupt, SystemExit)) or hasattr(sys, "ps1"):
        return
    try:
        import traceback

        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:  # out of memory, or an exception that cannot be shown
        text = f"uncaught exception {type(error).__qualname__}"
    # The end of the text is most informative.
    words = text.encode("utf-8", "replace")[-_MOST_BYTES:].decode("utf-8", "ignore")
    _core.say_last_words(words, _cause(error))


def _cause(error: BaseException) -> BaseException | None:
    """Returns the PeerLost or Aborted among the exception and its causes; otherwise the exception, if it is Cohort's."""
    from cohort.errors import Aborted, Error, PeerLost

    at: BaseException | None = error
    for _ in range(100):  # the chain may be a cycle
        if at is None or isinstance(at, (PeerLost, Aborted)):
            break
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    if isinstance(at, (PeerLost, Aborted)):
        return at
    return error if isinstance(error, Error) else None


def tell_stacks() -> None:
    """Makes SIGQUIT send the stacks of all threads to the agent from now on, and a crash report its location.

    Call it on the main thread: stack overflows are reported there.
    """
    global _asked
    fd = _core.status_fd()
    if _asked or fd < 0:
        return
    _asked = True
    _core.keep_last_words()
    try:
        import faulthandler
    except ImportError:  # the C++ core's handler is sufficient
        return
    if not faulthandler.is_enabled():
        # faulthandler calls the core's earlier handlers, which read the text that it has written.
        crash = os.memfd_create("cohort-crash")
        faulthandler.enable(file=crash, all_threads=False)
        _core.add_to_last_words(crash)
        os.register_at_fork(after_in_child=lambda: _part_from(crash))
    if signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL:
        faulthandler.register(signal.SIGQUIT, file=fd, all_threads=True, chain=False)
        # In a fork of this process SIGQUIT keeps its default meaning.
        os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGQUIT))
        _core.announce_stacks()


def _part_from(crash: int) -> None:
    # A fork's crash is not its parent's.
    try:
        own = os.memfd_create("cohort-crash")
        os.dup2(own, crash, inheritable=False)
        os.close(own)
    except OSError:
        pass
