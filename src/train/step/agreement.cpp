#include "train/step/agreement.h"

#include "base/parse.h"
#include "base/result.h"
#include "comm/api/request.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

namespace cohort::step {
namespace {

constexpr std::size_t kNamed = 3;  // changes that an error names

}  // namespace

std::string Option::text() const {
  if (value.empty()) return name;
  return owner.empty() ? fmt::format("{} = {}", name, value) : fmt::format("{} of {} = {}", name, owner, value);
}

void Agreement::set(const std::string& owner, const std::string& name, std::string value) {
  digest_ = 0;
  const auto known = std::ranges::find_if(
      options_, [&](const Option& option) { return option.owner == owner && option.name == name; });
  if (known == options_.end()) {
    options_.push_back({owner, name, std::move(value)});
  } else {
    known->value = std::move(value);
  }
}

void Agreement::set(std::vector<Option> options) {
  digest_ = 0;
  options_ = std::move(options);
}

std::string Agreement::lines() const {
  std::string text;
  for (const Option& option : options_) text += option.text() + "\n";
  return text;
}

std::uint64_t Agreement::digest() const {
  if (digest_ == 0) digest_ = fnv1a(lines());
  return digest_;
}

std::uint32_t Agreement::tag(std::uint64_t more) const {
  ++uses_;
  const std::uint64_t all = (std::rotl(digest(), 5) ^ more) * 0x9E3779B97F4A7C15ULL;
  return static_cast<std::uint32_t>(all ^ all >> 32);
}

Agreement::Sums Agreement::sums() const {
  ++uses_;
  const std::uint64_t hash = digest();
  Sums sums = {};
  for (std::size_t i = 0; i < 3; ++i) {
    sums[i] = static_cast<double>(((hash >> (16 * i)) ^ (hash >> 48)) & 0xFFFF);
    sums[i + 3] = sums[i] * sums[i];
  }
  return sums;
}

// The mean of squares equals the square of the mean only if all numbers are equal.
void Agreement::require(Ranks& ranks, std::span<const double> sums, const char* where) const {
  const auto size = static_cast<std::uint64_t>(ranks.size());
  bool alike = true;
  for (std::size_t i = 0; i < 3; ++i) {
    const auto total = static_cast<std::uint64_t>(sums[i]), mean = total / size;
    alike = alike && total % size == 0 && static_cast<std::uint64_t>(sums[i + 3]) == size * mean * mean;
  }
  if (alike) return;
  const std::string text = lines();
  const auto named = exchange(ranks, gather_rows(ranks, {digest(), text.size()}), text,
                              *where == '\0' ? difference_.where.c_str() : where);
  if (named) throw Error(*named);
}

std::optional<Error> Agreement::difference(Ranks& ranks) const {
  ++uses_;
  if (ranks.size() == 1) return std::nullopt;
  const std::string text = lines();
  const auto all = gather_rows(ranks, {digest(), text.size()}, comm::kComparisonTag);
  const auto& own = all[static_cast<std::size_t>(ranks.rank())];
  const bool differ = std::ranges::any_of(all, [&](const auto& row) { return !row.empty() && row != own; });
  return differ ? exchange(ranks, all, text, difference_.where.c_str()) : std::nullopt;
}

void Agreement::require(Ranks& ranks) const {
  std::optional<Error> named;
  try {
    named = difference(ranks);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::Mismatch) throw;
    const std::string advice = agreed_
                                   ? "add, remove, replace, cast and unfreeze the same on all ranks, in the same step"
                                   : "do the same on all ranks, in the same order";
    throw Error(
        ErrorCode::Mismatch,
        fmt::format("{}: rank {} compares its {} with the other ranks'{} while another rank does something else "
                    "-- {} -- {}",
                    difference_.where, ranks.rank(), difference_.what, changes(), advice, error.what()),
        error.context());
  }
  if (named) throw Error(*named);
  agreed_ = options_;
}

