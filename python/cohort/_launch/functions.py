"""`cohort.run`: a function of this program, or of a notebook, on N processes."""

from __future__ import annotations

import functools
import json
import linecache
import operator
import os
import pathlib
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping

from cohort._launch import command as _command, mlflow as _mlflow, pickling as _pickling
from cohort._launch.rank_call import FROM_RANKS, TO_RANKS, write_private
from cohort.errors import Error, InvalidArgument, RankFailed, Timeout, Unavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Union

    from cohort._launch.rank_call import Outcome
    from cohort._spark.stage import Stage

    Processes = Union[int, str]
    Hosts = Union[str, Sequence[str], Mapping[str, int]]

# Limit for the sources of notebook cells, which only serve tracebacks; no notebook has more.
_MOST_SOURCE = 4 << 20
# Default for ranks on Spark's workers, which first start JVMs and Pythons, and fetch Cohort if they lack it.
SECONDS_TO_START = 120.0
# Program of ranks that may be on other hosts; they receive only this text.
_SENT_BOOTSTRAP = """\
import sys
sys.path[:] = {path!r}
from cohort._launch.rank_call import end, main_elsewhere
end(main_elsewhere({name!r}))
"""
_BOOTSTRAP = """\
import sys
sys.path[:] = {path!r}
if __name__ == "__main__":
    from cohort._launch.rank_call import end, main
    end(main({folder!r}))
"""


def run(fn: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None,
        np: Processes = "auto", *, hosts: Hosts | None = None, hostfile: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None, timeout: float | None = None, start_timeout: float | None = None,
        prefix: str = "rank", quiet: bool = False, run_dir: str | os.PathLike[str] | None = None,
        executable: str | None = None, options: Sequence[str] = (), on: str | None = None) -> list[Any]:  # fmt: skip
    """Calls `fn(*args, **kwargs)` on `np` new processes and returns their results, by rank.

    fn             any function: of a module, of `__main__`, of a notebook, a lambda. With cloudpickle it is sent
                   by value, with the globals it uses; without cloudpickle, it must be importable from a module
    args, kwargs   its arguments, sent to each rank
    np             the number of processes, or "auto": one for each core that this process may use; with hosts: all
                   their slots
    hosts          hosts to run on, as for `cohort run -H`: "a:4,b:4", ["a:4", "b:4"] or {"a": 4, "b": 4}; default: this
                   host, or the hosts of this process's Slurm allocation
    hostfile       a file of hosts instead, as for `cohort run --hostfile`
    env            variables for the ranks, added to this process's environment, which they inherit entirely
    timeout        seconds for the whole job; default: none
    start_timeout  seconds for all ranks to be running; default: 30, on Spark's workers 120
    prefix         prefix of each line that a rank prints: "rank" (host:rank), "full" (time and stream too), "none"
    quiet          print only what the ranks print, and failures
    run_dir        folder for the record of the run and the complete output of each rank; default: none, but values
                   logged by `cohort.track.log` are kept in runs/cohort-run-NAME, and a line says so
    executable     the Python to run; default: this one, with this one's sys.path
    options        more options of `cohort run`, as a list of strings
    on             "spark": on the workers of the active SparkSession; np "auto": as many as it runs tasks at a time. Python,
                   folder and environment are Spark's, and `env` is added to that. docs/reference/functions.md has the
                   rest

    The ranks are fresh processes (nothing is forked) under `cohort run`: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT are set, and `cohort.init()` finds the other ranks. Their output appears here immediately. A
    KeyboardInterrupt ends them all, and so does the end of this process. Other hosts need the same Python, the same
    modules at the same paths, and this folder; nothing else is shared: function, arguments and results travel through
    the job's own connections.

    Raises the exception of the first rank to fail, whose cause is a RankFailed with that rank's traceback; RankFailed itself
    if the exception cannot be sent, or if the rank was killed or left no result; Timeout; InvalidArgument for arguments
    that have no meaning or cannot be sent; Unavailable if nothing can be started.
    """
    environment = environment_of(env)
    if not callable(fn):
        raise InvalidArgument(f"run: fn is {fn!r}, which cannot be called -- give a function, and its arguments as args=(...)")
    if isinstance(args, (str, bytes, Mapping)) or not isinstance(args, Iterable):
        raise InvalidArgument(f"run: args is {args!r} -- a tuple of arguments is wanted, as ({args!r},)")
    if not isinstance(kwargs or {}, Mapping) or not all(isinstance(name, str) for name in kwargs or {}):
        raise InvalidArgument(f"run: kwargs is {kwargs!r} -- arguments by their names are wanted")
    if on is not None:
        stage = _stage_for(on, _number_of(np), hosts, hostfile, executable, options)
        start_timeout = SECONDS_TO_START if start_timeout is None else start_timeout
        words = job_words(None, timeout, start_timeout, prefix, quiet, options)
        outcomes = call_on_stage(
            stage, fn, args, dict(kwargs or {}), words=words, env=env, run_dir=run_dir, all_values=True
        )
    else:
        outcomes = call_on_ranks(
            fn,
            args,
            dict(kwargs or {}),
            words=[*host_words(hosts, hostfile), *job_words(np, timeout, start_timeout, prefix, quiet, options)],
            environment=environment,
            run_dir=run_dir,
            executable=executable,
            all_values=True,
            travels=may_travel(hosts, hostfile, options, environment),
        )
    return [_load(rank, outcome) for rank, outcome in enumerate(outcomes)]


