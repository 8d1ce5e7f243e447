"""Training that continues when ranks are lost, leave or come; its processes keep their memory (`cohort run --min-np`).

    state = cohort.elastic.State()
    state.add("model", net).add("optimizer", optimizer).add("sampler", sampler)
    state.best = 0.0

    @cohort.elastic.run
    def train(state, world):                                  # called again after each change
        model = cohort.nn.DistributedDataParallel(net, sampler=sampler)
        while sampler.epoch < 10:
            for x, y in loader:
                optimizer.zero_grad(); loss(model(x), y).backward(); optimizer.step()
                state.step()
            sampler.next_epoch()

    train(state)

No commit is needed: `state.step` marks the end of an optimizer step, and before the next world trains, all ranks get
the state of the last step that any of them has ended. docs/reference/elastic.md says what is kept and what is repeated.
Imports neither torch nor NumPy.
"""

from cohort.elastic._audit import Audit, audit
from cohort.elastic._run import MembershipChanged, World, run
from cohort.elastic._state import State

__all__ = ["Audit", "MembershipChanged", "State", "World", "audit", "run"]
