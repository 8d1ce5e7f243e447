// A method of training, and the step as a transaction, which ensures that a method forgets no part of a step. A method
// declares four parts, or why it lacks one: what is trained, what must agree, how a step is decided, what is kept. Code
// that leaves out a part does not compile. A method that declares a part and does not use it gets an error with its
// name in its first step. One thread at a time.
#pragma once

#include "train/step/agreement.h"
#include "train/step/decision.h"
#include "train/step/given.h"
#include "train/step/kept.h"
#include "train/step/trained.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::step {

/// The names of the states that a method keeps between steps; each is passed to `Transaction::keep`.
using KeptNames = std::vector<std::string>;
/// Source from which all ranks know whether a step counts: "message" or "averages". An error always decides.
struct DecidedBy {
  const char* what;
};

struct Method {
  Given<std::string> name;
  Part<Meanings> trained;
  Part<Difference> agreed;
  Part<DecidedBy> decided;
  Part<KeptNames> kept;
};

class Transaction {
 public:
  explicit Transaction(Method method);

  const std::string& name() const noexcept { return *method_.name; }
  /// These throw Internal if the method declares that it lacks the part.
  Trained& trained();
  Agreement& agreement();
  /// Sets the state under one of the method's names, replacing an earlier one. Null: there is no such state now.
  void keep(const std::string& name, std::shared_ptr<Kept> kept);

  /// Ends a step: kept state is committed, dropped or left unchanged. Throws Internal, naming method and part, if the
  /// first accepted step has not used a part that the method declares.
  void end(Decision decision);
  /// Notes that a step ends here that another process began, and whose averages all ranks have. So it is not the first.
  void resume() noexcept { resumed_ = true; }
  /// True if the last step ended in an error that all ranks have, so that no rank has its averages.
  bool last_refused() const noexcept { return last_ == Outcome::Refused; }

 private:
  void require_complete(Decision decision) const;

  Method method_;
  std::optional<Trained> trained_;
  std::optional<Agreement> agreement_;
  std::vector<std::pair<std::string, std::shared_ptr<Kept>>> kept_;
  Outcome last_ = Outcome::Accepted;
  bool complete_ = false;
  bool resumed_ = false;
};

}  // namespace cohort::step
