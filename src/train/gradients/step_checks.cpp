#include "train/gradients/step_checks.h"

#include "base/log.h"
#include "base/result.h"
#include "train/gradients/virtual_ranks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

namespace cohort::gradients {

namespace {

// Number of parameters compared in a step, and number of bytes of each. Over the steps, all parameters are compared.
constexpr std::size_t kComparedAtOnce = 8;
constexpr std::size_t kComparedBytes = 256;
constexpr std::size_t kComparedWords = kComparedBytes / sizeof(std::uint64_t);
// Number of steps, from the first one, whose batches are compared.
constexpr std::int64_t kComparedBatches = 2;
// Steps without comparisons after a difference that may come from rounding, since it would be found again.
constexpr std::int64_t kStepsBetweenRoundings = 100;

template <class T>
T load(std::span<const std::byte> bytes, std::size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

double value_at(std::span<const std::byte> bytes, std::size_t index, DType dtype) {
  switch (dtype) {
    case DType::Float64: return load<double>(bytes, index);
    case DType::Float16: return widen_float16(load<std::uint16_t>(bytes, index));
    case DType::BFloat16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(load<std::uint16_t>(bytes, index)) << 16);
    default: return load<float>(bytes, index);
  }
}

// Returns half of the type's digits. Different processors or numbers of threads round differently, and replicas then
// differ in their last digits; a change on one rank only soon shows in the first digits.
double tolerance_of(DType dtype) {
  switch (dtype) {
    case DType::Float64: return 0x1p-26;
    case DType::Float16: return 0x1p-5;
    case DType::BFloat16: return 0x1p-4;
    default: return 0x1p-12;
  }
}

bool differ_by_more_than_rounding(std::span<const std::byte> a, std::span<const std::byte> b, DType dtype) {
  double most = 0;
  double scale = 0;
  for (std::size_t i = 0; i < a.size() / size_of(dtype); ++i) {
    const double left = value_at(a, i, dtype);
    const double right = value_at(b, i, dtype);
    if (left == right || (std::isnan(left) && std::isnan(right))) continue;
    if (!std::isfinite(left) || !std::isfinite(right)) return true;
    most = std::max(most, std::abs(left - right));
  }
  if (most == 0) return false;
  for (std::size_t i = 0; i < a.size() / size_of(dtype); ++i) {
    for (const double value : {value_at(a, i, dtype), value_at(b, i, dtype)}) {
      if (std::isfinite(value)) scale = std::max(scale, std::abs(value));
    }
  }
  return most > tolerance_of(dtype) * scale;
}

}  // namespace

void StepChecks::show(StepMessage& message, const Accumulation& reduced, std::int64_t step, int ranks) {
  shown_epoch_ = std::exchange(several_epochs_, false) ? std::nullopt : epoch_;
  epoch_.reset();
  if (reduced.weight() > 0) {
    message.say(StepMessage::Samples);
    message.say(reduced.declared() ? StepMessage::Declared : StepMessage::Undeclared);
    message.say(reduced.follows_forward() ? StepMessage::AfterForward : StepMessage::WithoutForward);
    if (rows_) message.show(StepMessage::Rows, static_cast<std::uint64_t>(*rows_));
    if (shown_epoch_) message.show(StepMessage::Epoch, static_cast<std::uint64_t>(*shown_epoch_));
    // Shown in the last of these steps. A rank that has not seen all batches shows a word that differs from all others.
    if (step == kComparedBatches - 1 && batches_seen_ == kComparedBatches) {
      message.show(StepMessage::Batches, batches_);
    } else if (step == kComparedBatches - 1) {
      message.show_unknown(StepMessage::Batches);
    }
  }
  if (reduced.is_mixed()) message.say(StepMessage::Mixed);
  if (!digest_) sample_values(step, ranks);
  message.show(StepMessage::Values, *std::exchange(digest_, std::nullopt));
}

void StepChecks::look(step::Ranks& ranks, const StepMessage& message, const Accumulation& reduced, std::int64_t step) {
  const auto both = [&](StepMessage::Flag one, StepMessage::Flag other) {
    return message.said(one) && message.said(other);
  };
  if (message.said(StepMessage::Mixed) || both(StepMessage::Declared, StepMessage::Undeclared) ||
      both(StepMessage::AfterForward, StepMessage::WithoutForward)) {
    raise_different(ranks, message, reduced, step);
  }
  if (message.differs(StepMessage::Rows) && message.said(StepMessage::Undeclared) &&
      !std::exchange(told_of_rows_, true))
    tell_of_rows(ranks, reduced);
  if (message.differs(StepMessage::Epoch) && !std::exchange(told_of_epochs_, true)) tell_of_epochs(ranks, reduced);
  if (message.differs(StepMessage::Values)) compare_values(ranks, step + 1);
  if (message.shown(StepMessage::Batches) && !message.differs(StepMessage::Batches)) tell_of_batches(ranks, reduced);
}

void StepChecks::raise_different(step::Ranks& ranks, const StepMessage& message, const Accumulation& reduced,
                                 std::int64_t step) {
  enum Said : std::uint64_t { kNoSamples, kNumber, kNothing, kBoth };
  const std::uint64_t said = reduced.is_mixed()      ? kBoth
                             : reduced.weight() == 0 ? kNoSamples
                             : reduced.declared()    ? kNumber
                                                     : kNothing;
  const auto rows = step::gather_rows(
      ranks, {said, static_cast<std::uint64_t>(reduced.weight()), reduced.follows_forward() ? 1U : 0U});
  autograd_.drop_all();
  const auto first = [&](const auto& is) {
    return std::find_if(rows.begin(), rows.end(),
                        [&](const auto& row) { return !row.empty() && row[0] != kNoSamples && is(row); }) -
           rows.begin();
  };
  const auto who_said = [&](Said which) { return first([&](const auto& row) { return row[0] == which; }); };
  ErrorContext where = ranks.where("DistributedDataParallel");
  const auto refuse = [&](std::ptrdiff_t rank, const std::string& text) {
    where.peer = static_cast<int>(rank);
    throw Error(ErrorCode::Mismatch, fmt::format("step {}: {}", step, text), where);
  };
  if (const auto mixed = who_said(kBoth); mixed < ranks.size()) {
    refuse(mixed,
           fmt::format(
               "rank {} brings gradients whose number of samples is not known: some of its forwards since the last "
               "step had one and others had none, forwards before one backward had different ones, or the sampler "
               "had no batch drawn -- say it for all (sampler, samples, set_sample_count before each forward), one "
               "number for the forwards of a backward; run what is not trained on in no_grad mode",
               mixed));
  }
  if (message.said(StepMessage::Declared) && message.said(StepMessage::Undeclared)) {
    const auto declared = who_said(kNumber);
    refuse(who_said(kNothing),
           fmt::format("rank {} has said of how many samples its backward is ({}), and rank {} has not -- say it on "
                       "all ranks, or on none",
                       declared, rows[static_cast<std::size_t>(declared)][1], who_said(kNothing)));
  }
  const auto with = first([](const auto& row) { return row[2] != 0; });
  const auto without = first([](const auto& row) { return row[2] == 0; });
  refuse(without, fmt::format("rank {}'s backward follows a forward through DistributedDataParallel, and rank {}'s "
                              "follows none since its last step -- the ranks are at different places of the program; "
                              "do the same on all ranks, or this one in no_sync()",
                              with, without));
}

void StepChecks::tell_of_rows(step::Ranks& ranks, const Accumulation& reduced) const {
  const auto rows =
      step::gather_rows(ranks, {rows_ && reduced.weight() > 0 ? static_cast<std::uint64_t>(*rows_) + 1 : 0});
  const auto has = [](const auto& row) { return !row.empty() && row[0] != 0; };
  const auto first = std::find_if(rows.begin(), rows.end(), has);
  const auto other =
      std::find_if(rows.begin(), rows.end(), [&](const auto& row) { return has(row) && row[0] != (*first)[0]; });
  if (other == rows.end() || first - rows.begin() != ranks.rank()) return;
  log::warn("train",
            "the first dimension of the batch differs (rank {}: {}, rank {}: {}), and nothing says how many samples it "
            "holds: every rank weighs the same, as in torch's DistributedDataParallel. For the average over all "
            "samples, give DistributedDataParallel the sampler or a function (sampler, samples), or call "
            "set_sample_count before each forward",
            first - rows.begin(), (*first)[0] - 1, other - rows.begin(), (*other)[0] - 1);
}

void StepChecks::note_forward(std::optional<std::int64_t> rows, std::optional<std::int64_t> epoch) noexcept {
  rows_ = rows;
  several_epochs_ = several_epochs_ || (epoch_ && epoch != epoch_);
  epoch_ = epoch;
}

// A warning, since with `join` ranks may be in different epochs on purpose.
void StepChecks::tell_of_epochs(step::Ranks& ranks, const Accumulation& reduced) const {
  const bool shown = shown_epoch_ && reduced.weight() > 0;
  const auto rows = step::gather_rows(ranks, {shown ? 1U : 0U, static_cast<std::uint64_t>(shown_epoch_.value_or(0))});
  const auto has = [](const auto& row) { return !row.empty() && row[0] != 0; };
  const auto first = std::find_if(rows.begin(), rows.end(), has);
  const auto other =
      std::find_if(rows.begin(), rows.end(), [&](const auto& row) { return has(row) && row[1] != (*first)[1]; });
  if (other == rows.end() || first - rows.begin() != ranks.rank()) return;
  log::warn("train",
            "the sampler is in epoch {} on rank {}, and in epoch {} on rank {}, so ranks draw samples that others have "
            "drawn, too -- call set_epoch with the same number on all ranks",
            (*first)[1], first - rows.begin(), (*other)[1], other - rows.begin());
}

bool StepChecks::wants_batch(std::int64_t step) const noexcept { return step < kComparedBatches; }

void StepChecks::note_batch(std::uint64_t digest) {
  batches_ = (std::rotl(batches_, 5) ^ digest) * 0x9E3779B97F4A7C15ULL;
  ++batches_seen_;
}

// Warns, if at least two ranks had samples: all ranks with samples in this step have shown the same digest of batches.
void StepChecks::tell_of_batches(step::Ranks& ranks, const Accumulation& reduced) const {
  const bool shown = reduced.weight() > 0 && batches_seen_ == kComparedBatches;
  const auto rows = step::gather_rows(ranks, {shown ? 1U : 0U, rows_ ? static_cast<std::uint64_t>(*rows_) : 0});
  const auto has = [](const auto& row) { return !row.empty() && row[0] != 0; };
  const auto first = std::find_if(rows.begin(), rows.end(), has);
  if (std::count_if(rows.begin(), rows.end(), has) < 2 || first - rows.begin() != ranks.rank()) return;
  log::warn(
      "batches",
      "all ranks were given the same {} samples in each of the first {} steps, so they do the same work: is there "
      "no DistributedSampler? Where it is meant, COHORT_LOG=batches=off silences this",
      (*first)[1], kComparedBatches);
}

// Reads the same parameters on all ranks, since progress is the same. Skips, on all ranks, values that the host cannot
// read, and values whose size has changed (a module that was converted to half after it was wrapped).
void StepChecks::sample_values(std::int64_t step, int ranks) {
  sampled_.clear();
  sampled_words_.clear();
  digest_ = 0;
  if (!replicas_ || ranks == 1 || step < compare_values_from_) return;
  const std::size_t turns = (parameters_.size() + kComparedAtOnce - 1) / kComparedAtOnce;
  const auto number = static_cast<std::size_t>(step);
  for (std::size_t i = number % turns * kComparedAtOnce; i < parameters_.size() && sampled_.size() < kComparedAtOnce;
       ++i)
    sampled_.push_back(static_cast<int>(i));
  const std::vector<std::span<const std::byte>> values = autograd_.values_of(sampled_);
  sampled_words_.assign(sampled_.size() * kComparedWords, 0);
  for (std::size_t i = 0; i < sampled_.size(); ++i) {
    const std::size_t bytes = values[i].size();
    const std::size_t length = compared_bytes(i, bytes);
    const std::size_t pieces = (bytes + kComparedBytes - 1) / kComparedBytes;
    const std::size_t begin =
        pieces < 2 ? 0 : std::min(number / turns % pieces * kComparedBytes, bytes - kComparedBytes);
    if (length > 0) std::memcpy(&sampled_words_[i * kComparedWords], values[i].data() + begin, length);
    sampled_words_.push_back(bytes);
  }
  for (const std::uint64_t word : sampled_words_) *digest_ = (std::rotl(*digest_, 5) ^ word) * 0x9E3779B97F4A7C15ULL;
}

/// Returns how many bytes of a sampled parameter are compared, if its values have `bytes` bytes.
std::size_t StepChecks::compared_bytes(std::size_t sample, std::size_t bytes) const {
  const bool as_before = bytes == parameters_[static_cast<std::size_t>(sampled_[sample])].bytes();
  return as_before ? std::min(bytes, kComparedBytes) : 0;
}

void StepChecks::compare_values(step::Ranks& ranks, std::int64_t step) {
  const auto rows = step::gather_rows(ranks, sampled_words_);
  const auto bytes_of = [&](std::size_t rank, std::size_t i) {
    return rows[rank][sampled_.size() * kComparedWords + i];
  };
  const auto piece_of = [&](std::size_t rank, std::size_t i) {
    return std::span(reinterpret_cast<const std::byte*>(&rows[rank][i * kComparedWords]),
                     compared_bytes(i, bytes_of(rank, i)));
  };
  std::size_t reference = 0;
  while (rows[reference].empty()) ++reference;
  const bool tells = static_cast<int>(reference) == ranks.rank();
  bool rounded = false;
  for (std::size_t rank = reference + 1; rank < rows.size(); ++rank) {
    for (std::size_t i = 0; i < sampled_.size() && !rows[rank].empty(); ++i) {
      const DType dtype = parameters_[static_cast<std::size_t>(sampled_[i])].dtype;
      if (bytes_of(reference, i) == 0 || bytes_of(rank, i) == 0) continue;  // one rank's values cannot be read
      const auto one = piece_of(reference, i), other = piece_of(rank, i);
      rounded = rounded || !std::ranges::equal(one, other);
      if (bytes_of(reference, i) == bytes_of(rank, i) && !differ_by_more_than_rounding(one, other, dtype)) continue;
      autograd_.drop_all();
      if (tells) {
        log::warn("train",
                  "step {}: the ranks' parameters have drifted apart; check_replicas = false where they are meant "
                  "to differ when a step begins",
                  step - 1);
      }
      autograd_.compare(sampled_, step);
    }
  }
  if (!rounded) return;
  if (compare_values_from_ == 0 && tells) {
    log::warn("train",
              "step {}: the ranks' parameters differ in their last digits, as processors or numbers of threads that "
              "differ make them; compare_parameters_every compares all of them to the bit",
              step - 1);
  }
  compare_values_from_ = step + kStepsBetweenRoundings;
}

}  // namespace cohort::gradients
