"""Cases of the tests of `cohort.keras` for two ranks, one after the other. Each is printed when it is done. Keras is the
interpreter's; KERAS_BACKEND or TF_USE_LEGACY_KERAS selects the backend."""

import json
import os
import sys
import traceback
import warnings

import numpy as np

import cohort.keras as hvd
from cohort.keras import _hooks, _reduction, _training

LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
if LEGACY:
    import tf_keras as keras

    BACKEND = "tensorflow"
else:
    import keras

    BACKEND = keras.backend.backend()
ON_TF = BACKEND == "tensorflow"
SCENARIOS = {}
FOLDER = os.environ.get("KERAS_TEST_FOLDER", ".")


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


rank = size = 0


def data(samples, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(samples, 6)).astype("float32")
    return x, (x.sum(1, keepdims=True) > 0).astype("float32")


def network(seed, *more):
    model = keras.Sequential([
        keras.layers.Input((6,)), *more, keras.layers.Dense(8, activation="tanh", name="hidden"),
        keras.layers.Dense(1, name="out"),
    ])  # fmt: skip
    random = np.random.default_rng(seed)
    for weight in model.weights:
        weight.assign(random.normal(size=tuple(weight.shape)).astype("float32"))
    return model


def flat(model):
    return np.concatenate([np.asarray(_flavored(one)).reshape(-1) for one in model.weights])


def _flavored(variable):
    return variable.numpy() if LEGACY else keras.ops.convert_to_numpy(variable)


def broadcast():
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0)


def same_bits(model, what=flat):
    """Raises unless all ranks have the same weights."""
    everyone = hvd.allgather_object(what(model).tobytes())
    assert len(set(everyone)) == 1, "ranks have different weights"


def close(model, other, limit=1e-6):
    worst = float(np.abs(flat(model) - flat(other)).max())
    assert worst <= limit, f"the weights differ from one process's by {worst}"
    return worst


def together(parts):
    """Yields, for each step, the batches of all ranks that still have one, joined to one batch."""
    for step in range(max(map(len, parts))):
        ours = [part[step] for part in parts if step < len(part)]
        yield np.concatenate([x for x, _ in ours]), np.concatenate([y for _, y in ours])


def batches(x, y, batch):
    return [(x[at : at + batch], y[at : at + batch]) for at in range(0, len(x), batch)]


def expected(seed, optimizer, parts, epochs=1, loss="mse", model=None):
    """Trains one process on all batches, and returns its model."""
    model = model or network(seed)
    model.compile(optimizer=optimizer, loss=loss)
    for _ in range(epochs):
        for x, y in together(parts):
            model.train_on_batch(x, y)
    return model


def sgd(**more):
    return keras.optimizers.SGD(0.1, **more)


def fit(model, x, y, optimizer=None, callbacks=None, compile_with=None, **more):
    if optimizer is not None:
        model.compile(optimizer=optimizer, loss="mse", **(compile_with or {}))
    callbacks = [broadcast()] if callbacks is None else callbacks
    return model.fit(x, y, **{"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": callbacks, **more})


def half(x, y):
    count = len(x) // size
    return x[rank * count : (rank + 1) * count], y[rank * count : (rank + 1) * count]


def equal_parts(x, y, batch=8):
    count = len(x) // size
    return [batches(x[r * count : (r + 1) * count], y[r * count : (r + 1) * count], batch) for r in range(size)]


def raises(kind, words, call):
    """Raises unless the call raises an error of this kind with these words."""
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), f"{words} are not in: {error}"
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


# --- equal to one process ---


@scenario
def weights_are_those_of_one_process():
    x, y = data(64)
    model = network(seed=10 + rank)  # unequal until the callback
    fit(model, *half(x, y), hvd.DistributedOptimizer(sgd()), epochs=3)
    same_bits(model)
    return close(model, expected(10, sgd(), equal_parts(x, y), epochs=3))


@scenario
def adam_and_momentum_too():
    x, y = data(64)
    found = []
    for make in (lambda: keras.optimizers.Adam(0.01), lambda: sgd(momentum=0.9)):
        model = network(seed=20 + rank)
        fit(model, *half(x, y), hvd.DistributedOptimizer(make()), epochs=2)
        same_bits(model)
        found.append(close(model, expected(20, make(), equal_parts(x, y), epochs=2), 1e-5))
    return found


