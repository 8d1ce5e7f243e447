#include "train/elastic/agreement.h"

#include "base/log.h"
#include "base/records.h"
#include "train/checkpoint/exchange.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <span>
#include <utility>

namespace cohort::elastic {
namespace {

constexpr std::size_t kAlignment = 64;  // alignment of items within the bytes sent
constexpr std::size_t kUnderWay = 4;    // pieces that a rank sends or receives concurrently

bool is_in(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

std::string ranks_text(const std::vector<int>& ranks) { return fmt::format("{}", fmt::join(ranks, ", ")); }

/// Returns an error if all ranks are new although other ranks had, or may have, trained.
std::optional<Error> lost_to(const std::vector<Standing>& standings) {
  const Standing& first = standings.front();
  if (!std::ranges::all_of(standings, &Standing::came_anew)) return std::nullopt;
  if (!first.not_asked.empty()) {
    return Error(ErrorCode::Unavailable,
                 fmt::format("all ranks have come anew, and whether others had trained before them cannot be asked: {}",
                             first.not_asked));
  }
  return first.reached < 0 ? std::nullopt : lost_state({first.reached, first.checkpoint}, first.steps);
}

// Returns the first name that is in `one` and not in `other`.
std::string difference(const std::vector<std::string>& one, const std::vector<std::string>& other) {
  for (const std::string& name : one) {
    if (std::find(other.begin(), other.end(), name) == other.end()) return name;
  }
  return {};
}

}  // namespace

Result<Agreement> agree_on_step(const std::vector<Standing>& standings) {
  Agreement agreement;
  std::int64_t furthest = -1;
  bool anybody_trained = false;
  for (std::size_t i = 0; i < standings.size(); ++i) {
    const Standing& one = standings[i];
    if (one.names != standings[0].names) {
      const std::string missing = difference(standings[0].names, one.names);
      return fail(
          ErrorCode::Mismatch,
          "the states of ranks 0 and {} consist of different things: '{}' is only in that of rank {} -- add the "
          "same to both",
          i, missing.empty() ? difference(one.names, standings[0].names) : missing, missing.empty() ? i : 0);
    }
    agreement.interrupted = agreement.interrupted || one.interrupted;
    agreement.first_size = std::max(agreement.first_size, one.first_size);
    if (one.fresh) continue;
    anybody_trained = true;
    if (one.whole) furthest = std::max(furthest, one.steps);
  }
  if (!anybody_trained) {
    if (auto lost = lost_to(standings)) return tl::unexpected(*std::move(lost));
    agreement.begins = true;
    agreement.steps = standings[0].steps;
    agreement.first_size = static_cast<std::int32_t>(standings.size());
    for (std::size_t i = 0; i < standings.size(); ++i) agreement.sources.push_back(static_cast<int>(i));
    return agreement;
  }
  agreement.steps = furthest;
  for (std::size_t i = 0; i < standings.size(); ++i) {
    const Standing& one = standings[i];
    const bool is_source = !one.fresh && one.whole && one.steps == furthest;
    (is_source ? agreement.sources : agreement.takers).push_back(static_cast<int>(i));
    if (one.fresh || one.whole || one.steps < furthest || (one.steps == furthest && furthest >= 0)) continue;
    return fail(
        ErrorCode::Unavailable,
        "rank {} lost its world after step {} had changed its parameters and before State::step was called, and "
        "no rank has the state of a step's end -- call step right after optimizer.step, with no collective in "
        "between; go on from the last checkpoint",
        i, one.steps + 1);
  }
  return agreement;
}

std::vector<Digest> digests_of(const PartContents& contents, const DigestKey& key) {
  std::vector<Digest> digests;
  for (const auto& [name, part] : contents) {
    for (const Contents::Item& item : part.items) digests.push_back(digest_of(item.memory, key));
  }
  return digests;
}

std::vector<int> majority(const std::map<int, std::vector<Digest>>& digests) {
  std::map<std::vector<Digest>, std::vector<int>> equal;
  for (const auto& [rank, list] : digests) equal[list].push_back(rank);
  for (auto& [list, ranks] : equal) {
    if (2 * ranks.size() > digests.size()) return std::move(ranks);
  }
  return {};
}

void compare_sources(Communicator& comm, Agreement& agreement, const PartContents& contents,
                     const std::vector<Digest>& mine) {
  if (agreement.sources.size() == 1) return;
  const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(Digest));
  const std::vector<std::string> all = checkpoint::gather(comm, bytes);
  std::map<int, std::vector<Digest>> digests;
  for (const int rank : agreement.sources) {
    const std::string& said = all[static_cast<std::size_t>(rank)];
    auto& list = digests[rank];
    list.resize(said.size() / sizeof(Digest));
    std::memcpy(list.data(), said.data(), list.size() * sizeof(Digest));
  }
  std::vector<int> equal = majority(digests);
  if (agreement.begins) {
    equal.clear();
    for (const auto& [rank, list] : digests) {
      if (list == digests.begin()->second) equal.push_back(rank);
    }
  }
  if (equal.size() == agreement.sources.size()) return;
  std::vector<int> others;
  std::copy_if(agreement.sources.begin(), agreement.sources.end(), std::back_inserter(others),
               [&equal](int rank) { return !is_in(equal, rank); });
  if (!agreement.begins) {
    // Finds the first item that differs between a rank of `others` and the reference.
    const auto& right = digests.at(equal.empty() ? agreement.sources[0] : equal[0]);
    const auto wrong_rank =
        std::find_if(others.begin(), others.end(), [&](int one) { return digests.at(one) != right; });
    const auto& wrong = digests.at(wrong_rank == others.end() ? others[0] : *wrong_rank);
    std::string where = "of another size";
    std::size_t i = 0;
    for (const auto& [name, part] : contents) {
      for (const Contents::Item& item : part.items) {
        if (right.size() == wrong.size() && i < right.size() && right[i] != wrong[i]) {
          where = fmt::format("first in '{}' of '{}'", item.name, name);
          i = right.size();
        }
        ++i;
      }
    }
    const std::string text = fmt::format("after step {} the state of rank{} {} differs from that of others, {}",
                                         agreement.steps, others.size() == 1 ? "" : "s", ranks_text(others), where);
    if (equal.empty())
      raise(ErrorCode::Mismatch, "{}, and no more than half of the ranks agree -- go on from the last checkpoint",
            text);
    if (comm.rank() == equal.front() || is_in(others, comm.rank()))
      log::warn("elastic",
                "{}: it gets that of the others -- suspect its host's memory, or an operation that is not "
                "deterministic",
                text);
  }
  agreement.sources = std::move(equal);
  agreement.takers.insert(agreement.takers.end(), others.begin(), others.end());
  std::sort(agreement.takers.begin(), agreement.takers.end());
}

// ---- sending ----

namespace {

struct ItemPlace {
  std::string name;
  std::uint64_t bytes = 0;
};
void visit_fields(auto& m, auto& a, const ItemPlace*) { a(m.name, m.bytes); }

struct PartPlace {
  std::string name, layout;
  std::vector<ItemPlace> items;
};
void visit_fields(auto& m, auto& a, const PartPlace*) { a(m.name, m.layout, m.items); }

struct NamedValue {
  std::string name, value;
};
void visit_fields(auto& m, auto& a, const NamedValue*) { a(m.name, m.value); }

struct DigestPair {
  std::uint64_t low = 0, high = 0;
};
void visit_fields(auto& m, auto& a, const DigestPair*) { a(m.low, m.high); }

/// Description of a state: everything but the bytes of its items.
struct Catalogue {
  std::vector<PartPlace> parts;
  std::vector<NamedValue> values;
  std::vector<DigestPair> digests;
};
void visit_fields(auto& m, auto& a, const Catalogue*) { a(m.parts, m.values, m.digests); }

std::string catalogue_of(const Supply& supply) {
  Catalogue catalogue;
  for (const auto& [name, contents] : supply.contents) {
    PartPlace part{name, contents.layout, {}};
    for (const Contents::Item& item : contents.items) part.items.push_back({item.name, item.memory.bytes()});
    catalogue.parts.push_back(std::move(part));
  }
  for (const auto& [name, value] : supply.values) catalogue.values.push_back({name, value});
  for (const Digest& digest : supply.digests) catalogue.digests.push_back({digest[0], digest[1]});
  return codec::encode(catalogue);
}

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// A state's items as one sequence of bytes.
class Sequence {
 public:
  explicit Sequence(const PartContents& contents) {
    for (const auto& [name, part] : contents) {
      for (const Contents::Item& item : part.items) {
        places_.push_back({size_, static_cast<const std::byte*>(item.memory.data), item.memory.bytes()});
        size_ += aligned(item.memory.bytes());
      }
    }
  }