def _stage_for(
    on: str, np: Processes, hosts: object, hostfile: object, executable: object, options: Sequence[str]
) -> Stage:
    if on != "spark":
        raise InvalidArgument(f'run: on is {on!r} -- "spark" is wanted, or nothing: on this host, or on hosts=')
    if hosts is not None or hostfile is not None or executable is not None:
        raise InvalidArgument(
            'run: on="spark" -- hosts, hostfile and executable have no meaning there: Spark places the ranks, and '
            "spark.pyspark.python is their Python"
        )
    return spark_stage(np, use_gpu=True, as_horovod="--as-horovod" in options)


def spark_stage(*args: Any, **kwargs: Any) -> Stage:
    """Returns a `Stage`. Raises Unavailable where Cohort was built without its extension spark."""
    try:
        from cohort._spark.stage import Stage
    except ModuleNotFoundError as missing:
        raise Unavailable(f'on="spark": {missing} -- this Cohort was built without its extension spark') from missing
    return Stage(*args, **kwargs)


def call_on_stage(stage: Stage, fn: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any], *,
                  words: Sequence[str], env: Mapping[str, str] | None = None,
                  run_dir: str | os.PathLike[str] | None = None, all_values: bool) -> list[Outcome]:  # fmt: skip
    """Like `call_on_ranks`, for ranks on Spark's workers; the stage knows their number."""
    stage.wait_for_slots()
    try:
        return call_on_ranks(
            fn,
            args,
            kwargs,
            words=[*stage.words(), *words],
            environment=stage.environment(os.environ, env),
            run_dir=run_dir,
            all_values=all_values,
            stage=stage,
        )
    except Error as error:
        told = stage.explain(error)
        if told is error:
            raise
        raise told from None


def host_words(hosts: Hosts | None, hostfile: str | os.PathLike[str] | None) -> list[str]:
    """Returns the options of `cohort run` that name hosts. Raises InvalidArgument."""
    if hosts is not None and hostfile is not None:
        raise InvalidArgument("run: hosts and hostfile are both given -- one of them says where the ranks run")
    if hostfile is not None:
        return ["--hostfile", os.fspath(hostfile)]
    if hosts is None:
        return []
    if isinstance(hosts, str):
        text = hosts
    elif isinstance(hosts, Mapping):
        text = ",".join(f"{name}:{slots}" for name, slots in hosts.items())
    else:
        text = ",".join(map(str, hosts))
    if not text.strip(", "):
        raise InvalidArgument(f"run: hosts is {hosts!r} -- at least one host is wanted, as \"a:4,b:4\"")
    return ["-H", text]


