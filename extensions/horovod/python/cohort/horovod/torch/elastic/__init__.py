"""Training that survives failures and changes of hosts: states that can be saved, restored and sent, and `run`.

`run` forms a new world of the remaining processes and continues from the last commit. The launcher restarts processes.
"""

from cohort.horovod import elastic
from cohort.horovod.elastic import *  # noqa: F403
from cohort.horovod.torch.elastic import state
from cohort.horovod.torch.elastic.sampler import ElasticSampler
from cohort.horovod.torch.elastic.state import *  # noqa: F403

__all__ = [*elastic.__all__, *state.__all__, "ElasticSampler"]
