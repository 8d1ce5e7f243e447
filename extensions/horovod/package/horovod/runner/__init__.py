"""`horovod.run`: a function on N processes, from a program or a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def run(func: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None,
        num_proc: int | None = None, min_num_proc: int | None = None, max_num_proc: int | None = None,
        slots: int | None = None, reset_limit: int | None = None, cooldown_range: Sequence[int] | None = None,
        hosts: str | None = None, hostfile: str | None = None, host_discovery_script: str | None = None,
        start_timeout: float | None = None, ssh_port: int | None = None, ssh_identity_file: str | None = None,
        disable_cache: bool | None = None, output_filename: str | None = None, verbose: bool | None = None,
        use_gloo: bool | None = None, use_mpi: bool | None = None, mpi_args: str | None = None,
        network_interface: str | None = None, network_interfaces: str | None = None, executable: str | None = None,
        np: int | None = None, min_np: int | None = None, max_np: int | None = None) -> list[Any]:  # fmt: skip
    """Calls `func(*args, **kwargs)` on `num_proc` (1) processes; returns their results, by rank.

    hosts               "a:4,b:4": hosts and their slots, filled in this order; default: this host, or the hosts
                        of the Slurm allocation that this process is in
    hostfile            a file of hosts instead, with lines `HOST slots=N`
    ssh_port            the port of their sshd
    ssh_identity_file   the private key to log in with
    network_interfaces  names of interfaces that hosts use with each other, "eth0,ib0"; default: all
    start_timeout       seconds for all ranks to be running; default: HOROVOD_START_TIMEOUT, else 30
    output_filename     a folder that also gets the ranks' output, as rank.N/{stdout,stderr}

    The arguments are those of Horovod's `run`. Arguments for an elastic job, and values without meaning, raise
    ValueError; arguments that mean nothing here cause one line on stderr. Otherwise like `cohort.run`, which it calls.
    """
    import cohort
    from horovod.runner import _launching

    given = dict(
        min_num_proc=min_num_proc if min_num_proc is not None else min_np,
        max_num_proc=max_num_proc if max_num_proc is not None else max_np,
        slots_per_host=slots, reset_limit=reset_limit, blacklist_cooldown_range=cooldown_range, hosts=hosts,
        hostfile=hostfile, host_discovery_script=host_discovery_script, start_timeout=start_timeout, ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file, disable_cache=disable_cache, output_filename=output_filename,
        verbose=verbose, gloo=use_gloo, mpi=use_mpi, mpi_args=mpi_args,
        network_interfaces=network_interfaces if network_interfaces is not None else network_interface,
    )  # fmt: skip
    count = num_proc if num_proc is not None else np
    plan = _launching.plan_of(1 if count is None else count, given)
    if plan.elastic:
        raise ValueError(
            f"{', '.join(name for name in _launching.ELASTIC if given.get(name) is not None)}: a job that calls a function "
            "cannot be elastic yet -- put the function into a program: horovodrun --min-np N -np N python train.py"
        )
    _launching.tell(plan.notes, "horovod.run")
    return cohort.run(func, args, kwargs, np=plan.processes, hosts=plan.hosts, hostfile=plan.hostfile,
                      env=plan.environment, start_timeout=plan.start_timeout, run_dir=plan.folder,
                      executable=executable, options=["--as-horovod", *plan.ways])  # fmt: skip