@scenario
def legacy_optimizers_too():
    if not LEGACY:
        return "of tf_keras alone"
    x, y = data(45)
    ours, parts = [slice(0, 29), slice(29, 45)][rank], [batches(x[:29], y[:29], 8), batches(x[29:], y[29:], 8)]
    model = network(seed=11 + rank)
    fit(model, x[ours], y[ours], hvd.DistributedOptimizer(keras.optimizers.legacy.SGD(0.1, momentum=0.9)), epochs=2)
    same_bits(model)
    return close(model, expected(11, keras.optimizers.legacy.SGD(0.1, momentum=0.9), parts, epochs=2))


@scenario
def without_the_hook_it_is_seen():
    """The first test without the hook: refused at once, else refused by fit, and without these checks wrong."""
    mixin = _hooks._Keras2 if LEGACY else _hooks._Keras3
    name = "aggregate_gradients" if LEGACY else "_clip_gradients"
    hook = getattr(mixin, name)
    prove, check, compare = _hooks.prove, _training.Training.check_reached, _training.Training.compare_weights
    delattr(mixin, name)
    try:
        raises(RuntimeError, [name, "ranks would train apart"], lambda: hvd.DistributedOptimizer(sgd()))
        _hooks.prove = lambda *_: None
        x, y = data(64)
        model = network(seed=10)
        raises(RuntimeError, [name, "reduced nothing"], lambda: fit(model, *half(x, y), hvd.DistributedOptimizer(sgd())))
        _training.Training.check_reached = lambda self: None
        model = network(seed=10)
        raises(ValueError, ["different weights after the first epoch"],
               lambda: fit(model, *half(x, y), hvd.DistributedOptimizer(sgd())))  # fmt: skip
        _training.Training.compare_weights = lambda *_, **__: None
        model = network(seed=10)
        fit(model, *half(x, y), hvd.DistributedOptimizer(sgd()), epochs=3)
        raises(AssertionError, ["ranks have different weights"], lambda: same_bits(model))
        raises(AssertionError, ["differ from one process's"],
               lambda: close(model, expected(10, sgd(), equal_parts(x, y), epochs=3)))  # fmt: skip
    finally:
        setattr(mixin, name, hook)
        _hooks.prove, _training.Training.check_reached, _training.Training.compare_weights = prove, check, compare


@scenario
def unequal_weights_are_refused():
    x, y = data(64)
    model = network(seed=30 + rank)
    return raises(ValueError, ["different weights before the first step", "BroadcastGlobalVariablesCallback"],
                  lambda: fit(model, *half(x, y), hvd.DistributedOptimizer(sgd()), callbacks=[]))  # fmt: skip


@scenario
def in_an_elastic_job_they_become_the_first_ranks():
    """As in Horovod's own example, whose first `fit` makes variables for KerasState, and may meet new ranks."""
    if LEGACY:
        return "builds the model in its own time"
    x, y = data(64)
    model = network(seed=31 + rank)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (1 + rank))), loss="mse")
    other = network(seed=31)
    other.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    if rank == 0:  # rank 0 has trained before
        for one in model, other:
            one.optimizer.build(one.trainable_variables)
            one.optimizer.iterations.assign(3)
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fit(model, *half(x, y), callbacks=[])
            fit(model, *half(x, y), callbacks=[])
    finally:
        del os.environ["HOROVOD_ELASTIC"]
    told = [str(one.message) for one in seen if "different weights" in str(one.message)]
    assert len(told) == (1 if rank == 0 else 0), told
    same_bits(model)
    same_bits(model, lambda one: np.asarray([float(keras.ops.convert_to_numpy(one.optimizer.learning_rate))]))
    if rank == 0:
        for _ in range(2):
            for one_x, one_y in together(equal_parts(x, y)):
                other.train_on_batch(one_x, one_y)
        return close(model, other, 1e-5)
    return None


