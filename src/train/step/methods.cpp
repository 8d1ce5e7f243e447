#include "train/step/methods.h"

namespace cohort::step {

Method data_parallel(bool divided) {
  using enum Meaning;
  const Meaning change = divided ? Refused : TakenIn;
  return {.name = std::string("DistributedDataParallel"),
          .trained = Meanings{.frozen = Rebased,  // a frozen parameter is treated like one that no rank uses
                              .thawed = change,
                              .added = change,
                              .removed = change,
                              .replaced = change,
                              .cast = change,
                              .moved = change},
          .agreed = Difference{"DistributedDataParallel", "models",
                               "build the same model with the same options on all ranks"},
          .decided = DecidedBy{"message"},
          .kept = KeptNames{"residuals"}};
}

Method power_sgd() {
  return {.name = std::string("PowerSGD"),
          .trained = None("the reducer whose hook it is looks at the parameters"),
          .agreed = Difference{"PowerSGD", "states",
                               "give all ranks the same options, and load on all what one step has saved"},
          .decided = DecidedBy{"averages"},
          .kept = KeptNames{"error and Q"}};
}

Method sharded() {
  return {.name = std::string("Sharded"),
          .trained = None("the DistributedDataParallel that it is over looks at them, and refuses changes"),
          .agreed = Difference{"Sharded::step", "optimizers",
                               "each steps a part of the model by its own: set the same on all ranks (a schedule that "
                               "goes by a loss, by the mean over ranks)"},
          .decided = None("every step counts: a rank that would not take one has raised on all of them"),
          .kept = None("the optimizer's state is changed by its step alone, which comes after all agree")};
}

Method local_steps() {
  using enum Meaning;
  return {.name = std::string("DiLoCo, LocalSGD"),
          .trained = Meanings{.frozen = Rebased,  // a frozen parameter is averaged as before
                              .thawed = Refused,
                              .added = Refused,
                              .removed = Refused,
                              .replaced = Refused,
                              .cast = Rebased,  // the values that all ranks share keep the first type
                              .moved = Rebased},
          .agreed = Difference{"DiLoCo, LocalSGD", "options", "give the same on all ranks"},
          .decided = DecidedBy{"averages"},
          .kept = KeptNames{"what travels"}};
}

}  // namespace cohort::step
