#include "named/match.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace cohort::named {
namespace {

bool first_dimension_is_free(Kind kind) noexcept { return kind == Kind::AllGather || kind == Kind::AllToAll; }

bool agree(const Signature& a, const Signature& b) {
  if (a.kind != b.kind || a.dtype != b.dtype || a.op != b.op || a.root != b.root || a.prescale != b.prescale ||
      a.postscale != b.postscale || a.needs_all_ranks != b.needs_all_ranks || a.device != b.device) {
    return false;
  }
  if (!first_dimension_is_free(a.kind)) return a.shape == b.shape && a.splits == b.splits;
  return a.shape.size() == b.shape.size() && std::equal(a.shape.begin() + 1, a.shape.end(), b.shape.begin() + 1);
}

}  // namespace

std::int64_t Agreed::row_elements() const noexcept {
  std::int64_t elements = 1;
  for (std::size_t i = 1; i < common.shape.size(); ++i) elements *= common.shape[i];
  return elements;
}

std::string list_ranks(std::span<const int> ranks) {
  constexpr std::size_t kMost = 8;
  std::string text;
  const std::size_t shown = ranks.size() > kMost ? kMost : ranks.size();
  for (std::size_t i = 0; i < shown; ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += fmt::format("{}", ranks[i]);
  }
  if (shown < ranks.size()) text += fmt::format(" and {} more", ranks.size() - shown);
  return text;
}

Result<AgreedPtr> match(const std::string& name, const Brought& brought) {
  // Ranks by what they brought, in the order of the lowest rank of each.
  std::vector<std::pair<const Signature*, std::vector<int>>> camps;
  for (std::size_t rank = 0; rank < brought.size(); ++rank) {
    if (!brought[rank]) continue;
    auto camp =
        std::find_if(camps.begin(), camps.end(), [&](const auto& one) { return agree(*one.first, *brought[rank]); });
    if (camp == camps.end()) camp = camps.insert(camps.end(), {&*brought[rank], {}});
    camp->second.push_back(static_cast<int>(rank));
  }
  if (camps.empty()) return fail(ErrorCode::Internal, "'{}': nobody has brought it", name);
  if (camps.size() > 1) {
    const bool mixed = std::any_of(camps.begin(), camps.end(),
                                   [&](const auto& camp) { return camp.first->device != camps.front().first->device; });
    std::string who;
    for (const auto& [signature, ranks] : camps) {
      who += fmt::format("{}rank{} {} brought {}", who.empty() ? "" : ", ", ranks.size() > 1 ? "s" : "",
                         list_ranks(ranks), to_string(*signature));
      if (mixed) who += signature->device == DeviceType::CPU ? " on the CPU" : " on a GPU";
    }
    return fail(
        ErrorCode::Mismatch,
        "'{}' refused on all ranks -- {} -- an operation of one name must be the same on all ranks: kind, type, "
        "shape, reduction, root, scales and device; other operations are not affected",
        name, who);
  }
  auto made = std::make_shared<Agreed>();
  made->name = name;
  made->common = *camps.front().first;
  const Kind kind = made->common.kind;
  if (kind == Kind::AllGather) {
    for (const auto& one : brought) made->rows.push_back(one ? one->shape[0] : 0);
  }
  if (kind == Kind::AllToAll) {
    for (const auto& one : brought) made->splits.push_back(one ? one->splits : std::vector<std::int64_t>());
  }
  return AgreedPtr(std::move(made));
}

std::optional<Error> refused_by_joined(const Agreed& operation, const std::vector<bool>& joined) {
  std::vector<int> who;
  for (std::size_t rank = 0; rank < joined.size(); ++rank) {
    if (joined[rank]) who.push_back(static_cast<int>(rank));
  }
  if (who.empty()) return std::nullopt;
  const Kind kind = operation.common.kind;
  const bool needs_all =
      operation.common.needs_all_ranks || kind == Kind::ReduceScatter || kind == Kind::AllToAll || kind == Kind::Group;
  const bool root_joined = kind == Kind::Broadcast && joined[static_cast<std::size_t>(operation.common.root)];
  // There is nothing that these factors turn into a neutral element.
  const double prescale = operation.common.prescale;
  const ReduceOp op = operation.common.op;
  // Integers are scaled before neutral elements come in.
  const bool scales = kind == Kind::AllReduce && is_scalable(operation.common.dtype);
  const bool no_neutral = scales && ((op == ReduceOp::Product && prescale != 1) ||
                                     ((op == ReduceOp::Min || op == ReduceOp::Max) && prescale == 0));
  if (!needs_all && !root_joined && !no_neutral) return std::nullopt;
  const char* const needs = needs_all ? "every rank" : root_joined ? "the root's data" : "data wherever it scales";
  return Error(
      ErrorCode::Mismatch,
      fmt::format("'{}' refused on all ranks -- {} -- rank{} {} ha{} joined (no more data there), and it needs "
                  "{} -- carry it out before any rank joins",
                  operation.name, to_string(operation.common), who.size() > 1 ? "s" : "", list_ranks(who),
                  who.size() > 1 ? "ve" : "s", needs));
}

std::vector<std::int64_t> scattered_rows(std::int64_t rows, int size) {
  std::vector<std::int64_t> result(static_cast<std::size_t>(size), rows / size);
  for (std::int64_t i = 0; i < rows % size; ++i) ++result[static_cast<std::size_t>(i)];
  return result;
}

}  // namespace cohort::named
