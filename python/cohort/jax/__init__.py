"""Horovod's API for JAX over Cohort: operations by name between processes, at once and within compiled programs.

    import cohort.jax as hvd

    hvd.init()
    parameters = hvd.broadcast_parameters(parameters)
    step = jax.jit(hvd.value_and_grad(loss))      # gradients are those of all ranks
    value, gradients = step(parameters, batch)

docs/reference/jax.md says what is there. Arrays are in the host's memory, one of each process.
"""

from __future__ import annotations

from cohort._horovod.exceptions import HorovodInternalError
from cohort._horovod.objects import allgather_object, broadcast_object
from cohort._horovod.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    is_process_set_registered,
    remove_process_set,
)
from cohort._horovod.reduce_ops import Average, Max, Min, Product, Sum
from cohort._horovod.runtime import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from cohort.jax import _cluster, _life
from cohort.jax._collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allreduce,
    join,
    reducescatter,
)
from cohort.jax._errors import as_internal_error
from cohort.jax._gradients import grad, reduce_gradients, reduce_tree, value_and_grad
from cohort.jax.compression import Compression
from cohort.jax.functions import broadcast_parameters

__all__ = [
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "as_internal_error",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "grad",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_process_set_registered",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "reduce_gradients",
    "reduce_tree",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "value_and_grad",
]

_life.watch()
_cluster.register()
