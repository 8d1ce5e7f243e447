"""Digits with Keras 3 and any of its backends. Take `import horovod.keras as hvd`, and it is a Horovod program.

    KERAS_BACKEND=torch cohort run -np 2 examples/09-keras/digits_keras.py      # or tensorflow, jax

The lines that make it distributed are marked with (1) to (5).
"""

import argparse
import struct
import time
from pathlib import Path

import keras
import numpy as np

import cohort.keras as hvd

FOLDER = Path(__file__).resolve().parents[2] / "data" / "digits"


def read_idx(path: Path) -> np.ndarray:
    """A file of the MNIST format."""
    data = path.read_bytes()
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def load() -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and test images [n, 28, 28, 1], mean 0 and deviation 1 over the training images, with their labels."""
    parts = []
    for part in ("train", "t10k"):
        images = read_idx(FOLDER / f"{part}-images-idx3-ubyte").astype("float32")[..., None] / 255
        images = keras.ops.convert_to_numpy(keras.ops.image.resize(images, (28, 28), data_format="channels_last"))
        parts.append((images, read_idx(FOLDER / f"{part}-labels-idx1-ubyte").astype("int32")))
    mean, deviation = parts[0][0].mean(), parts[0][0].std()
    return [((images - mean) / deviation, labels) for images, labels in parts]


def network() -> keras.Model:
    """Returns the network of the other examples."""
    return keras.Sequential([
        keras.layers.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ])  # fmt: skip


class Report(keras.callbacks.Callback):
    """A line for each epoch, from rank 0."""

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.begin = time.perf_counter()

    def on_test_begin(self, logs: dict | None = None) -> None:
        self.seconds = time.perf_counter() - self.begin

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if hvd.rank() == 0:
            print(
                f"epoch {epoch + 1}: loss {logs['loss']:.4f}, accuracy {logs['val_accuracy']:.4f}, "
                f"{self.samples / self.seconds:.0f} samples/s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all processes")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--checkpoint", default="", help="file for model and optimizer after each epoch: NAME.keras")
    options = parser.parse_args()

    hvd.init()  # (1)
    keras.utils.set_random_seed(1)
    train, test = load()
    images, labels = (part[hvd.rank() :: hvd.size()] for part in train)  # (2) parts may differ in size
    tested = tuple(part[hvd.rank() :: hvd.size()] for part in test)

    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(options.lr, momentum=0.9))  # (3)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    report = Report()
    report.samples = len(train[0])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), report]  # (4)
    if hvd.rank() == 0 and options.checkpoint:  # (5)
        callbacks.append(keras.callbacks.ModelCheckpoint(options.checkpoint))
    batch = options.batch_size // hvd.size()
    model.fit(images, labels, batch, options.epochs, verbose=0, callbacks=callbacks, validation_data=tested)
    hvd.shutdown()


if __name__ == "__main__":
    main()
