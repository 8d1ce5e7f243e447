#include "horovod/named/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace cohort::named {
namespace {

bool first_dimension_is_free(Kind kind) noexcept { return kind == Kind::AllGather || kind == Kind::AllToAll; }

bool agree(const Signature& a, const Signature& b) {
  if (a.kind != b.kind || a.dtype != b.dtype || a.op != b.op || a.root != b.root || a.prescale != b.prescale ||
      a.postscale != b.postscale || a.needs_all_ranks != b.needs_all_ranks || a.device != b.device ||
      a.wire_format != b.wire_format) {
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
  // Ranks grouped by signature, in the order of the lowest rank of each group.
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
  // With some factors no contribution is neutral after scaling.
  const double prescale = operation.common.prescale;
  const ReduceOp op = operation.common.op;
  // Integers are scaled before neutral elements are filled in, so they always have a neutral element.
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

std::optional<std::size_t> Cache::find(const std::string& name, const Signature& own) const {
  const auto found = index_.find(name);
  if (found == index_.end() || slots_[found->second].own != own) return std::nullopt;
  return found->second;
}

std::optional<Cache::Freed> Cache::insert(AgreedPtr agreed, Signature own) {
  if (capacity_ == 0) return std::nullopt;
  std::optional<Freed> freed;
  if (free_.empty() && slots_.size() == capacity_) freed = release(order_.front());
  std::size_t slot = slots_.size();
  if (free_.empty()) {
    slots_.emplace_back();
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  index_.emplace(agreed->name, slot);
  slots_[slot] = {std::move(agreed), std::move(own), order_.insert(order_.end(), slot)};
  return freed;
}

void Cache::touch(std::size_t slot) { order_.splice(order_.end(), order_, slots_[slot].place); }

std::optional<Cache::Freed> Cache::erase(const std::string& name) {
  const auto found = index_.find(name);
  if (found == index_.end()) return std::nullopt;
  return release(found->second);
}

Cache::Freed Cache::release(std::size_t slot) {
  Slot& old = slots_[slot];
  Freed freed{old.agreed->name, slot};
  index_.erase(freed.name);
  order_.erase(old.place);
  old = Slot();
  free_.push_back(slot);
  return freed;
}

void Table::add(int rank, const std::string& name, Signature signature) {
  auto found = index_.find(name);
  if (found == index_.end()) {
    entries_.push_back({name, Brought(size_), size_});
    found = index_.emplace(name, std::prev(entries_.end())).first;
  }
  auto& place = found->second->brought[static_cast<std::size_t>(rank)];
  if (!place) --found->second->missing;
  place = std::move(signature);
}

std::vector<Table::Complete> Table::take_complete(const std::vector<bool>& joined) {
  const bool nobody_joined = std::find(joined.begin(), joined.end(), true) == joined.end();
  std::vector<Complete> result;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    bool complete = entry->missing == 0;
    if (!complete && !nobody_joined) {
      complete = true;
      for (std::size_t rank = 0; rank < size_ && complete; ++rank) {
        complete = joined[rank] || entry->brought[rank].has_value();
      }
    }
    if (!complete) {
      ++entry;
      continue;
    }
    index_.erase(entry->name);
    result.push_back({std::move(entry->name), std::move(entry->brought)});
    entry = entries_.erase(entry);
  }
  return result;
}

bool Table::has(int rank, const std::string& name) const {
  const auto found = index_.find(name);
  return found != index_.end() && found->second->brought[static_cast<std::size_t>(rank)].has_value();
}

void Table::erase(const std::string& name) {
  const auto found = index_.find(name);
  if (found == index_.end()) return;
  entries_.erase(found->second);
  index_.erase(found);
}

namespace {

std::size_t bytes_of(const Agreed& one) noexcept {
  return static_cast<std::size_t>(one.common.count()) * size_of(one.common.dtype);
}

bool fusible(const Agreed& one) noexcept {
  if (one.common.kind != Kind::AllReduce && one.common.kind != Kind::Broadcast) return false;
  if (one.common.wire_format != WireFormat::None) return false;
  return one.common.device != DeviceType::CPU || bytes_of(one) <= kFusedTensor;
}

bool alike(const Signature& a, const Signature& b) noexcept {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.prescale == b.prescale &&
         a.postscale == b.postscale && a.device == b.device;
}

}  // namespace

std::vector<Batch> plan_fusion(std::span<const AgreedPtr> ready, std::size_t threshold) {
  struct Open {
    std::size_t batch;
    std::size_t bytes;
  };
  std::vector<Batch> batches;
  std::vector<Open> open;  // batches that can take more operations, one for each kind
  for (std::size_t i = 0; i < ready.size(); ++i) {
    if (!fusible(*ready[i])) {
      batches.push_back({i});
      continue;
    }
    const std::size_t bytes = bytes_of(*ready[i]);
    const auto found = std::find_if(open.begin(), open.end(), [&](const Open& one) {
      return alike(ready[batches[one.batch].front()]->common, ready[i]->common);
    });
    if (found != open.end() && found->bytes + bytes <= threshold) {
      batches[found->batch].push_back(i);
      found->bytes += bytes;
      continue;
    }
    batches.push_back({i});
    const Open made{batches.size() - 1, bytes};
    if (found != open.end()) {
      *found = made;
    } else {
      open.push_back(made);
    }
  }
  return batches;
}

}  // namespace cohort::named
