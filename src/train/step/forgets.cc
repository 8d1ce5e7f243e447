// Compiles unless a FORGETS_... macro leaves out a part of a method, or an option. A test runs the compiler on it.
#include "train/gradients/options.h"
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

void look(cohort::nn::DistributedDataParallelOptions options) {
  cohort::gradients::visit_options(options, [](const char*, auto&) {});
}
#ifdef FORGETS_OPTION
struct More {  // has one option more than the list in options.h
  int a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, added;
};
void look(More more) {
  cohort::gradients::visit_options(more, [](const char*, auto&) {});
}
#endif

#ifdef FORGETS_CAST
const cohort::step::Meaning in = cohort::step::Meaning::TakenIn;
const cohort::step::Meanings meanings = {
    .frozen = in, .thawed = in, .added = in, .removed = in, .replaced = in, .moved = in};
#endif
