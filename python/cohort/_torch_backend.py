"""Makes "cohort" a backend of torch.distributed as soon as torch is imported. Does not import torch.

torch 2.5 and later finds `autoload` by the entry point of the wheel; for every other torch, `import cohort` is enough,
before or after `import torch`: an entry in sys.meta_path waits for torch, and is removed after use.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Callable, Iterator

# The module whose class Backend holds the registry. torch/distributed/__init__.py imports it.
_REGISTRY = "torch.distributed.distributed_c10d"
# torch.compile's list of code that it does not trace, from torch 2.2 on.
_COMPILERS_RULES = "torch._dynamo.trace_rules"


def _create(options: Any, backend_options: Any) -> Any:
    from cohort.distributed.create import create

    return _waiting(options.group_size, lambda: create(options, backend_options))


def _waiting(size: int, wait: Callable[[], Any]) -> Any:
    """Returns the result of `wait`. Meanwhile the launcher knows that this rank waits for all `size` ranks."""
    from cohort import _core

    _core.begin_init(size)
    formed = False
    try:
        found = wait()
        formed = True
        return found
    finally:
        _core.end_init(formed)


def _tell_of_rendezvous(registry: ModuleType) -> None:
    """Lets the launcher know of torch's own wait for all ranks, too, which comes before any backend exists."""
    inner = getattr(registry, "rendezvous", None)
    # In an elastic job, `init` reports the wait, because a process that is no member yet waits for no ranks.
    if inner is None or hasattr(inner, "_of_torch") or not os.environ.get("COHORT_STATUS_FD") or _is_elastic():
        return

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Any]:
        found = inner(url, rank, world_size, **options)
        size = os.environ.get("WORLD_SIZE", "")
        yield _waiting(world_size if world_size > 0 else int(size) if size.isdigit() else 1, lambda: next(found))
        yield from found

    rendezvous._of_torch = inner  # type: ignore[attr-defined]
    registry.rendezvous = rendezvous  # type: ignore[attr-defined]


def _is_elastic() -> bool:
    from cohort import _core

    return _core.is_elastic()


def _wait_as_members(registry: ModuleType) -> None:
    """Replaces torch's own wait for all ranks after making a group (torch 1.13, later with TORCH_DIST_INIT_BARRIER=1)
    by the world's barrier, which in an elastic job ends when a rank is lost."""
    inner = getattr(registry, "_store_based_barrier", None)
    if inner is None or hasattr(inner, "_of_torch") or not _is_elastic():
        return

    def wait(*arguments: Any, **options: Any) -> None:
        world = sys.modules["torch.distributed"].group.WORLD
        of_all = len(arguments) < 4 or arguments[3] == world.size()
        if of_all and getattr(world, "elastic", False):
            world.barrier().wait()
        else:
            inner(*arguments, **options)

    wait._of_torch = inner  # type: ignore[attr-defined]
    registry._store_based_barrier = wait  # type: ignore[attr-defined]


def register(registry: ModuleType | None = None) -> bool:
    """Registers the backend with the imported torch. Returns True if it is registered; may be called repeatedly."""
    registry = registry or sys.modules.get(_REGISTRY)
    backend = getattr(registry, "Backend", None)
    if registry is None or backend is None or not hasattr(backend, "register_backend"):
        return False
    if "COHORT" in backend._plugins:
        return True
    import inspect

    arguments: dict[str, Any] = {"extended_api": True}
    # torch 1.13 has neither devices nor several backends in one group.
    if "devices" in inspect.signature(backend.register_backend).parameters:
        arguments["devices"] = ["cpu", "cuda"]
    backend.register_backend("cohort", _create, **arguments)
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    handlers["env"] = _env_handler(handlers["env"])
    _tell_of_rendezvous(registry)
    _wait_as_members(registry)
    return True


def _backend_asked_for() -> str:
    """Returns the backend given to init_process_group, which handlers do not receive; "" without such a call."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame.f_code.co_name == "init_process_group":
            return str(frame.f_locals.get("backend")).lower()
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def _env_handler(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch's handler of env://: for the backend "cohort" some of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    may be missing, and the launcher supplies the missing ones. Nothing changes for other backends."""

    def env(url: str, **options: Any) -> Any:
        if "cohort" in _backend_asked_for():
            from cohort.distributed.environment import meet

            met = meet(url, options.get("timeout"))
            if met is not None:
                yield met
                return
        yield from torchs(url, **options)

    return env


def autoload() -> None:
    """Entry point for torch. A failure here must not prevent the import of torch."""
    try:
        wait_for_torch()
    except Exception as error:
        import warnings

        warnings.warn(f'"cohort" is no backend of torch.distributed here -- {type(error).__name__}: {error}', stacklevel=2)


def keep_compiler_out(rules: Any = None) -> bool:
    """Tells torch.compile not to trace the methods of our process groups: DDP and compiled programs call them, and they
    contain no torch operations. Returns True if the compiler has been told."""
    rules = rules or sys.modules.get(_COMPILERS_RULES)
    if not hasattr(rules, "add"):
        return False
    if not getattr(rules, "_cohort_is_left_alone", False):
        rules.add("cohort")
        rules._cohort_is_left_alone = True
    return True


# Actions to take when a module of torch's has been imported.
_AFTER = {_REGISTRY: register, _COMPILERS_RULES: keep_compiler_out}


def wait_for_torch() -> None:
    """Takes all actions now, or as soon as torch has imported the module that each needs."""
    for module, act in _AFTER.items():
        if not act() and not any(isinstance(finder, _Finder) and finder.module == module for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(module, act))


def when_imported(name: str, act: Callable[[ModuleType], object]) -> None:
    """Calls `act` when the module of this name has been executed: now, if it has already."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, act))
    else:
        act(module)


class _Finder:
    """Lets other finders find the module, and acts when the module has been executed."""

    def __init__(self, module: str, act: Callable[[ModuleType], object]) -> None:
        self.module, self.act = module, act

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.module:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._act_after(spec.loader)
                return spec
        return None

    def _act_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            try:
                self.act(module)
            except Exception as error:
                import warnings

                warnings.warn(f"cohort does not work with this {self.module} as it should -- {error}", stacklevel=2)

        # Only on this loader object, which loads this one module.
        loader.exec_module = exec_module


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """torch.distributed.monitored_barrier for the backend "cohort": returns when all ranks of the group have called it.

    group           a process group of torch.distributed; default: the world
    timeout         seconds or a timedelta; default: the group's own; 0: ranks that have not arrived already are missing
    wait_all_ranks  accepted for torch's sake: every missing rank is named in any case

    Raises cohort.Timeout on all ranks that have arrived, naming the missing ranks (of the world); the group cannot be
    used afterwards. A group of another backend is passed to torch's own function, which supports Gloo.
    """
    from cohort.distributed.monitored import monitored_barrier as check

    check(group, timeout, wait_all_ranks)
