"""A rank of bench/compare jax: a program of JAX that makes gradients and reduces them, in several ways.

usage: jax_steps.py FOLDER         as a rank of `cohort run`
"""
import functools
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.dont_write_bytecode = True

import cohort.jax as hvd  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from cohort.jax import _ffi  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from lib import worker  # noqa: E402

UNITS = {"K": 1 << 10, "M": 1 << 20}


def lengths(shape):
    count, size = shape.split("x")
    unit = UNITS.get(size[-1], 1)
    return [int(size.rstrip("KM")) * unit // 4] * int(count)


def by_name(way, arrays):
    names = [f"{way}.{i}.{array.size}" for i, array in enumerate(arrays)]
    return jax.jit(lambda *arrays: hvd.reduce_gradients([2 * array for array in arrays], names, op=hvd.Sum)), arrays


def by_callback(way, arrays):
    step, arrays = by_name(way, arrays)
    usable, _ffi.is_usable = _ffi.is_usable, lambda: False
    try:
        return step.lower(*arrays).compile(), arrays
    finally:
        _ffi.is_usable = usable


def by_gloo(way, arrays):
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    spread = NamedSharding(mesh, PartitionSpec("ranks"))
    whole = [jax.make_array_from_process_local_data(spread, np.asarray(array)) for array in arrays]
    reduce = jax.shard_map(lambda *arrays: [jax.lax.psum(2 * array, "ranks") for array in arrays], mesh=mesh,
                           in_specs=PartitionSpec("ranks"), out_specs=PartitionSpec())
    return jax.jit(reduce), whole


def by_nothing(way, arrays):
    return jax.jit(lambda *arrays: [2 * array for array in arrays]), arrays


WAYS = {"cohort": by_name, "callback": by_callback, "gloo": by_gloo, "nothing": by_nothing}


@functools.lru_cache(maxsize=None)
def program(way, shape):
    """Compiled, and its first results checked."""
    arrays = [jnp.full(length, float(i % 97 + hvd.rank()), "float32") for i, length in enumerate(lengths(shape))]
    step, arrays = WAYS[way](way, arrays)
    for i, result in enumerate(step(*arrays)):
        own = [2.0 * (i % 97 + rank) for rank in range(hvd.size())]
        expected = own[hvd.rank()] if way == "nothing" else sum(own)
        if not bool((np.asarray(result.addressable_data(0)) == expected).all()):
            raise SystemExit(f"jax_steps: {way} {shape}: array {i} is {result.addressable_data(0)}, not {expected}")
    return step, arrays


def answer(words):
    way, shape, steps = words[0], words[1], int(words[2])
    step, arrays = program(way, shape)
    hvd.barrier()
    jax.block_until_ready(step(*arrays))
    return worker.timed(hvd.barrier, lambda: jax.block_until_ready(step(*arrays)), steps)


def main():
    jax.distributed.initialize()  # for Gloo; found by cohort.jax
    hvd.init()
    worker.serve(sys.argv[1], hvd.rank(), f"jax {jax.__version__}", answer)
    hvd.shutdown()


if __name__ == "__main__":
    main()