  /// Returns `count` bytes from `begin` on: a view if they are contiguous, else copied to `room`.
  std::span<const std::byte> read(std::size_t begin, std::size_t count, std::vector<std::byte>& room) const {
    auto place = std::upper_bound(places_.begin(), places_.end(), begin,
                                  [](std::size_t at, const Place& one) { return at < one.begin; });
    --place;
    if (begin + count <= place->begin + place->bytes) return {place->data + (begin - place->begin), count};
    room.assign(count, std::byte{0});
    for (; place != places_.end() && place->begin < begin + count; ++place) {
      const std::size_t from = std::max(begin, place->begin);
      const std::size_t to = std::min(begin + count, place->begin + place->bytes);
      if (from < to) std::memcpy(room.data() + (from - begin), place->data + (from - place->begin), to - from);
    }
    return room;
  }

 private:
  struct Place {
    std::size_t begin = 0;
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  std::vector<Place> places_;
  std::size_t size_ = 0;
};

/// A range [begin, end) of the sequence that one rank sends to another.
struct Slice {
  int from = 0, to = 0;
  std::size_t begin = 0, end = 0;
};

struct Slices {
  std::vector<Slice> first, then;  ///< first: sent by sources; then: passed on within a host
};

Slices plan_slices(const Agreement& agreement, const std::vector<std::string>& hosts, std::size_t bytes) {
  const auto host_of = [&hosts](int rank) -> const std::string& { return hosts[static_cast<std::size_t>(rank)]; };
  Slices slices;
  std::map<std::string, int> first_takers;
  for (const int taker : agreement.takers) {
    std::vector<int> sources;
    std::copy_if(agreement.sources.begin(), agreement.sources.end(), std::back_inserter(sources),
                 [&](int source) { return host_of(source) == host_of(taker); });
    if (sources.empty()) {
      const auto [first, is_first] = first_takers.try_emplace(host_of(taker), taker);
      if (!is_first) {
        slices.then.push_back({first->second, taker, 0, bytes});
        continue;
      }
      sources = agreement.sources;
    }
    const std::size_t each = aligned((bytes + sources.size() - 1) / sources.size());
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const std::size_t begin = std::min(bytes, i * each);
      if (const std::size_t end = std::min(bytes, begin + each); begin < end)
        slices.first.push_back({sources[i], taker, begin, end});
    }
  }
  return slices;
}

/// Operations under way, at most kUnderWay of them.
class Window {
 public:
  void add(Work work, std::vector<std::byte> room = {}) {
    if (under_way_.size() == kUnderWay) drop();
    under_way_.push_back({std::move(room), std::move(work)});
  }
  void finish() {
    while (!under_way_.empty()) drop();
  }