@scenario
def what_ranks_come_to_do_differently_is_seen():
    class OnOneRank(keras.callbacks.Callback):
        def __init__(self, epoch, change):
            super().__init__()
            self.epoch, self.change = epoch, change

        def on_epoch_end(self, epoch, logs=None):
            if rank == 1 and epoch == self.epoch:
                self.change(self.model)

    def rate(model):
        model.optimizer.learning_rate = 0.025

    def weights(model):
        model.weights[0].assign(_flavored(model.weights[0]) + 1)
        if BACKEND == "jax":
            model._jax_state = None

    x, y = data(32)
    told = []
    for epoch, change, words in (
        (2, rate, ["after epoch 3", "learning_rate is 0.1", "on rank 0 and 0.025", "on rank 1", "MetricAverageCallback"]),
        (1, weights, ["different weights after 4 epochs", "rank 1"]),
        (4, weights, ["different weights at the end of fit", "rank 1"]),
    ):
        if BACKEND == "jax" and change is weights:
            continue  # the weights go back to those of the compiled step
        one = OnOneRank(epoch, change)
        told.append(raises(ValueError, words, lambda: fit(
            network(seed=31), *half(x, y), hvd.DistributedOptimizer(sgd()), callbacks=[broadcast(), one], epochs=5)))  # fmt: skip
        fit(network(seed=31), *half(x, y), hvd.DistributedOptimizer(sgd(), compare_ranks=False),
            callbacks=[broadcast(), OnOneRank(epoch, change)], epochs=5)  # fmt: skip
    return told


@scenario
def a_value_within_a_graph_is_named():
    if not ON_TF:
        return "of TensorFlow alone"
    import tensorflow as tf

    return raises(TypeError, ["horovod.tensorflow"], lambda: tf.function(lambda x: hvd.allreduce(x))(tf.ones(2)))


@scenario
def unequal_epochs_are_refused():
    x, y = data(64)
    model = network(seed=30)
    return raises(ValueError, ["rank 0 from 0 to 1", "rank 1 from 0 to 2"],
                  lambda: fit(model, *half(x, y), hvd.DistributedOptimizer(sgd()), epochs=1 + rank))  # fmt: skip


# --- data ---


@scenario
def uneven_data():
    """Rank 0 has 29 samples, rank 1 has 16: so rank 0 has three whole batches and one of 5, and rank 1 has two."""
    x, y = data(45)
    ranges = [(0, 29), (29, 45)]
    begin, end = ranges[rank]
    parts = [batches(x[b:e], y[b:e], 8) for b, e in ranges]
    found = []
    for make in (lambda: keras.optimizers.Adam(0.01), lambda: sgd(momentum=0.9)):
        model = network(seed=40 + rank)
        fit(model, x[begin:end], y[begin:end], hvd.DistributedOptimizer(make()), epochs=2,
            validation_data=(x[: 10 + rank], y[: 10 + rank]))  # fmt: skip
        same_bits(model)
        same_bits(model, lambda one: np.concatenate([
            np.asarray(_flavored(v)).reshape(-1) for v in _training._flavor.optimizer_variables(one.optimizer)
        ]))  # fmt: skip
        found.append(close(model, expected(40, make(), parts, epochs=2), 1e-5))
    return found


@scenario
def uneven_steps_of_generators():
    """No rank knows how many batches there are; rank 0 has one, rank 1 four."""
    x, y = data(5 * 8)
    ours = [(0, 8), (8, 40)][rank]
    parts = [batches(x[:8], y[:8], 8), batches(x[8:], y[8:], 8)]

    def generate():
        yield from batches(x[ours[0] : ours[1]], y[ours[0] : ours[1]], 8)

    model = network(seed=50 + rank)
    model.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that it ran out of data
        model.fit(generate(), epochs=1, verbose=0, callbacks=[broadcast()])
    same_bits(model)
    return close(model, expected(50, sgd(), parts))


@scenario
def average_by_ranks():
    """Like Horovod: every rank counts equally, whatever its batch."""
    x, y = data(12)
    ours = slice(0, 8) if rank == 0 else slice(8, 12)
    model = network(seed=55)
    fit(model, x[ours], y[ours], hvd.DistributedOptimizer(sgd(), average_by="ranks"))
    other = network(seed=55)
    alone = [network(seed=55), network(seed=55)]
    for one, part in zip(alone, (slice(0, 8), slice(8, 12))):
        one.compile(optimizer=sgd(), loss="mse")
        one.train_on_batch(x[part], y[part])
    for weight, first, second in zip(other.weights, alone[0].weights, alone[1].weights):
        weight.assign((_flavored(first) + _flavored(second)) / 2)
    same_bits(model)
    return close(model, other)


