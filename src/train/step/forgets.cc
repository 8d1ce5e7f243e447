// Compiles unless FORGETS_... leaves out a part of a method: a test runs the compiler on it.
#include "train/step/method.h"

cohort::step::Method method() {
  using namespace cohort::step;
  return {
      .name = std::string("Rounding"),
#ifndef FORGETS_TRAINED
      .trained = None("it has no parameters"),
#endif
#ifndef FORGETS_AGREED
      .agreed = Difference{"Rounding", "options", "give the same on all ranks"},
#endif
#ifndef FORGETS_DECIDED
      .decided = DecidedBy{"averages"},
#endif
#ifndef FORGETS_KEPT
      .kept = KeptNames{"error"},
#endif
  };
}

#ifdef FORGETS_CAST
const cohort::step::Meaning in = cohort::step::Meaning::TakenIn;
const cohort::step::Meanings meanings = {
    .frozen = in, .thawed = in, .added = in, .removed = in, .replaced = in, .moved = in};
#endif
