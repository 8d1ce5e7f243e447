#include "train/step/ranks.h"

#include "base/result.h"

#include <cohort/digest.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <utility>

namespace cohort::step {
namespace {

// The Work's destructor waits before its memory is freed. If a stream waits instead, a callback keeps the memory.
class PendingWork final : public Pending {
 public:
  PendingWork(Work work, std::shared_ptr<const void> keep) : keep_(std::move(keep)), work_(std::move(work)) {}
  void wait() override { work_.wait(); }
  void synchronize(const Device& stream) override {
    work_.synchronize(stream);
    if (!work_.done()) work_.on_done([keep = std::move(keep_)] {});
  }
  std::optional<bool> finite() const override { return work_.finite(); }

 private:
  std::shared_ptr<const void> keep_;
  Work work_;
};

class RanksOfCommunicator final : public Ranks {
 public:
  explicit RanksOfCommunicator(Communicator comm) : comm_(std::move(comm)) {}
  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  int local_size() const override { return comm_.local_size(); }
  const std::string& host() const override { return comm_.host(); }
  std::vector<int> hosts() const override { return comm_.hosts(); }
  Memory allocate(std::size_t bytes) override { return comm_.allocate(bytes); }
  std::unique_ptr<Pending> start(const char* /*name*/, const Start& start, std::shared_ptr<const void> keep) override {
    return std::make_unique<PendingWork>(start(comm_), std::move(keep));
  }

 private:
  Communicator comm_;
};

}  // namespace

ErrorContext Ranks::where(const char* operation) const {
  ErrorContext where;
  where.rank = rank();
  where.host = host();
  where.operation = operation;
  return where;
}

std::vector<std::vector<std::uint64_t>> gather_rows(Ranks& ranks, const std::vector<std::uint64_t>& mine,
                                                    std::uint32_t tag) {
  const std::size_t width = mine.size() + 1;
  std::vector<std::uint64_t> table(width * static_cast<std::size_t>(ranks.size()));
  const std::size_t row = width * static_cast<std::size_t>(ranks.rank());
  table[row] = 1;
  std::copy(mine.begin(), mine.end(), table.begin() + static_cast<std::ptrdiff_t>(row + 1));
  ranks.run("all_reduce", table,
            [tag](Communicator& comm, auto span) { return comm.all_reduce(span, {.op = ReduceOp::Sum, .tag = tag}); });
  std::vector<std::vector<std::uint64_t>> rows(static_cast<std::size_t>(ranks.size()));
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    const auto begin = table.begin() + static_cast<std::ptrdiff_t>(rank * width);
    if (*begin != 0) rows[rank].assign(begin + 1, begin + static_cast<std::ptrdiff_t>(width));
  }
  return rows;
}

std::shared_ptr<Ranks> ranks_of(Communicator comm) { return std::make_shared<RanksOfCommunicator>(std::move(comm)); }

namespace {

constexpr std::size_t kChunkBytes = std::size_t{64} << 20;

// Ranks compare values by minima, sums and broadcasts only. Ranks that have joined take part in these automatically.
// All ranks then see the same numbers, and so decide in the same way.

// Returns, for each word, whether it is the same on all ranks: by a minimum of the words and of their complements.
std::vector<bool> same_on_all_ranks(Ranks& ranks, const std::vector<std::uint64_t>& words) {
  std::vector<std::uint64_t> least = words;
  for (const std::uint64_t word : words) least.push_back(~word);
  ranks.run("all_reduce", least,
            [](Communicator& comm, auto span) { return comm.all_reduce(span, {.op = ReduceOp::Min}); });
  std::vector<bool> same;
  for (std::size_t i = 0; i < words.size(); ++i) same.push_back(least[i] == ~least[words.size() + i]);
  return same;
}

struct Sides {
  std::vector<int> most;  // the largest group of ranks that agree; if several, that with the lowest rank
  std::vector<int> odd;   // all others
  bool is_majority = false;
};

Sides sides_of(const std::vector<std::vector<std::uint64_t>>& digests) {
  std::map<std::vector<std::uint64_t>, std::vector<int>> groups;
  std::size_t ranks = 0;
  for (std::size_t rank = 0; rank < digests.size(); ++rank) {
    if (digests[rank].empty()) continue;
    groups[digests[rank]].push_back(static_cast<int>(rank));
    ++ranks;
  }
  Sides sides;
  for (const auto& [digest, group] : groups) {
    const bool better =
        group.size() > sides.most.size() || (group.size() == sides.most.size() && group.front() < sides.most.front());
    if (better) sides.most = group;
  }
  for (const auto& [digest, group] : groups) {
    if (group != sides.most) sides.odd.insert(sides.odd.end(), group.begin(), group.end());
  }
  std::sort(sides.odd.begin(), sides.odd.end());
  sides.is_majority = 2 * sides.most.size() > ranks;
  return sides;
}

// "ranks 0-2, 5".
std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ", ";
    text += last == i ? fmt::format("{}", ranks[i]) : fmt::format("{}-{}", ranks[i], ranks[last]);
    i = last + 1;
  }
  return text;
}