@scenario
def one_rank_stops():
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank == 1 and epoch == 1:
                self.model.stop_training = True

    x, y = data(64)
    model = network(seed=60)
    history = fit(model, *half(x, y), hvd.DistributedOptimizer(sgd()), callbacks=[broadcast(), Stop()], epochs=9)
    assert len(history.epoch) == 2, history.epoch
    same_bits(model)


@scenario
def one_rank_stops_within_an_epoch():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if rank == 1 and batch == 1:
                self.model.stop_training = True

    x, y = data(64)
    model = network(seed=60)
    history = fit(model, *half(x, y), hvd.DistributedOptimizer(sgd()), callbacks=[broadcast(), Stop()], epochs=9)
    assert len(history.epoch) == 1, history.epoch
    same_bits(model)


# --- ways to train ---


@scenario
def eagerly():
    x, y = data(64)
    model = network(seed=70 + rank)
    fit(model, *half(x, y), hvd.DistributedOptimizer(sgd()), epochs=2, compile_with={"run_eagerly": True})
    same_bits(model)
    return close(model, expected(70, sgd(), equal_parts(x, y), epochs=2))


@scenario
def several_steps_in_one_execution():
    if BACKEND == "torch":
        return "not with torch"
    x, y = data(80)
    model = network(seed=71 + rank)
    fit(model, *half(x, y), hvd.DistributedOptimizer(sgd()), epochs=2, compile_with={"steps_per_execution": 4})
    same_bits(model)
    return close(model, expected(71, sgd(), equal_parts(x, y), epochs=2))


@scenario
def accumulated_gradients():
    found = {}
    x, y = data(64)
    if not LEGACY:
        model = network(seed=72 + rank)
        fit(model, *half(x, y), hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2)), epochs=2)
        same_bits(model)
        found["keras"] = close(model, expected(72, sgd(gradient_accumulation_steps=2), equal_parts(x, y), epochs=2))
    halved = [[(np.concatenate([p[i][0], p[i + 1][0]]), np.concatenate([p[i][1], p[i + 1][1]])) for i in (0, 2)]
              for p in equal_parts(x, y)]  # fmt: skip
    for average, rate in ((True, 0.1), (False, 0.2)):
        model = network(seed=72 + rank)
        fit(model, *half(x, y), hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2,
                                                        average_aggregated_gradients=average), epochs=2)  # fmt: skip
        same_bits(model)
        found[str(average)] = close(model, expected(72, keras.optimizers.SGD(rate), halved, epochs=2))
    return found


@scenario
def groups_compression_and_factors():
    x, y = data(64)
    found = {}
    plain = expected(73, sgd(), equal_parts(x, y))
    for name, options, limit in [
        ("groups", {"groups": 2}, 1e-6),
        ("fp16", {"compression": hvd.Compression.fp16}, 1e-3),
        ("bf16", {"compression": hvd.Compression.bf16}, 1e-2),
        ("predivide", {"gradient_predivide_factor": 2.0}, 1e-6),
    ]:
        model = network(seed=73 + rank)
        fit(model, *half(x, y), hvd.DistributedOptimizer(sgd(), **options))
        same_bits(model)
        found[name] = close(model, plain, limit)
    model = network(seed=73 + rank)
    groups = [[model.layers[-1].weights[0], model.layers[0].weights[1]], [model.layers[0].weights[0]]]
    fit(model, *half(x, y), hvd.DistributedOptimizer(sgd(), groups=groups))
    same_bits(model)
    found["lists"] = close(model, plain)
    model = network(seed=73 + rank)
    fit(model, *half(x, y), hvd.DistributedOptimizer(sgd(), op=hvd.Sum))
    same_bits(model)
    found["sum"] = close(model, expected(73, keras.optimizers.SGD(0.1 * size), equal_parts(x, y)), 1e-5)
    return found


