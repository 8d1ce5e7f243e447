#!/usr/bin/env python3
"""The cost of `cohort.keras`: run with `cohort run -np N`, and the Keras that KERAS_BACKEND names.

    overhead  in a world of one: a step of a model with 60 small variables, with the optimizer as it is and distributed
    exposed   on two ranks: a step of 25 M parameters, with the optimizer as it is and distributed; what the second takes
              longer is the communication that is not hidden. `nn` instead of a Keras: cohort.nn.DistributedDataParallel
    fit       the same within `fit`, between the beginning and the end of each batch

The two kinds of steps take turns, in rounds; medians.
"""

import argparse
import statistics
import time

import numpy as np

WIDTH, LAYERS = 2500, 4  # 25 M parameters


def interleaved(kinds, rounds, steps):
    """{name: median milliseconds of a step}."""
    times = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, step in kinds.items():
            for _ in range(steps):
                begin = time.perf_counter()
                step()
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(one[len(one) // 10 :]) for name, one in times.items()}


def keras_steps(wrap, layers, width, batch):
    """A function that makes one step of a model, as `fit` makes it."""
    import keras

    model = keras.Sequential([keras.layers.Input((width,)), *(keras.layers.Dense(width) for _ in range(layers))])
    model.compile(optimizer=wrap(keras.optimizers.SGD(1e-4)), loss="mse")
    x = keras.ops.convert_to_tensor(np.random.default_rng(1).normal(size=(batch, width)).astype("float32"))

    def step():
        model.train_on_batch(x, x)

    for _ in range(3):
        step()
    return step


def fit_steps(wrap, batch, steps):
    """A function that trains for so many steps, and gives the milliseconds of each."""
    import keras

    model = keras.Sequential([keras.layers.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(LAYERS))])
    model.compile(optimizer=wrap(keras.optimizers.SGD(1e-4)), loss="mse")
    x = np.random.default_rng(1).normal(size=(batch * steps, WIDTH)).astype("float32")
    taken = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            taken.append((time.perf_counter() - self.began) * 1e3)

    def train():
        taken.clear()
        model.fit(x, x, batch_size=batch, shuffle=False, verbose=0, callbacks=[Clock()])
        return list(taken)

    train()
    return train


def nn_steps(wrap, batch):
    import torch

    model = wrap(torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    x = torch.randn(batch, WIDTH)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "exposed", "fit"])
    parser.add_argument("--nn", action="store_true", help="cohort.nn in the place of Keras")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    if options.nn:
        import cohort
        import cohort.nn

        cohort.init()
        rank, name = cohort.rank(), "cohort.nn"
        kinds = {
            "plain": nn_steps(lambda one: one, options.batch),
            "distributed": nn_steps(lambda one: cohort.nn.DistributedDataParallel(one), options.batch),
        }
        steps = 3
    else:
        import cohort.keras as hvd
        import keras

        hvd.init()
        keras.utils.set_random_seed(1)
        rank, name = hvd.rank(), keras.backend.backend()
        layers, width, batch, steps = (30, 32, 8, 20) if options.what == "overhead" else (LAYERS, WIDTH, options.batch, 3)
        wraps = {"plain": lambda one: one, "distributed": hvd.DistributedOptimizer}
        if options.what == "fit":
            kinds = {name: fit_steps(wrap, options.batch, 5) for name, wrap in wraps.items()}
        else:
            kinds = {name: keras_steps(wrap, layers, width, batch) for name, wrap in wraps.items()}
    if options.what == "fit":
        rounds = [{name: train() for name, train in kinds.items()} for _ in range(options.rounds)]
        found = {name: statistics.median([ms for one in rounds for ms in one[name][1:]]) for name in kinds}
    else:
        found = interleaved(kinds, options.rounds, steps)
    longer = found["distributed"] - found["plain"]
    if rank == 0:
        print(
            f"{options.what} {name}: plain {found['plain']:.3f} ms, distributed {found['distributed']:.3f} ms, "
            f"longer by {longer:.3f} ms ({100 * longer / found['distributed']:.1f} % of the step)",
            flush=True,
        )


if __name__ == "__main__":
    main()
