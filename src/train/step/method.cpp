#include "train/step/method.h"

#include "base/result.h"

#include <algorithm>
#include <utility>

namespace cohort::step {

Transaction::Transaction(Method method) : method_(std::move(method)) {
  if (const Meanings* const meanings = method_.trained.get()) trained_.emplace(*meanings);
  if (const Difference* const difference = method_.agreed.get()) agreement_.emplace(*difference);
}

Trained& Transaction::trained() {
  if (!trained_) raise(ErrorCode::Internal, "{} says that it trains nothing", name());
  return *trained_;
}

Agreement& Transaction::agreement() {
  if (!agreement_) raise(ErrorCode::Internal, "{} says that nothing of it has to agree", name());
  return *agreement_;
}

void Transaction::keep(const std::string& name, std::shared_ptr<Kept> kept) {
  const KeptNames* const names = method_.kept.get();
  if (names == nullptr || std::ranges::find(*names, name) == names->end())
    raise(ErrorCode::Internal, "{} has not said that it keeps '{}' between steps", this->name(), name);
  const auto known = std::ranges::find_if(kept_, [&](const auto& one) { return one.first == name; });
  if (known == kept_.end()) {
    kept_.emplace_back(name, std::move(kept));
  } else {
    known->second = std::move(kept);
  }
}

void Transaction::end(Decision decision) {
  const Outcome outcome = decision.outcome();
  if (!std::exchange(resumed_, false) && !complete_ && outcome == Outcome::Accepted) {
    require_complete(decision);
    complete_ = true;
  }
  last_ = outcome;
  for (const auto& [name, kept] : kept_) {
    if (kept == nullptr) continue;
    switch (outcome) {
      case Outcome::Accepted:
      case Outcome::NoSamples: kept->commit(); break;
      case Outcome::NotFinite:
      case Outcome::Refused: kept->drop(); break;
      case Outcome::Lost: kept->lose(); break;
    }
  }
}

void Transaction::require_complete(Decision decision) const {
  const auto refuse = [&](const std::string& what) {
    raise(ErrorCode::Internal, "{}: its first step has ended, and {} -- do it in each step, or say None and why",
          name(), what);
  };
  if (trained_ && trained_->looks() == 0) refuse("what is trained was not looked at (Trained::update)");
  if (agreement_ && agreement_->uses() == 0)
    refuse("what must agree has not travelled (Agreement::tag, sums or require)");
  const DecidedBy* const decided = method_.decided.get();
  if (decided != nullptr && decision.by() != decided->what)
    refuse(fmt::format("it was not decided by the {} whether it counts (Decision)", decided->what));
  if (decided == nullptr && !decision.by().empty()) refuse("it was decided whether it counts, though it always does");
  if (method_.kept.get() == nullptr) return;
  for (const std::string& one : *method_.kept.get()) {
    if (std::ranges::none_of(kept_, [&](const auto& shown) { return shown.first == one; }))
      refuse(fmt::format("'{}', which it keeps, was not shown (Transaction::keep)", one));
  }
}

}  // namespace cohort::step