@scenario
def local_variables():
    x, y = data(64)
    model = network(seed=74)
    optimizer = hvd.DistributedOptimizer(sgd())
    bias = model.layers[-1].weights[1]
    optimizer.register_local_var(bias)
    fit(model, *half(x, y), optimizer)
    same_bits(model, lambda one: np.asarray(_flavored(one.layers[0].weights[0])))
    values = hvd.allgather_object(float(_flavored(bias)[0]))
    assert values[0] != values[1], values
    partial = hvd.PartialDistributedOptimizer(sgd(), local_layers=model.layers[0])
    fit(model, *half(x, y), partial, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[])])
    kernels = hvd.allgather_object(_flavored(model.layers[0].weights[0]).tobytes())
    assert kernels[0] != kernels[1]


def embedder(seed):
    model = keras.Sequential([
        keras.layers.Input((4,), dtype="int32"), keras.layers.Embedding(50, 3), keras.layers.Flatten(), keras.layers.Dense(1),
    ])  # fmt: skip
    random = np.random.default_rng(seed)
    for weight in model.weights:
        weight.assign(random.normal(size=tuple(weight.shape)).astype("float32"))
    return model


@scenario
def embeddings():
    found = {}
    words = np.random.default_rng(1).integers(0, 50, size=(64, 4))
    y = (words.sum(1, keepdims=True) % 2).astype("float32")

    for dense in (False, True):
        # Rank 1 has a batch less.
        ours = slice(0, 32) if rank == 0 else slice(32, 56)
        parts = [batches(words[:32], y[:32], 8), batches(words[32:56], y[32:56], 8)]
        model = embedder(seed=75 + rank)
        fit(model, words[ours], y[ours], hvd.DistributedOptimizer(sgd(), sparse_as_dense=dense), epochs=2)
        same_bits(model)
        found[str(dense)] = close(model, expected(0, sgd(), parts, epochs=2, model=embedder(75)))
    return found


@scenario
def embeddings_and_a_rank_without_any_batch():
    """Rank 1 has no data, and so cannot know by itself that gradients are sparse."""
    if not ON_TF or LEGACY:
        return "only TensorFlow has sparse ones; Keras 2 refuses a fit without batches"
    words = np.random.default_rng(1).integers(0, 50, size=(32, 4))
    y = (words.sum(1, keepdims=True) % 2).astype("float32")
    import tensorflow as tf

    mine = tf.data.Dataset.from_tensor_slices((words, y)).take(32 if rank == 0 else 0).batch(8)
    for dense, eager in ((False, False), (True, False), (False, True), (True, True)):
        model = embedder(seed=77 + rank)
        optimizer = hvd.DistributedOptimizer(sgd(), sparse_as_dense=dense)
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=eager)
        for _ in range(2):  # the second time all ranks know
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the warning that it ran out of data
                model.fit(mine, epochs=1, verbose=0, callbacks=[broadcast()])
        same_bits(model)
        worst = close(model, expected(0, sgd(), [batches(words, y, 8)], epochs=2, model=embedder(77)))
    return worst


@scenario
def no_gradient_on_one_rank():
    model = network(seed=76)
    optimizer = hvd.DistributedOptimizer(sgd())
    variables = model.trainable_variables
    before = [np.array(_flavored(one)) for one in variables]
    ones = [np.ones(tuple(one.shape), "float32") for one in variables]
    convert = (lambda one: one) if LEGACY else keras.ops.convert_to_tensor
    if ON_TF:
        import tensorflow as tf

        convert = tf.constant
    gradients = [convert(one) for one in ones]
    if rank == 1:
        gradients[0] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if BACKEND == "torch":
            import torch

            with torch.no_grad():
                optimizer.apply_gradients(zip(gradients, variables))
        else:
            optimizer.apply_gradients(zip(gradients, variables))
    for i, (one, old) in enumerate(zip(variables, before)):
        step = 0.05 if i == 0 else 0.1
        assert np.allclose(_flavored(one), old - step, atol=1e-6), i


