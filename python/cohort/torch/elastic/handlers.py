"""The handlers, under their old name; they are in `cohort.torch.elastic.state`."""

from cohort.torch.elastic.state import *  # noqa: F403
