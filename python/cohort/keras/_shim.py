"""Temporary: until cohort.tensorflow and cohort.jax are there."""
import numpy as np
from cohort._horovod.process_sets import engine_of
from cohort._horovod.reduce_ops import ENGINE_OPS
from cohort._horovod.submit import Pending, named, started

class Compression:
    none = None

def _np(names, op, pre, post, pset, *arrays):
    arrays = [np.array(a) for a in arrays]
    shaped = [a.reshape(1) if a.ndim == 0 else a for a in arrays]
    full = [named("allreduce", n, pset) for n in names]
    works = started("ALLREDUCE", full, engine_of(pset).all_reduce_group, full, shaped, op=ENGINE_OPS[op], prescale=pre, postscale=post)
    Pending(works, lambda: None).wait()
    return [s.reshape(a.shape) for s, a in zip(shaped, arrays)]

def reduce_tf(gradients, names, *, op, prescale, postscale, process_set, compression=None, sparse_as_dense=False):
    import tensorflow as tf
    gradients = [tf.convert_to_tensor(g) for g in gradients]
    def call(*a):
        return _np(names, op, prescale, postscale, process_set, *[x.numpy() for x in a])
    out = tf.py_function(call, gradients, [g.dtype for g in gradients])
    for o, g in zip(out, gradients):
        o.set_shape(g.shape)
    return out

def allreduce_tf(x, op, name, process_set):
    return reduce_tf([x], [name], op=op, prescale=1.0, postscale=1.0, process_set=process_set)[0]

def reduce_jax(gradients, names, *, op, prescale, postscale, process_set, compression=None, sparse_as_dense=False):
    import jax
    return list(jax.pure_callback(lambda *a: tuple(_np(names, op, prescale, postscale, process_set, *a)),
        tuple(jax.ShapeDtypeStruct(g.shape, g.dtype) for g in gradients), *gradients))

def allreduce_jax(x, op, name, process_set):
    import jax
    return reduce_jax([jax.lax.stop_gradient(x)], [name], op=op, prescale=1.0, postscale=1.0, process_set=process_set)[0]