@scenario
def an_overflow_on_one_rank():
    x, y = data(64)
    mine_x, mine_y = half(x * 0.1, y * 0.1)  # so that no other values overflow
    if rank == 1:
        mine_x[8] = 3e38  # in the second batch
    policy = keras.mixed_precision.set_global_policy if LEGACY else keras.config.set_dtype_policy
    policy("mixed_float16")
    try:
        model = network(seed=77 + rank)
        model.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    finally:
        policy("float32")
    for weight in model.weights:
        weight.assign(_flavored(weight) * 0.1)
    outer = model.optimizer
    assert "LossScaleOptimizer" in type(outer).__name__, type(outer)
    fit(model, mine_x, mine_y)
    scale = float(_flavored(outer.dynamic_scale) if not LEGACY else outer.loss_scale)
    scales = hvd.allgather_object(scale)
    assert scales == [2.0**14] * 2, scales
    same_bits(model)
    assert np.isfinite(flat(model)).all()


@scenario
def compiled_by_xla():
    if not ON_TF:
        return "of TensorFlow alone"
    model = network(seed=78)
    return raises(ValueError, ["jit_compile", "XLA"],
                  lambda: model.compile(hvd.DistributedOptimizer(sgd()), "mse", jit_compile=True))  # fmt: skip


@scenario
def two_optimizers_in_one_step():
    if BACKEND == "jax":
        return "JAX's step has one"

    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(1)

        def call(self, x):
            return self.second(self.first(x))

        def train_step(self, data):
            x, y = data[:2]
            if ON_TF:
                import tensorflow as tf

                with tf.GradientTape(persistent=True) as tape:
                    loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
                for one, layer in ((self.one, self.first), (self.two, self.second)):
                    one.apply_gradients(zip(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights))
            else:
                import torch

                self.zero_grad()
                loss = ((self(x, training=True) - keras.ops.convert_to_tensor(y)) ** 2).mean()
                loss.backward()
                with torch.no_grad():
                    for one, layer in ((self.one, self.first), (self.two, self.second)):
                        one.apply([v.value.grad for v in layer.trainable_weights], layer.trainable_weights)
            return {"loss": loss}

    x, y = data(40)
    ours = slice(0, 16) if rank == 0 else slice(16, 40)

    def make(wrap):
        model = Two()
        model(np.zeros((1, 6), "float32"))
        random = np.random.default_rng(79)
        for weight in model.weights:
            weight.assign(random.normal(size=tuple(weight.shape)).astype("float32"))
        model.one, model.two = wrap(sgd()), wrap(keras.optimizers.SGD(0.05))
        model.compile()
        return model

    model, other = make(hvd.DistributedOptimizer), make(lambda one: one)
    fit(model, x[ours], y[ours])
    for one_x, one_y in together([batches(x[:16], y[:16], 8), batches(x[16:], y[16:], 8)]):
        other.train_on_batch(one_x, one_y)
    same_bits(model)
    return close(model, other)


@scenario
def two_models_of_equal_paths_in_one_graph():
    """Two models made by one function, each with an optimizer, train at the same time."""
    if not ON_TF or LEGACY:
        return "of TensorFlow's graphs"
    import tensorflow as tf

    def make():
        model = keras.Sequential([keras.layers.Dense(8, use_bias=False, name="d", kernel_initializer="zeros")], name="twin")
        model.build((None, 8))
        return model

    one, two = make(), make()
    assert one.trainable_variables[0].path == two.trainable_variables[0].path
    of_one, of_two = (hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2))
    of_one.build(one.trainable_variables), of_two.build(two.trainable_variables)

    @tf.function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            first, second = tf.reduce_sum(one(x)), 100.0 * tf.reduce_sum(two(x))
        of_one.apply(tape.gradient(first, one.trainable_variables), one.trainable_variables)
        of_two.apply(tape.gradient(second, two.trainable_variables), two.trainable_variables)

    for _ in range(20):
        step(tf.ones((1, 8)))
    for model, expected_weight in ((one, -20.0), (two, -2000.0)):
        np.testing.assert_allclose(flat(model), expected_weight, rtol=1e-5)
    return None


# --- callbacks ---


@scenario
def subclassed_models_are_built_first():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    x, y = data(64)
    keras.utils.set_random_seed(80 + rank)
    model = Own()
    fit(model, *half(x, y), hvd.DistributedOptimizer(sgd()))
    same_bits(model)