/// Returns what this rank has changed since the ranks agreed: ", since it now has ...,".
std::string Agreement::changes() const {
  if (!agreed_) return {};
  const auto only_in = [](const std::vector<Option>& one, const std::vector<Option>& other) {
    std::vector<std::string> texts;
    for (const Option& option : one) {
      if (std::ranges::find(other, option) == other.end()) texts.push_back(option.text());
    }
    const std::size_t more = texts.size() - std::min(kNamed, texts.size());
    texts.resize(texts.size() - more);
    return fmt::format("{}{}", fmt::join(texts, ", "), more == 0 ? "" : fmt::format(" and {} more", more));
  };
  const std::string now = only_in(options_, *agreed_), before = only_in(*agreed_, options_);
  if (now.empty() && before.empty()) return {};
  if (now.empty()) return fmt::format(", since it no longer has {},", before);
  return fmt::format(", since it now has {}{},", now, before.empty() ? "" : fmt::format(" instead of {}", before));
}

void Agreement::explain(Ranks& ranks, const Error& error) const {
  if (error.code() != ErrorCode::Mismatch || !error.context().tagged) return;
  std::optional<Error> named;
  try {
    named = difference(ranks);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the caller reports the original error
  }
  if (named) throw Error(*named);
}

// Uses sums, in which ranks that have joined take part automatically. `sizes`: by rank, digest and length of its text.
std::optional<Error> Agreement::exchange(Ranks& ranks, const std::vector<std::vector<std::uint64_t>>& sizes,
                                         const std::string& text, const char* where) const {
  std::uint64_t longest = 0;
  for (const auto& row : sizes) longest = std::max(longest, row.empty() ? 0 : row[1]);
  std::vector<std::uint64_t> words(longest / sizeof(std::uint64_t) + 1);
  std::memcpy(words.data(), text.data(), text.size());
  const auto texts = gather_rows(ranks, words);
  const auto lines_of = [&](std::size_t rank) {
    std::vector<std::string> all;
    const std::string whole(reinterpret_cast<const char*>(texts[rank].data()), sizes[rank][1]);
    for (std::size_t begin = 0; begin < whole.size();) {
      const std::size_t end = whole.find('\n', begin);
      all.push_back(whole.substr(begin, end - begin));
      begin = end + 1;
    }
    all.emplace_back("nothing more");
    return all;
  };
  std::size_t reference = 0;
  while (sizes[reference].empty()) ++reference;
  const std::vector<std::string> first = lines_of(reference);
  for (std::size_t rank = reference + 1; rank < texts.size(); ++rank) {
    if (sizes[rank].empty()) continue;
    const std::vector<std::string> other = lines_of(rank);
    const auto [one, two] = std::ranges::mismatch(first, other);
    if (one == first.end() && two == other.end()) continue;
    return mismatch(ranks, where, {reference, rank}, one == first.end() ? first.back() : *one,
                    two == other.end() ? other.back() : *two);
  }
  return std::nullopt;
}

Error Agreement::mismatch(const Ranks& ranks, const char* where, std::pair<std::size_t, std::size_t> between,
                          const std::string& first, const std::string& other) const {
  ErrorContext context = ranks.where(where);
  context.peer = static_cast<int>(between.second);
  return {ErrorCode::Mismatch,
          fmt::format("{}: the ranks' {} differ -- rank {} has {}, rank {} has {} -- {}", where, difference_.what,
                      between.first, first, between.second, other, difference_.advice),
          context};
}

void require_same_on_all_ranks(Ranks& ranks, const std::vector<std::string>& lines, const char* who) {
  Agreement agreement({who, "models", "build the same model with the same options on all ranks"});
  std::vector<Option> options;
  for (const std::string& line : lines) options.push_back({.name = line});
  agreement.set(std::move(options));
  agreement.require(ranks);
}

}  // namespace cohort::step