 private:
  void drop() {
    under_way_.front().work.wait();
    under_way_.pop_front();
  }
  struct Operation {
    std::vector<std::byte> room;  // declared first, so that it outlives `work`
    Work work;
  };
  std::deque<Operation> under_way_;
};

/// Sends and receives this rank's slices piece by piece, taking the slices in turn.
void carry(Communicator& comm, const std::vector<Slice>& slices, const Sequence* from, std::byte* to) {
  Window window;
  bool more = true;
  for (std::size_t offset = 0; more; offset += checkpoint::kPiece) {
    more = false;
    for (const Slice& slice : slices) {
      const std::size_t begin = slice.begin + offset;
      if (begin >= slice.end) continue;
      const std::size_t count = std::min(checkpoint::kPiece, slice.end - begin);
      const auto bytes = static_cast<std::int64_t>(count);
      more = true;
      if (slice.to == comm.rank()) {
        window.add(comm.recv(Buffer(to + begin, bytes, DType::UInt8), slice.from));
      } else if (slice.from == comm.rank()) {
        std::vector<std::byte> room;
        const auto piece = from->read(begin, count, room);
        Work work = comm.send(ConstBuffer(piece.data(), bytes, DType::UInt8), slice.to);
        window.add(std::move(work), std::move(room));
      }
    }
  }
  window.finish();
}

}  // namespace

Received send_state(Communicator& comm, const Agreement& agreement, const std::vector<std::string>& hosts,
                    const Supply& mine, const DigestKey& key) {
  const int lead = agreement.sources.front();
  const std::string said = checkpoint::share(comm, comm.rank() == lead ? catalogue_of(mine) : std::string(), lead);
  const auto catalogue =
      value_or_throw(codec::decode<Catalogue>(said, {.longest_text = said.size(), .what = "a training's state"}));
  std::size_t bytes = 0;
  for (const PartPlace& part : catalogue.parts) {
    for (const ItemPlace& item : part.items) bytes += aligned(item.bytes);
  }
  const bool takes = is_in(agreement.takers, comm.rank());
  Received received;
  // The memory is not zeroed, since all of it is overwritten.
  const std::shared_ptr<std::byte[]> memory(takes ? new std::byte[std::max<std::size_t>(bytes, 1)] : nullptr);
  if (takes) {
    std::size_t begin = 0;
    for (const PartPlace& part : catalogue.parts) {
      Contents& contents = received.contents[part.name];
      contents.layout = part.layout;
      contents.owner = memory;
      for (const ItemPlace& item : part.items) {
        contents.items.push_back(
            {item.name, ConstBuffer(memory.get() + begin, static_cast<std::int64_t>(item.bytes), DType::UInt8)});
        begin += aligned(item.bytes);
      }
    }
    for (const NamedValue& value : catalogue.values) received.values[value.name] = value.value;
    for (const DigestPair& digest : catalogue.digests) received.digests.push_back({digest.low, digest.high});
  }
  if (bytes > 0) {
    const Slices slices = plan_slices(agreement, hosts, bytes);
    const Sequence sequence(takes ? received.contents : mine.contents);
    carry(comm, slices.first, &sequence, memory.get());
    carry(comm, slices.then, &sequence, memory.get());
  }
  if (takes && digests_of(received.contents, key) != received.digests)
    raise(ErrorCode::Corrupt, "rank {}: the state that it was sent has changed on its way", comm.rank());
  return received;
}

}  // namespace cohort::elastic