@scenario
def dropout_differs_by_rank():
    if LEGACY:
        return "of Keras 3"
    x, y = data(64)
    keras.utils.set_random_seed(80 + rank)
    model = network(80 + rank, keras.layers.Dropout(0.5))
    fit(model, *half(x, y), hvd.DistributedOptimizer(sgd()))
    same_bits(model)
    seeds = hvd.allgather_object([np.asarray(keras.ops.convert_to_numpy(v)).tolist() for v in model.non_trainable_variables])
    assert seeds[0] and seeds[0] != seeds[1], seeds


@scenario
def metrics_are_averaged_by_samples():
    x, y = data(48)
    ours = slice(0, 32) if rank == 0 else slice(32, 48)
    model = network(seed=81)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse", metrics=["mae"])
    history = fit(model, x[ours], y[ours], callbacks=[broadcast(), hvd.callbacks.MetricAverageCallback()],
                  validation_data=(x[16 * rank : 24 + 8 * rank], y[16 * rank : 24 + 8 * rank]))  # fmt: skip
    everyone = hvd.allgather_object(history.history)
    assert everyone[0] == everyone[1], everyone
    error = np.abs(np.asarray(_flavored(model(x)) if LEGACY else keras.ops.convert_to_numpy(model(x))) - y)
    assert abs(history.history["mae"][0] - error.mean()) < 1e-5, (history.history, error.mean())
    assert abs(history.history["loss"][0] - (error**2).mean()) < 1e-5
    validated = np.concatenate([error[0:24], error[16:32]])
    assert abs(history.history["val_mae"][0] - validated.mean()) < 1e-5, (history.history, validated.mean())
    return history.history


@scenario
def learning_rates():
    x, y = data(64)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if BACKEND == "jax":
                self.model.jax_state_sync()
            seen.append(round(float(_flavored(self.model.optimizer.learning_rate)), 6))

    model = network(seed=82)
    warm = hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, momentum_correction=False, verbose=1)
    later = hvd.callbacks.LearningRateScheduleCallback(0.2, 0.5, start_epoch=2, momentum_correction=False)
    history = fit(model, *half(x, y), hvd.DistributedOptimizer(sgd()), callbacks=[broadcast(), warm, later, Look()], epochs=4)
    # An epoch has 4 steps; the rate rises from half to all of it within 8 steps.
    assert seen[:8] == [round(0.1 + 0.1 * (i + 1) / 8, 6) for i in range(8)], seen
    assert seen[8:] == [0.2] * 4 + [0.1] * 4, seen
    assert np.allclose(history.history["lr"], [0.15, 0.2, 0.2, 0.1]), history.history
    same_bits(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = network(seed=82)
        fit(model, *half(x, y), hvd.DistributedOptimizer(sgd(momentum=0.9)),
            callbacks=[broadcast(), hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1.0 / (epoch + 1))], epochs=2)  # fmt: skip
    told = [str(one.message) for one in caught if "momentum" in str(one.message)]
    assert len(told) == (0 if BACKEND == "torch" else 1), told
    assert abs(model.optimizer.momentum - 0.9) < 1e-9
    # Rank 1 has fewer steps, and follows the rates of the steps that it lacks.
    ours = slice(0, 40) if rank == 0 else slice(40, 64)
    model = network(seed=82)
    fit(model, x[ours], y[ours], hvd.DistributedOptimizer(sgd()), callbacks=[
        broadcast(),
        hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1.0 - 0.5 * epoch, staircase=False, steps_per_epoch=5),
    ])  # fmt: skip
    same_bits(model)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model = network(seed=82)
    return raises(ValueError, ["LearningRateSchedule"], lambda: fit(
        model, *half(x, y), hvd.DistributedOptimizer(keras.optimizers.SGD(schedule)),
        callbacks=[broadcast(), hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)]))  # fmt: skip