def may_travel(hosts: Hosts | None, hostfile: str | os.PathLike[str] | None, options: Sequence[str],
               environment: Mapping[str, str]) -> bool:  # fmt: skip
    """Returns True if ranks may be on other hosts: by the arguments, by options, by a file of options, or in a Slurm
    allocation. `environment`: the command's environment."""
    return (
        hosts is not None
        or hostfile is not None
        or bool(options)
        or "SLURM_JOB_ID" in environment
        or any(f"COHORT_RUN_{name}" in environment for name in ("HOSTS", "HOSTFILE", "NODES", "STARTER", "CONFIG"))
    )


def goes_elsewhere(
    hosts: Hosts | None, hostfile: str | os.PathLike[str] | None, environment: Mapping[str, str]
) -> bool:
    """Returns True if ranks will probably be on other hosts, with GPUs of their own, because hosts are named or a Slurm
    allocation has several nodes."""
    if hosts is not None or hostfile is not None:
        return True
    if any(environment.get(f"COHORT_RUN_{name}") for name in ("HOSTS", "HOSTFILE", "CONFIG")):
        return True
    if not may_travel(hosts, hostfile, (), environment) or environment.get("COHORT_RUN_NODES") == "1":
        return False
    nodes = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    return nodes.isdigit() and int(nodes) > 1


def _number_of(np: Processes) -> Processes:
    if np == "auto":
        return np
    try:
        number = operator.index(np)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(f'run: np is {np!r} -- a number of processes or "auto" is wanted') from None
    if number < 1:
        raise InvalidArgument(f"run: np is {number} -- at least one process is needed")
    return number


def job_words(np: Processes | None = None, timeout: float | None = None, start_timeout: float | None = None,
              prefix: str = "rank", quiet: bool = False, options: Sequence[str] = ()) -> list[str]:  # fmt: skip
    """Returns the options of `cohort run`; `np` None: without `-np`. Raises InvalidArgument for wrong values, which the
    command would report only later."""
    if isinstance(options, str):
        raise InvalidArgument(f"run: options is the text {options!r} -- a list of words is wanted, as shlex.split makes it")
    if "--" in options:
        raise InvalidArgument(f"run: options is {options!r} -- options alone are wanted: the program behind '--' is fn")
    if np is not None:
        np = _number_of(np)
    if prefix not in ("rank", "full", "none"):
        raise InvalidArgument(f'run: prefix is {prefix!r} -- "rank", "full" or "none" is wanted')
    words = ["--prefix", prefix, "--start-timeout", str(30.0 if start_timeout is None else float(start_timeout))]
    if np is not None:
        words = ["-np", str(np), *words]
    if timeout is not None:
        if not timeout > 0:
            raise InvalidArgument(f"run: timeout is {timeout} -- seconds above 0, or None")
        words += ["--timeout", str(float(timeout))]
    if quiet:
        words.append("--quiet")
    return [*words, *map(str, options)]


def environment_of(more: Mapping[str, str] | None) -> dict[str, str]:
    """Returns this process's environment with `more` added."""
    environment = dict(os.environ)
    for name, value in (more or {}).items():
        environment[str(name)] = str(value)
    return environment


