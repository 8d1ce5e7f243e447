"""The handlers, under their old name; they are in `cohort.horovod.torch.elastic.state`."""

from cohort.horovod.torch.elastic.state import *  # noqa: F403