@scenario
def files():
    """Saved here; the test loads the files in a process without Cohort."""
    x, y = data(64)
    model = network(seed=83 + rank)
    # An object, because Keras does not recognize a loss by its name again in an HDF5 file.
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), keras.losses.MeanSquaredError())
    fit(model, *half(x, y), epochs=2)
    names = [f"{FOLDER}/model.keras", f"{FOLDER}/model.h5"]
    if rank == 0:
        for name in names:
            model.save(name)
        np.save(f"{FOLDER}/weights.npy", flat(model))
    hvd.broadcast_object(None)
    fit(model, *half(x, y), callbacks=[broadcast()])  # as if nothing had happened
    for name in names:
        again = hvd.load_model(name)
        assert _reduction.of(again.optimizer) is not None
        assert int(_flavored(again.optimizer.iterations)) == 8, again.optimizer.iterations
        fit(again, *half(x, y))
        same_bits(again)
        close(again, model, 1e-5)
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=f"{FOLDER}/best.keras")
    fit(model, *half(x, y), callbacks=[broadcast(), hvd.callbacks.MetricAverageCallback(), best])
    hvd.broadcast_object(None)
    assert os.path.exists(f"{FOLDER}/best.keras")


@scenario
def values():
    assert hvd.allreduce(rank + 1.0) == 1.5
    assert hvd.allreduce([1, 2], op=hvd.Sum).tolist() == [2, 4]
    assert hvd.allreduce(np.float32(rank), name="most", op=hvd.Max) == 1
    assert hvd.allgather(np.full((rank + 1, 2), rank)).tolist() == [[0, 0], [1, 1], [1, 1]]
    assert hvd.broadcast(np.array([rank, 7]), 1).tolist() == [1, 7]
    assert hvd.reducescatter(np.arange(4.0), op=hvd.Sum).tolist() == ([0, 2] if rank == 0 else [4, 6])
    weight = network(seed=84).weights[0]
    assert hvd.allreduce(weight).shape == (6, 8)
    raises(ValueError, ["TensorFlow 2"], lambda: hvd.broadcast_global_variables(0))


@scenario
def arguments():
    for words, options in [
        (["op"], {"op": hvd.Max}),
        (["predivide"], {"gradient_predivide_factor": 0}),
        (["Average"], {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        (["backward_passes"], {"backward_passes_per_step": 0}),
        (["groups"], {"groups": [1]}),
        (["average_by"], {"average_by": "taste"}),
    ]:
        raises(ValueError, words, lambda options=options: hvd.DistributedOptimizer(sgd(), **options))
    raises(ValueError, ["no optimizer"], lambda: hvd.DistributedOptimizer(object()))
    raises(ValueError, ["already"], lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd())))
    optimizer = hvd.DistributedOptimizer(sgd())
    assert type(optimizer).__name__ == "SGD" and isinstance(optimizer, keras.optimizers.SGD)


@scenario
def process_sets():
    mine = hvd.add_process_set(hvd.ProcessSet([1]))
    x, y = data(64)
    model = network(seed=85 + rank)
    fit(model, *half(x, y), hvd.DistributedOptimizer(sgd(), process_set=mine), callbacks=[])
    close(model, expected(85 + rank, sgd(), [equal_parts(x, y)[rank]]))
    hvd.remove_process_set(mine)


@scenario
def elastic():
    x, y = data(64)
    model = network(seed=90 + rank)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    calls = []

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if len(calls) == 1 and state.epoch == 1 and batch == 2:
                raise hvd.HorovodInternalError("as if a rank had been lost")

    @hvd.elastic.run
    def train(state):
        calls.append((state.epoch, flat(model)))
        callbacks = [hvd.elastic.CommitStateCallback(state, batches_per_commit=100), Fail(),
                     hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]  # fmt: skip
        # The end of an epoch commits the state before the update, unless the updating callback comes first.
        fit(model, *half(x, y), callbacks=callbacks[::-1], epochs=3 - state.epoch)

    train(state)
    assert [epoch for epoch, _ in calls] == [0, 1], calls
    assert state.epoch == 3 and state.batch == 0
    same_bits(model)
    # The steps of epoch 0, of epoch 1 once more from its beginning, and of epoch 2.
    return close(model, expected(90, keras.optimizers.Adam(0.01), equal_parts(x, y), epochs=3), 1e-5)


def main(names):
    global rank, size
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for name in names or SCENARIOS:
        try:
            result = SCENARIOS[name]()
        except BaseException:
            print("SCENARIO " + json.dumps([name, rank, "failed", traceback.format_exc()]), flush=True)
            raise
        print("SCENARIO " + json.dumps([name, rank, "done", result]), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
