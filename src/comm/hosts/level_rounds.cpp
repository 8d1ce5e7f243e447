// Rounds by levels: leaders exchange their contributions within each group, level by level. At the next level a group's
// host sends one card of a fixed size; where cards differ, all descriptions are exchanged in the same way.
#include "comm/hosts/context.h"

#include "base/result.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <utility>

namespace cohort::comm::hosts {
namespace {

/// A host's contribution to a round, or that of a group of hosts; a partial sum may follow.
struct Card {
  std::uint8_t uniform = 0;     // all describe the operation by `description`
  std::uint8_t doublings = 0;   // the least that a leader proposes
  std::uint8_t on_the_way = 0;  // the same for pieces in transit
  std::uint8_t reserved = 0;
  std::uint32_t payload = 0;
  Descriptor description;
};

/// The contribution of a member of a level, and the host from which it came.
struct Brought {
  int member = 0;
  int host = 0;
  std::span<const std::byte> bytes;
};

/// How data is exchanged by levels.
struct Exchange {
  Step step = Step::Card;
  /// Most bytes that a member of a level brings.
  std::function<std::size_t(int level, int member)> room;
  /// Returns a group's contribution at the next level.
  std::function<std::vector<std::byte>(int level, const std::vector<Brought>& members)> merge;
};

/// Waits for all frames together, so that every missing rank is named.
void wait_for_group(Context& context, std::vector<transport::Incoming>& in, std::vector<transport::Outgoing>& out) {
  std::size_t next = 0;
  const auto done = [&](std::size_t i) { return in[i].done.load(std::memory_order_acquire); };
  context.wait(
      [&] {
        while (next < in.size() && done(next)) ++next;
        return next == in.size();
      },
      [&] {
        std::set<int> missing;
        for (std::size_t i = next; i < in.size(); ++i) {
          if (!done(i)) missing.insert(in[i].peer);
        }
        return std::vector<int>(missing.begin(), missing.end());
      });
  for (transport::Incoming& frame : in) context.wait_for(frame);
  for (transport::Outgoing& frame : out) context.wait_for(frame);
}

/// Called by leaders. Returns what the last level's merge returns. `rooms` is memory that is reused.
std::vector<std::byte> exchange(Context& context, const Exchange& how, std::vector<std::byte> own,
                                std::vector<std::vector<std::byte>>& rooms) {
  const Levels& levels = context.levels;
  const Layout& layout = context.layout;
  const auto tag_of = [&](int level, int slot, int member) {
    return tag(how.step, static_cast<std::int64_t>(level) << 20 | (slot * Levels::kRadix + member % Levels::kRadix));
  };
  std::map<int, std::vector<std::byte>> brings;  // by member of the level, only those whose slots this host holds
  brings.emplace(layout.host, std::move(own));
  for (int level = 0; level < levels.count(); ++level) {
    std::vector<std::pair<int, int>> gives, gets;  // member, slot of the next level
    for (const int slot : levels.held(level)) {
      const int member = levels.member(level, slot);
      for (int turn = 1; turn < levels.radix(level); ++turn) {
        const int next = levels.next(level, slot, (member + turn) % levels.radix(level));
        if (levels.holder(level + 1, next) != layout.host && levels.first_of_member(level + 1, next))
          gives.emplace_back(member, next);
      }
    }
    for (const int next : levels.held(level + 1)) {
      const auto [first, last] = levels.sources(level, next);
      for (int member = first; member < last && levels.first_of_member(level + 1, next); ++member) {
        if (levels.holder(level, levels.source_slot(level, next, member)) != layout.host)
          gets.emplace_back(member, next);
      }
    }
    if (rooms.size() < gets.size()) rooms.resize(gets.size());
    std::vector<transport::Outgoing> out(gives.size());
    std::vector<transport::Incoming> in(gets.size());
    const FrameGuard guard(context.world);
    for (std::size_t i = 0; i < in.size(); ++i) {
      const auto [member, next] = gets[i];
      rooms[i].resize(std::max(rooms[i].size(), how.room(level, member)));
      const int from = levels.holder(level, levels.source_slot(level, next, member));
      context.receive(in[i], layout.leader(from), tag_of(level, next, member), rooms[i].data(),
                      how.room(level, member));
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto [member, next] = gives[i];
      const std::vector<std::byte>& bytes = brings.at(member);
      context.send(out[i], layout.leader(levels.holder(level + 1, next)), tag_of(level, next, member), bytes.data(),
                   bytes.size());
    }
    wait_for_group(context, in, out);
    std::map<int, std::vector<std::byte>> merged;
    std::size_t got = 0;
    for (const int next : levels.held(level + 1)) {
      if (!levels.first_of_member(level + 1, next)) continue;
      const auto [first, last] = levels.sources(level, next);
      std::vector<Brought> members;
      for (int member = first; member < last; ++member) {
        const int from = levels.holder(level, levels.source_slot(level, next, member));
        if (from == layout.host) {
          members.push_back({member, from, brings.at(member)});
        } else {
          members.push_back({member, from, {rooms[got].data(), in[got].bytes}});
          ++got;
        }
      }
      merged.emplace(levels.member(level + 1, next), how.merge(level, members));
    }
    brings = std::move(merged);
  }
  return std::move(brings.at(0));
}

[[noreturn]] void refuse(Context& context, const Brought& brought) {
  const int leader = context.layout.leader(brought.host);
  context.world.end_and_throw(
      ErrorCode::Corrupt, leader, context.sequence,
      fmt::format("rank {} ({}) sent a description of {} bytes that cannot be read or do not belong to the operation",
                  leader, context.world.host_name(leader), brought.bytes.size()));
}

/// Number of ranks on the hosts of a member.
std::size_t ranks_of(const Context& context, int level, int member) {
  const int first = member * context.levels.stride(level);
  const int last = std::min(first + context.levels.stride(level), context.layout.hosts);
  std::size_t ranks = 0;
  for (int host = first; host < last; ++host) ranks += context.layout.on(host).size();
  return ranks;
}

/// Passes on the descriptions of all ranks, by host.
void exchange_descriptions(Context& context, Round& round) {
  const Layout& layout = context.layout;
  std::vector<Descriptor> own;
  for (std::size_t i = 0; i < layout.here().size(); ++i)
    own.push_back(round.here_brings[round.here_brings.size() == 1 ? 0 : i]);
  Exchange how;
  how.step = Step::Descriptions;
  how.room = [&](int level, int member) { return ranks_of(context, level, member) * sizeof(Descriptor); };
  how.merge = [&](int level, const std::vector<Brought>& members) {
    std::vector<std::byte> all;
    for (const Brought& each : members) {
      if (each.bytes.size() != how.room(level, each.member)) refuse(context, each);
      all.insert(all.end(), each.bytes.begin(), each.bytes.end());
    }
    return all;
  };
  const auto* const bytes = reinterpret_cast<const std::byte*>(own.data());
  const std::vector<std::byte> all =
      exchange(context, how, {bytes, bytes + own.size() * sizeof(Descriptor)}, round.infos);
  const std::byte* from = all.data();
  for (int host = 0; host < layout.hosts; ++host) {
    for (const int rank : layout.on(host)) {
      std::memcpy(&context.agreement.brought[static_cast<std::size_t>(rank)], from, sizeof(Descriptor));
      from += sizeof(Descriptor);
    }
  }
}

}  // namespace

void exchange_by_levels(Context& context, Round& round, const Request* request, const Descriptor& own,
                        const std::byte* payload, void* result) {
  const std::size_t bytes = request != nullptr ? request->input_bytes() : 0;
  const auto written = [&](const Card& card) {
    std::vector<std::byte> to(sizeof card + card.payload);
    std::memcpy(to.data(), &card, sizeof card);
    return to;
  };
  Card outcome;
  Exchange how;
  how.step = Step::Card;
  how.room = [&](int, int) { return sizeof(Card) + context.sum_inline_bytes(); };
  how.merge = [&](int level, const std::vector<Brought>& members) {
    const bool last = level + 1 == context.levels.count();
    Card all;
    all.uniform = round.agreed_here ? 1 : 0;
    all.doublings = static_cast<std::uint8_t>(context.tuner.most());
    all.on_the_way = 255;
    all.description = own;
    std::vector<const void*> sums;
    for (const Brought& each : members) {
      Card card;
      if (each.bytes.size() < sizeof card) refuse(context, each);
      std::memcpy(&card, each.bytes.data(), sizeof card);
      if (card.uniform > 1 || card.doublings > context.tuner.most() || each.bytes.size() != sizeof card + card.payload)
        refuse(context, each);
      all.uniform = all.uniform != 0 && card.uniform != 0 && are_uniform(card.description, own) ? 1 : 0;
      all.doublings = std::min(all.doublings, card.doublings);
      all.on_the_way = std::min(all.on_the_way, card.on_the_way);
      if (all.uniform != 0 && card.payload != bytes) refuse(context, each);
      sums.push_back(each.bytes.data() + sizeof card);
    }
    const bool folds = all.uniform != 0 && bytes > 0;
    all.payload = folds && !last ? static_cast<std::uint32_t>(bytes) : 0;
    std::vector<std::byte> to = written(all);
    if (folds) {
      fold_hosts(*request, sums, last ? result : to.data() + sizeof all, request->input_count,
                 last ? context.layout.size : 0, FoldOrder::Tree);
    }
    outcome = all;
    return to;
  };
  Card first;
  first.uniform = round.agreed_here ? 1 : 0;
  first.doublings = static_cast<std::uint8_t>(context.tuner.doublings());
  first.on_the_way = static_cast<std::uint8_t>(context.tuner.on_the_way());
  first.payload = static_cast<std::uint32_t>(bytes);
  first.description = own;
  std::vector<std::byte> brings = written(first);
  if (bytes > 0) std::memcpy(brings.data() + sizeof first, payload, bytes);
  exchange(context, how, std::move(brings), round.infos);
  context.agreement.uniform = outcome.uniform != 0;
  context.pieces_doubled = outcome.doublings;
  context.on_the_way = outcome.on_the_way;
  if (!context.agreement.uniform) exchange_descriptions(context, round);
}

}  // namespace cohort::comm::hosts
