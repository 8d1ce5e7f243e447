"""Differences from Horovod and torch.distributed, by name, for `cohort doctor --horovod` and docs/coming-from."""

from __future__ import annotations

import fnmatch
from typing import Optional

# (pattern of names, difference). A name that ends with (ARGUMENT) stands for that argument.
NOTES = {
    "horovod": [
        ("horovod.*.DistributedOptimizer(gradient_predivide_factor)",
         "0 or less is a ValueError when the optimizer is made; honoured in groups, too"),
        ("horovod.*.DistributedOptimizer(groups)", "0 means no groups; another type than a number or lists is a ValueError"),
        ("horovod.*.DistributedOptimizer(num_groups)", "deprecated, as in Horovod: groups"),
        ("horovod.tensorflow.DistributedOptimizer", "of Keras's optimizers; one of TensorFlow 1 is a ValueError"),
        ("horovod.*.Adasum", "any number of ranks and process sets; leave out the factor local_size() that Horovod's needs "
         "with NCCL"),
        ("horovod.*.SyncBatchNorm", "on the CPU as well, and with batches of different sizes"),
        ("horovod.*mpi_built", "False: no MPI is used"),
        ("horovod.*mpi_enabled", "False: no MPI is used"),
        ("horovod.*mpi_threads_supported", "a ValueError: no MPI is used"),
        ("horovod.*gloo_built", "True, for programs that ask whether they may do without MPI; Gloo is not used"),
        ("horovod.*gloo_enabled", "True, for programs that ask whether they may do without MPI; Gloo is not used"),
        ("horovod.*init(comm)", "a list of ranks, or an mpi4py communicator that stands for one: messages do not go by MPI"),
        ("horovod.*start_timeline", "needs no variable; while one is written it is a ValueError"),
        ("horovod.*add_process_set", "needs no variable HOROVOD_DYNAMIC_PROCESS_SETS"),
        ("horovod.*.allreduce*(average)", "deprecated, as in Horovod: op=hvd.Average or hvd.Sum"),
        ("horovod.*.elastic.run", "outside of `cohort run --min-np` it goes on with the ranks that are there"),
        ("horovod.*broadcast_global_variables", "not here, a ValueError: it meant graphs of TensorFlow 1; hvd.broadcast_variables"),
        ("horovod.*.BroadcastGlobalVariablesHook", "not here: sessions of TensorFlow 1; hvd.broadcast_variables before the first step"),
        ("horovod.tensorflow.data*", "not here: tf.data's own service, or dataset.shard(hvd.size(), hvd.rank())"),
        ("horovod.tensorflow.*DistributedGradientTape(device_*)", "means nothing: tensors are in the host's memory"),
        ("horovod.*.callbacks.BroadcastGlobalVariablesCallback", "acts before the first step, not after it"),
        ("horovod.*.callbacks.MetricAverageCallback", "averages by samples, not by ranks"),
        ("horovod.run(use_mpi)", "means nothing: no MPI is used"),
        ("horovod.run(min_num_proc)", "a ValueError: elastic jobs are for programs, by `cohort run --min-np`"),
        ("horovod.ray.RayExecutor(min_workers)", "a ValueError: the number of ranks is fixed"),
    ],
    "torchrun": [
        ("torch.distributed.init_process_group(backend)", 'unchanged, it is torch\'s own backend; init_process_group("cohort") '
         "is Cohort's"),
        ("torch.multiprocessing.spawn", "starts the ranks itself, as before; under `cohort run` call the function once, in each rank"),
        ("torch.distributed.monitored_barrier", "before torch 2.14 torch grants it to Gloo alone: cohort.monitored_barrier()"),
        ("torch.distributed.split_group", "not on the backend cohort: torch asks for an accelerator; new_group"),
        ("torch.distributed.shrink_group", "not on the backend cohort: an elastic job forms its group again"),
        ("torch.distributed.*symmetric_memory*", "not on the backend cohort: torch has it for accelerators alone"),
        ("torch.distributed.*context_parallel*", "not on the CPU: torch has no attention for it there"),
        ("torch.distributed.rpc*", "torch's own, by its TensorPipe: nothing of it goes through Cohort"),
        ("torch.distributed.*batched_powerSGD_hook", "fails in torch 2.13, over Gloo too: powerSGD_hook"),
        ("torch.distributed.*bf16_compress_hook", "torch asks for CUDA and NCCL"),
        ("torch.distributed.new_subgroups", "torch asks for CUDA"),
        ("torchrun --use-env", "leave it out: LOCAL_RANK is always set"),
    ],
}


def note_on(kind: str, name: str) -> Optional[tuple[str, str]]:
    """Returns (state, note) of a name; None if there is no note."""
    for pattern, note in NOTES[kind]:
        if fnmatch.fnmatchcase(name, pattern) and name.endswith(")") == pattern.endswith(")"):
            return ("missing" if note.startswith("not ") else "differs"), note
    return None


def table(kind: str) -> str:
    """Returns the table for the page in docs/coming-from."""
    rows = [f"| `{pattern}` | {note} |" for pattern, note in NOTES[kind]]
    return "\n".join(["| name | what differs |", "|---|---|", *rows])