def call_on_ranks(fn: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any], *, words: Sequence[str],
                  environment: Mapping[str, str], run_dir: str | os.PathLike[str] | None = None,
                  executable: str | None = None, all_values: bool, travels: bool = False,
                  stage: Stage | None = None) -> list[Outcome]:  # fmt: skip
    """Returns the ranks' outcomes if all succeeded. `all_values` False: only rank 0's outcome has a value. `travels`: the
    ranks may be on other hosts, which cannot read the folder. `stage`: ranks run on its workers. Raises like `run`."""
    environment = dict(environment)
    _mlflow.hand_on(environment)
    travels = travels or stage is not None
    call = _pickling.dump_call(fn, args, kwargs)
    name = re.sub(r"\W+", "-", getattr(fn, "__name__", "") or "function").strip("-")[:40] or "function"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="cohort-run-"))  # 0700
    try:
        files = folder / TO_RANKS if travels else folder  # the command sends this folder to other hosts
        files.mkdir(exist_ok=True)
        write_private(files / "call", call)
        write_private(files / "sources", pickle.dumps(_notebook_sources()))
        if all_values:
            (files / "all-values").touch()
        path = _search_path(executable)
        python = [executable or sys.executable]
        if stage is not None:
            program, python = stage.program(name), []
        elif travels:
            program = ["-c", _SENT_BOOTSTRAP.format(path=path, name=name)]
        else:
            program = [str(folder / f"{name}.py")]
            pathlib.Path(program[0]).write_text(_BOOTSTRAP.format(path=path, folder=str(folder)), encoding="utf-8")
        kept = run_folder(folder, words, environment) if run_dir is None else pathlib.Path(run_dir)
        words = [*words, "--run-dir", str(kept), *(["--no-logs"] if run_dir is None else [])]
        words = [*words, "--no-python", "--", *python, *program]
        if stage is not None:
            job, status = stage.run(functools.partial(_command.Job, words, environment, folder))
        else:
            job = _command.Job(words, environment, folder)
            status = job.run()
        return _outcomes(folder, kept, status, job.refusal())
    finally:
        _keep_record(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _keep_record(folder: pathlib.Path) -> None:
    """Moves logged values out of the run's folder, which nobody asked to keep."""
    record = folder / "run" / "run.jsonl"
    if not record.exists():
        return
    to = pathlib.Path("runs", folder.name)
    try:
        to.mkdir(parents=True)
        for file in (record, record.with_name("job.json")):
            if file.exists():
                shutil.move(file, to / file.name)
        said = f"what was logged is in {to} (cohort plot {to})"
    except OSError as error:
        said = f"what was logged is lost: {to}: {error.strerror} -- give run_dir=FOLDER"
    print(f"cohort: {said}", file=sys.stderr)


def run_folder(folder: pathlib.Path, words: Sequence[str], environment: Mapping[str, str]) -> pathlib.Path:
    """Returns the run's folder for a caller who has not named one. It is within `folder`, which is removed; but if the
    record is tracked, it is a folder that stays, since the receiver may be unreachable."""
    tracked = environment.get("COHORT_RUN_TRACK") or any(word.split("=")[0] == "--track" for word in words)
    return pathlib.Path("runs", folder.name) if tracked else folder / "run"


def _search_path(executable: str | None) -> list[str]:
    """Returns the ranks' search path for modules, made from this process's so that ranks find the same modules by name."""
    here = os.getcwd()
    package = str(pathlib.Path(sys.modules["cohort"].__file__ or "").absolute().parent.parent)
    if executable is not None and executable != sys.executable:
        return [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    path = [here if not entry else os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
    return path if package in path else [*path, package]


def _notebook_sources() -> dict[str, list[str]]:
    sources: dict[str, list[str]] = {}
    size = 0
    for name, entry in linecache.cache.copy().items():  # other threads change the cache
        if len(entry) != 4 or os.path.exists(name) or not entry[2]:
            continue
        size += sum(map(len, entry[2]))
        if size > _MOST_SOURCE:
            break
        sources[name] = list(entry[2])
    return sources


def _outcomes(folder: pathlib.Path, run_folder: pathlib.Path, status: int, refusal: str) -> list[Outcome]:
    try:
        record = json.loads((run_folder / "job.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {}
    size = record.get("world_size", 0)
    outcomes: dict[int, Outcome] = {}
    for rank in range(size):
        for path in (folder / f"outcome-{rank}", folder / FROM_RANKS / str(rank)):
            if path.is_file():
                outcomes[rank] = pickle.loads(path.read_bytes())
    failed = {rank: outcome for rank, outcome in outcomes.items() if "error" in outcome}
    verdict = record.get("failure")
    if status == 0 and not failed:
        missing = [rank for rank in range(size) if rank not in outcomes]
        if missing or not size:
            raise RankFailed(
                f"rank {missing[0] if missing else '?'} of {size} ended well and returned nothing -- its process ended "
                "inside the function (os._exit, exec?) -- return from the function instead",
                rank=missing[0] if missing else None,
                status=0,
            )
        return [outcomes[rank] for rank in range(size)]
    if verdict is not None and verdict.get("rank") not in failed:
        # The rank was killed, or ended in native code, so there is no exception. Or it was a server, or the evaluator.
        raise job_failure(status, refusal, record)
    if failed:
        # Clocks of different hosts cannot be compared, so the command says then which rank failed first.
        first = verdict.get("rank") if verdict is not None and len(record.get("hosts", ())) > 1 else None
        rank = min(failed, key=lambda one: (failed[one]["follows"], one != first, failed[one]["at"]))
        host = _host_of(record, rank)
        raise _rank_exception(rank, size, host, failed[rank], status)
    raise job_failure(status, refusal, record)


def _host_of(record: Mapping[str, Any], rank: int) -> str | None:
    for host in record.get("hosts", ()):
        if host["first_rank"] <= rank < host["first_rank"] + host["ranks"]:
            return str(host["name"])
    return None


def job_failure(status: int, refusal: str, record: Mapping[str, Any]) -> Exception:
    """Returns the exception for a job that ended with this status and whose ranks sent no Python exception."""
    if refusal:
        record = {}  # the record is an earlier run's, in the same folder
    last = refusal or record.get("reason") or f"`cohort run` ended with status {status}"
    verdict = record.get("failure")
    if verdict is not None:
        rank = verdict.get("rank")
        who = f"rank {rank} of {record['world_size']}" if rank is not None else f"{verdict['role']} {verdict['number']}"
        lines = verdict["last_stderr"].rstrip()
        return RankFailed(
            f"{who} (host {verdict['host']}) failed: {verdict['status']}, after "
            f"{verdict['after_seconds']:.1f} s" + (f" -- the last lines of its stderr:\n{lines}" if lines else ""),
            rank=rank,
            host=verdict["host"],
            status=status,
        )
    if status == 124:
        return Timeout(f"run: {last}")
    if status == 2:  # the command's own status; a rank's status is in the verdict
        return InvalidArgument(f"run: {last}")
    if status == 127:
        return Unavailable(f"run: {last}")
    return RankFailed(f"the job ended with status {status} -- {last}", status=status)


def _rank_exception(rank: int, size: int, host: str | None, outcome: Outcome, status: int) -> Exception:
    """Returns the exception to raise: the rank's own, if it could be sent, else RankFailed."""
    where = f"rank {rank} of {size}" + (f" (host {host})" if host else "")
    text = outcome["traceback"].rstrip()
    if outcome["where"] == "load":
        same = set(_search_path(None)) <= set(outcome["path"])  # an executor of Spark's has its own path
        path = "this process's sys.path" if same else "its host's sys.path, not this process's (on Spark, the executor's)"
        message = (
            f"{where} cannot read the call -- {outcome['error']} -- it runs {outcome['python']} with {path}; "
            "what cannot be imported there can be sent by value: cloudpickle.register_pickle_by_value(module)"
        )
    elif outcome["where"] == "result":
        message = f"the result of {where} cannot be sent back -- {outcome['error']} -- return plain values, arrays or tensors"
    else:
        message = f"{where} raised {outcome['error']}"
    failure = RankFailed(f"{message}\n\n{text}" if text else message, rank=rank, host=host, status=status, traceback=text)
    failure.cause = outcome["error"]
    data = outcome.get("exception")
    if data is not None:
        try:
            original = pickle.loads(data)
        except Exception:
            return failure
        if isinstance(original, Exception):
            original.__cause__ = failure
            return original
    return failure


def _load(rank: int, outcome: Outcome) -> Any:
    value = outcome["value"]
    assert value is not None
    try:
        return pickle.loads(value)
    except Exception as error:
        raise RankFailed(
            f"the result of rank {rank} cannot be read here -- {type(error).__name__}: {error} -- return plain values, "
            "arrays or tensors",
            rank=rank,
        ) from error


def first_value(outcomes: Sequence[Outcome]) -> Any:
    """Returns rank 0's result."""
    return _load(0, outcomes[0])
