#include <cohort/torch/same_parameters.h>

#include "base/result.h"

#include <cohort/digest.h>
#include <cohort/torch/tensor.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <span>

namespace cohort {

namespace {

constexpr std::size_t kChunkBytes = std::size_t{64} << 20;

// What is compared is exchanged by minima, sums and broadcasts: in those, ranks that have joined take part without a
// word. All ranks come to the same decisions, since they see the same numbers.

// Whether the words are the same on all ranks: a minimum of them and of their complements.
std::vector<bool> same_on_all_ranks(Communicator& comm, const std::vector<std::uint64_t>& words) {
  std::vector<std::uint64_t> least = words;
  for (const std::uint64_t word : words) least.push_back(~word);
  comm.all_reduce(std::span(least), {.op = ReduceOp::Min}).wait();
  std::vector<bool> same;
  for (std::size_t i = 0; i < words.size(); ++i) same.push_back(least[i] == ~least[words.size() + i]);
  return same;
}

// Row r: what rank r brings. Empty for a rank that has joined.
using Rows = std::vector<std::vector<std::uint64_t>>;
Rows gather(Communicator& comm, const std::vector<std::uint64_t>& mine) {
  const std::size_t width = mine.size() + 1;
  std::vector<std::uint64_t> table(width * static_cast<std::size_t>(comm.size()));
  const std::size_t row = width * static_cast<std::size_t>(comm.rank());
  table[row] = 1;
  std::copy(mine.begin(), mine.end(), table.begin() + static_cast<std::ptrdiff_t>(row + 1));
  comm.all_reduce(std::span(table), {.op = ReduceOp::Sum}).wait();
  Rows rows(static_cast<std::size_t>(comm.size()));
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    const auto begin = table.begin() + static_cast<std::ptrdiff_t>(rank * width);
    if (*begin != 0) rows[rank].assign(begin + 1, begin + static_cast<std::ptrdiff_t>(width));
  }
  return rows;
}

struct Sides {
  std::vector<int> most;  // the largest group of ranks that agree; of several, the one with the lowest rank
  std::vector<int> odd;   // all others
  bool is_majority = false;
};

Sides sides_of(const Rows& digests) {
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

// The first byte in which `flat` differs from that of `root`; its size if there is none.
std::size_t first_difference(Communicator& comm, const at::Tensor& flat, int root) {
  std::vector<std::uint8_t> chunk(std::min(kChunkBytes, flat.nbytes()));
  const auto* const mine = static_cast<const std::uint8_t*>(flat.data_ptr());
  std::size_t first = flat.nbytes();
  for (std::size_t begin = 0; begin < flat.nbytes(); begin += chunk.size()) {
    const std::size_t bytes = std::min(chunk.size(), flat.nbytes() - begin);
    std::memcpy(chunk.data(), mine + begin, bytes);
    comm.broadcast(std::span(chunk.data(), bytes), {.root = root}).wait();
    if (first != flat.nbytes() || std::memcmp(chunk.data(), mine + begin, bytes) == 0) continue;
    const auto end = chunk.begin() + static_cast<std::ptrdiff_t>(bytes);
    first = begin + static_cast<std::size_t>(std::mismatch(chunk.begin(), end, mine + begin).first - chunk.begin());
  }
  return first;
}

// "0.25 (0x3e800000)".
std::string element_text(const at::Tensor& flat, std::int64_t index) {
  const std::size_t size = flat.element_size();
  const auto* const bytes = static_cast<const std::uint8_t*>(flat.data_ptr()) + static_cast<std::size_t>(index) * size;
  std::string bits;
  for (std::size_t at = size; at-- > 0;) bits += fmt::format("{:02x}", bytes[at]);
  const at::Tensor element = flat[index];
  if (at::isComplexType(flat.scalar_type())) return "0x" + bits;
  if (at::isFloatingType(flat.scalar_type())) return fmt::format("{} (0x{})", element.item<double>(), bits);
  return fmt::format("{} (0x{})", element.item<std::int64_t>(), bits);
}

std::string broadcast_text(Communicator& comm, const std::string& text, int root) {
  std::array<char, 512> room = {};
  std::memcpy(room.data(), text.data(), std::min(text.size(), room.size() - 1));
  comm.broadcast(Buffer(room.data(), static_cast<std::int64_t>(room.size()), DType::UInt8), {.root = root}).wait();
  return room.data();
}

[[noreturn]] void raise_difference(Communicator& comm, const NamedTensor& named, const Sides& sides,
                                   const SameParametersOptions& options) {
  const int odd = sides.odd.front();
  const int reference = sides.most.front();
  const at::Tensor flat = named.tensor.detach().contiguous().view({-1});
  const std::size_t byte = first_difference(comm, flat, reference);
  const std::uint64_t mine = byte / flat.element_size();
  const auto index = static_cast<std::int64_t>(gather(comm, {mine})[static_cast<std::size_t>(odd)].front());
  std::vector<std::int64_t> position(static_cast<std::size_t>(named.tensor.dim()));
  std::int64_t rest = index;
  for (std::size_t d = position.size(); d-- > 0; rest /= named.tensor.size(static_cast<std::int64_t>(d))) {
    position[d] = rest % named.tensor.size(static_cast<std::int64_t>(d));
  }
  const std::string mine_text = element_text(flat, index);
  const std::string theirs = broadcast_text(comm, mine_text, odd);
  const std::string ours = broadcast_text(comm, mine_text, reference);
  const std::string odd_host = broadcast_text(comm, comm.host(), odd);
  const std::string our_host = broadcast_text(comm, comm.host(), reference);

  ErrorContext where;
  where.rank = comm.rank();
  where.host = comm.host();
  where.peer = odd;
  where.operation = "require_same_parameters";
  const std::string when = options.step < 0 ? "" : fmt::format(" after {} steps", options.step);
  const std::string first = fmt::format("{} of [{}], element {} at [{}]", named.name,
                                        fmt::join(named.tensor.sizes().vec(), ", "), index, fmt::join(position, ", "));
  if (sides.is_majority) {
    throw Error(ErrorCode::Mismatch,
                fmt::format("{} {} from the others{} -- {}: rank {} ({}) has {}, {} {} {} -- look at the memory of "
                            "that host and at what changes parameters on one rank only; go on from a checkpoint",
                            ranks_text(sides.odd), sides.odd.size() == 1 ? "differs" : "differ", when, first, odd,
                            odd_host, theirs, ranks_text(sides.most), sides.most.size() == 1 ? "has" : "have", ours),
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

void require_same_parameters(Communicator& comm, const std::vector<NamedTensor>& tensors,
                             const SameParametersOptions& options) {
  for (const NamedTensor& named : tensors) {
    if (!named.tensor.defined() || !named.tensor.device().is_cpu() || named.tensor.layout() != at::kStrided) {
      raise(ErrorCode::InvalidArgument, "require_same_parameters: {} is undefined, not dense, or not on the CPU",
            named.name);
    }
  }
  if (comm.size() == 1 || tensors.empty()) return;
  const at::NoGradGuard no_grad;
  DigestKey key = make_digest_key();
  comm.broadcast(std::span(key)).wait();
  std::vector<std::uint64_t> digests;
  for (const NamedTensor& named : tensors) {
    const at::Tensor flat = named.tensor.detach().contiguous();
    const ConstBuffer bytes(flat.data_ptr(), static_cast<std::int64_t>(flat.nbytes()), DType::UInt8);
    const Digest digest = digest_of(bytes, key);
    digests.insert(digests.end(), digest.begin(), digest.end());
  }
  const auto as_bytes = [](const std::vector<std::uint64_t>& words) {
    return ConstBuffer(words.data(), static_cast<std::int64_t>(words.size() * sizeof(std::uint64_t)), DType::UInt8);
  };
  const Digest together = digest_of(as_bytes(digests), key);
  const std::vector<bool> same = same_on_all_ranks(comm, {together.begin(), together.end()});
  if (same[0] && same[1]) return;

  const std::vector<bool> each = same_on_all_ranks(comm, digests);
  const auto word = static_cast<std::size_t>(std::find(each.begin(), each.end(), false) - each.begin());
  const std::size_t first = word / 2;
  if (first >= tensors.size()) raise(ErrorCode::Mismatch, "require_same_parameters: ranks gave different tensors");
  const Rows rows = gather(comm, {digests[2 * first], digests[2 * first + 1]});
  raise_difference(comm, tensors[first], sides_of(rows), options);
}

}  // namespace cohort
