// A method of training, and the step as a transaction: the one owner of what a step must not forget. A method says four
// things, or why it does not have one of them: what is trained, what must agree, what is decided, what is kept. A
// struct that leaves one out does not compile; a method that says it and does not do it is refused by name in its first
// step. One thread at a time.
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

/// The names of what a method keeps between steps; `Transaction::keep` shows it.
using KeptNames = std::vector<std::string>;
/// Source from which all ranks know whether a step counts: "message", "averages"; errors always do.
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
  /// Throw Internal where the method says that it has none.
  Trained& trained();
  Agreement& agreement();
  /// Under one of the method's names, in place of what it had there; null: nothing of it now.
  void keep(const std::string& name, std::shared_ptr<Kept> kept);

  /// A step has ended: what is kept is committed, dropped or stays. Throws Internal, which names method and part, where
  /// the first step that was accepted has left out what the method says.
  void end(Decision decision);
  /// A step that another process has begun, and of which all ranks have the averages, ends here: it is not the first.
  void resume() noexcept { resumed_ = true; }
  /// The last step ended in an error that all ranks have, and nobody has its averages.
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