// Returns the position of the first byte in which `mine` differs from the root's bytes; mine.size() if no byte differs.
std::size_t first_difference(Ranks& ranks, std::span<const std::uint8_t> mine, int root) {
  std::vector<std::uint8_t> chunk(std::min(kChunkBytes, mine.size()));
  std::size_t first = mine.size();
  for (std::size_t begin = 0; begin < mine.size(); begin += chunk.size()) {
    const std::span<const std::uint8_t> part = mine.subspan(begin, std::min(chunk.size(), mine.size() - begin));
    std::copy(part.begin(), part.end(), chunk.begin());
    ranks.run("broadcast", chunk,
              [&](Communicator& comm, auto span) { return comm.broadcast(span.first(part.size()), {.root = root}); });
    if (first != mine.size()) continue;
    const auto differs = std::mismatch(part.begin(), part.end(), chunk.begin()).first;
    if (differs != part.end()) first = begin + static_cast<std::size_t>(differs - part.begin());
  }
  return first;
}

// "0.25 (0x3e800000)".
std::string element_text(const NamedValues& named, std::int64_t index) {
  const std::uint8_t* const bytes = named.bytes.data() + static_cast<std::size_t>(index) * named.element_size;
  std::string bits;
  for (std::size_t at = named.element_size; at-- > 0;) bits += fmt::format("{:02x}", bytes[at]);
  const std::string value = named.text(index);
  return value.empty() ? "0x" + bits : fmt::format("{} (0x{})", value, bits);
}

std::string broadcast_text(Ranks& ranks, const std::string& text, int root) {
  std::vector<std::uint8_t> room(512);
  std::copy_n(text.begin(), std::min(text.size(), room.size() - 1), room.begin());
  ranks.run("broadcast", room, [&](Communicator& comm, auto span) { return comm.broadcast(span, {.root = root}); });
  return reinterpret_cast<const char*>(room.data());
}

[[noreturn]] void raise_difference(Ranks& ranks, const NamedValues& named, const Sides& sides, std::int64_t step) {
  const int odd = sides.odd.front();
  const int reference = sides.most.front();
  const std::uint64_t mine = first_difference(ranks, named.bytes, reference) / named.element_size;
  const auto index = static_cast<std::int64_t>(gather_rows(ranks, {mine})[static_cast<std::size_t>(odd)].front());
  const std::vector<std::int64_t> position = position_of(index, named.sizes);
  const std::string mine_text = element_text(named, index);
  const std::string theirs = broadcast_text(ranks, mine_text, odd);
  const std::string ours = broadcast_text(ranks, mine_text, reference);
  const std::string odd_host = broadcast_text(ranks, ranks.host(), odd);
  const std::string our_host = broadcast_text(ranks, ranks.host(), reference);

  ErrorContext where = ranks.where("require_same_parameters");
  where.peer = odd;
  const std::string when = step < 0 ? "" : fmt::format(" after {} steps", step);
  const std::string first = fmt::format("{} of [{}], element {} at [{}]", named.name, fmt::join(named.sizes, ", "),
                                        index, fmt::join(position, ", "));
  if (sides.is_majority) {
    throw Error(
        ErrorCode::Mismatch,
        fmt::format("{} {} from the others{} -- {}: rank {} ({}) has {}, {} {} {} -- look at what one rank does "
                    "alone (a learning rate, a changed parameter), then at the memory of that host; go on from "
                    "a checkpoint",
                    ranks_text(sides.odd), sides.odd.size() == 1 ? "differs" : "differ", when, first, odd, odd_host,
                    theirs, ranks_text(sides.most), sides.most.size() == 1 ? "has" : "have", ours),
        where);
  }
  throw Error(
      ErrorCode::Mismatch,
      fmt::format("the ranks' parameters differ{} -- {}: rank {} ({}) has {}, rank {} ({}) has {} -- no side has "
                  "most of the ranks ({} agree, {} do not), so nobody can tell which is right; go on from a "
                  "checkpoint",
                  when, first, reference, our_host, ours, odd, odd_host, theirs, ranks_text(sides.most),
                  ranks_text(sides.odd)),
      where);
}

}  // namespace

std::vector<std::int64_t> position_of(std::int64_t index, std::span<const std::int64_t> sizes) {
  std::vector<std::int64_t> position(sizes.size());
  for (std::size_t d = sizes.size(); d-- > 0; index /= sizes[d]) position[d] = index % sizes[d];
  return position;
}

void require_same_parameters(Ranks& ranks, std::span<const NamedValues> values, std::int64_t step) {
  if (ranks.size() == 1 || values.empty()) return;
  DigestKey key = make_digest_key();
  std::vector<std::uint8_t> shared(key.begin(), key.end());
  ranks.run("broadcast", shared, [](Communicator& comm, auto span) { return comm.broadcast(span); });
  std::copy(shared.begin(), shared.end(), key.begin());
  const auto add = [&](std::vector<std::uint64_t>& words, const void* data, std::size_t bytes) {
    const Digest digest = digest_of(ConstBuffer(data, static_cast<std::int64_t>(bytes), DType::UInt8), key);
    words.insert(words.end(), digest.begin(), digest.end());
  };
  std::vector<std::uint64_t> digests;
  for (const NamedValues& named : values) add(digests, named.bytes.data(), named.bytes.size());
  std::vector<std::uint64_t> together;
  add(together, digests.data(), digests.size() * sizeof(std::uint64_t));
  const std::vector<bool> same = same_on_all_ranks(ranks, together);
  if (same[0] && same[1]) return;

  const std::vector<bool> each = same_on_all_ranks(ranks, digests);
  const auto word = static_cast<std::size_t>(std::find(each.begin(), each.end(), false) - each.begin());
  const std::size_t first = word / 2;
  if (first >= values.size()) raise(ErrorCode::Mismatch, "require_same_parameters: ranks gave different tensors");
  const auto rows = gather_rows(ranks, {digests[2 * first], digests[2 * first + 1]});
  raise_difference(ranks, values[first], sides_of(rows), step);
}

}  // namespace cohort::step
