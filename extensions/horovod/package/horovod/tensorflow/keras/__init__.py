"""`import horovod.tensorflow.keras as hvd`: all names are those of `cohort.keras`, for the Keras that tf.keras is."""

from __future__ import annotations

from horovod.keras import *  # noqa: F403
from horovod.keras import __dir__, __getattr__  # noqa: F401
