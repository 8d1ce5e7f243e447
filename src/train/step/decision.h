// The outcome of a step, which all ranks decide in the same way from what they exchanged in the step. Also the message
// that is exchanged beside a step's gradients. One thread at a time.
#pragma once

#include "train/step/ranks.h"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::step {

enum class Outcome : std::uint8_t {
  Accepted,   ///< the state that the step has prepared is kept
  NoSamples,  ///< no rank had samples: everything stays as it was
  NotFinite,  ///< averages are not finite: programs that check skip the step, so no state is kept
  Refused,    ///< all ranks have an error: no rank has the step's averages, and no state is kept
  Lost,       ///< the step has failed on this rank; kept state stays if the step has not written to it
};

/// An outcome, and the source from which all ranks know it, so that no rank decides alone.
class Decision {
 public:
  /// Decided from the step's message.
  static Decision by_message(Outcome outcome) noexcept { return {outcome, "message"}; }
  /// Decided from averages, which are the same on all ranks.
  static Decision by_averages(Outcome outcome) noexcept { return {outcome, "averages"}; }
  /// Decided from an error. If a collective or a comparison has failed, the other ranks have the error, too.
  static Decision by_error(Outcome outcome) noexcept { return {outcome, "error"}; }
  /// For methods that never refuse or skip a step.
  static Decision none() noexcept { return {Outcome::Accepted, ""}; }

  Outcome outcome() const noexcept { return outcome_; }
  std::string_view by() const noexcept { return by_; }

 private:
  Decision(Outcome outcome, std::string_view by) noexcept : outcome_(outcome), by_(by) {}

  Outcome outcome_;
  std::string_view by_;
};

/// A bit for each parameter that a rank used, then flags, then words that have to be the same on all ranks. Each word
/// comes with its complement, so that a bitwise "or" over the ranks shows which words differ.
class Message {
 public:
  Message(std::size_t parameters, std::size_t flags, std::size_t words)
      : parameters_(parameters), words_at_((parameters + flags + 63) / 64), bits_(words_at_ + 2 * words) {}

  void clear() { bits_.assign(bits_.size(), 0); }
  void use(std::size_t parameter) { bits_[parameter / 64] |= std::uint64_t{1} << (parameter % 64); }
  void say(std::size_t flag) { use(parameters_ + flag); }
  void show(std::size_t word, std::uint64_t value) { show(word, value, ~value); }
  /// Shows a word that differs from all other ranks' words.
  void show_unknown(std::size_t word) { show(word, ~std::uint64_t{0}, ~std::uint64_t{0}); }

  /// Collective; waits.
  void exchange(Ranks& ranks) {
    ranks.run("all_reduce", bits_,
              [](Communicator& comm, auto span) { return comm.all_reduce(span, {.op = ReduceOp::BitOr}); });
  }

  // Results over all ranks, valid after `exchange`.

  bool used(std::size_t parameter) const { return (bits_[parameter / 64] >> (parameter % 64) & 1U) != 0; }
  bool said(std::size_t flag) const { return used(parameters_ + flag); }
  bool differs(std::size_t word) const { return (bits_[at(word)] & bits_[at(word) + 1]) != 0; }
  bool shown(std::size_t word) const { return (bits_[at(word)] | bits_[at(word) + 1]) != 0; }

 private:
  std::size_t at(std::size_t word) const { return words_at_ + 2 * word; }
  void show(std::size_t word, std::uint64_t value, std::uint64_t complement) {
    bits_[at(word)] = value;
    bits_[at(word) + 1] = complement;
  }

  std::size_t parameters_;
  std::size_t words_at_;
  std::vector<std::uint64_t> bits_;
};

}  // namespace cohort::step
