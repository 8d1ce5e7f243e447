// Rounds: all ranks exchange the operation's descriptions, and reach one decision before any result is delivered. Small
// sums are part of the round.
#include "comm/hosts/context.h"

#include "base/result.h"
#include "comm/engine/agreement.h"
#include "comm/kernels/codecs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

namespace cohort::comm::hosts {
namespace {

struct InfoHeader {
  static constexpr std::uint16_t kUniform = 1;
  std::uint32_t ranks = 0;
  std::uint16_t flags = 0;
  std::uint8_t doublings = 0;   // number that this host's leader proposes
  std::uint8_t on_the_way = 0;  // pieces in transit that it proposes
  std::uint64_t payload = 0;
};
/// Decision of the leader for its host.
struct Decision {
  std::uint64_t uniform = 0;
  std::uint64_t doublings = 0;
};

/// True if the result can be part of the round. In a reduce_scatter every host gets all data, but needs only a part.
bool goes_inline(const Context& context, const Request& request) noexcept {
  const Layout& layout = context.layout;
  if (!is_reduction(request.kind) || request.round != nullptr) return false;
  // Never in a wire format, since residuals belong to the rank that encodes, and it must not change with the weights.
  if (request.weighted && (context.weights_differ || request.wire_format != WireFormat::None)) return false;
  if (may_be_object(request.dtype) && !context.transport.authenticates_all()) return false;
  const bool whole = request.kind == Kind::AllReduce || request.kind == Kind::Reduce;
  const std::size_t share = whole ? 1 : layout.size == layout.hosts ? 8 : 4;  // measured
  // With a wire format, the limit must not depend on the wire: a residual needs the same elements encoded in each step.
  if (whole && request.wire_format == WireFormat::None) return request.input_bytes() <= context.sum_inline_bytes();
  return request.input_bytes() <= context.inline_bytes / share;
}

/// True if the sum is written directly into the output.
bool folds_in_place(const Context& context, const Request& request) noexcept {
  return context.layout.locals == 1 && destination(context, request, 0) != nullptr;
}

/// Rounds the partial sum as large sums are rounded between hosts. It is not known yet whether this sum is delivered,
/// so the new residual is kept separately.
void round_partial(const Context& context, Round& round, const Request& request, std::byte* partial) {
  if (request.wire_format == WireFormat::None) return;
  const auto count = static_cast<std::size_t>(request.input_count);
  float* residual = nullptr;
  if (request.residual != nullptr) {
    round.residual.assign(request.residual, request.residual + count);
    residual = round.residual.data();
  }
  round_trip(request.wire_format, reinterpret_cast<float*>(partial), count, residual,
             unit_of(request, context.layout.size));
}

/// Returns the leader's input to a small sum, which is the fold of its host's inputs; null on other ranks.
const std::byte* small_partial(Context& context, Round& round, const Request& request) {
  const Layout& layout = context.layout;
  const std::size_t bytes = request.input_bytes();
  const bool as_it_is = request.prescale == 1 && request.wire_format == WireFormat::None;
  if (layout.locals == 1 && as_it_is) return static_cast<const std::byte*>(request.input);
  std::vector<std::byte>& partial = context.scratch(0, bytes);
  if (layout.locals == 1) {
    scale_by(request.prescale, request.dtype, request.input, partial.data(), request.input_count);
    round_partial(context, round, request, partial.data());
    return partial.data();
  }
  Request here = local_request(Kind::Reduce, request.dtype);
  here.op = within_host(request.op);
  here.prescale = request.prescale;
  here.input = request.input;
  here.input_count = request.input_count;
  here.output = layout.leads() ? partial.data() : nullptr;
  here.output_count = layout.leads() ? request.input_count : 0;
  if (!context.local.has_room_inline(bytes)) {
    context.run_local(here);
  } else if (layout.leads()) {
    local::fold_inline(context.local, here);
  }
  if (!layout.leads()) return nullptr;
  round_partial(context, round, request, partial.data());
  return partial.data();
}

/// Exchanges the descriptions of this host's ranks.
void meet_here(Context& context, Round& round, const Request* request, const Descriptor& own) {
  const Layout& layout = context.layout;
  round.agreed_here = are_uniform(own, own);
  if (layout.locals > 1) {
    const bool small = request != nullptr &&
                       (request->kind == Kind::Barrier ||
                        (goes_inline(context, *request) && context.local.has_room_inline(request->input_bytes())));
    context.with_neighbours([&] {
      const Agreement& here = local::meet(context.local, own, request, small);
      if (here.uniform) return;
      for (const Descriptor& each : here.brought) {
        round.agreed_here = round.agreed_here && are_uniform(each, own);
      }
      if (!round.agreed_here) round.here_brings = here.brought;
    });
  }
  if (round.agreed_here || layout.locals == 1) round.here_brings.assign(1, own);
}

/// Stores another host's descriptions. Returns false if they are inconsistent.
bool take_info(Context& context, int host, std::string_view bytes, const Descriptor& own) {
  InfoHeader header;
  const std::vector<int>& ranks = context.layout.on(host);
  if (bytes.size() < sizeof header) return false;
  std::memcpy(&header, bytes.data(), sizeof header);
  const bool agreed_there = header.flags == InfoHeader::kUniform;
  const std::size_t described = agreed_there ? 1 : ranks.size();
  if (header.ranks != ranks.size() || header.flags > InfoHeader::kUniform || header.doublings > context.tuner.most() ||
      header.payload > Context::kMostInline ||
      bytes.size() != sizeof header + described * sizeof(Descriptor) + header.payload) {
    return false;
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    Descriptor& each = context.agreement.brought[static_cast<std::size_t>(ranks[i])];
    std::memcpy(&each, bytes.data() + sizeof header + (agreed_there ? 0 : i * sizeof(Descriptor)), sizeof each);
  }
  context.pieces_doubled = std::min<int>(context.pieces_doubled, header.doublings);
  context.on_the_way = std::min<int>(context.on_the_way, header.on_the_way);
  context.agreement.uniform = context.agreement.uniform && agreed_there &&
                              are_uniform(context.agreement.brought[static_cast<std::size_t>(ranks.front())], own);
  return true;
}

/// The memory to which the fold of small sums is written.
void* small_result(const Context& context, Round& round, const Request& request) noexcept {
  return folds_in_place(context, request) ? request.output : round.small.data() + sizeof(Decision);
}

/// Completes the small sum that was folded to `to`, on each leader.
void finish_small(Context& context, Round& round, const Request& request, void* to) {
  const Layout& layout = context.layout;
  if (request.residual != nullptr) std::copy(round.residual.begin(), round.residual.end(), request.residual);
  if (request.wire_format == WireFormat::None || layout.hosts == 2) return;
  Request own = request;
  if (layout.host != 0) own.residual = nullptr;  // all hosts encode the same; the rounding error counts once
  const auto count = static_cast<std::size_t>(request.input_count);
  encode_result(own, static_cast<float*>(to), context.scratch(1, encoded_bytes(request.wire_format, count)).data(), 0,
                count);
}

/// On each leader, folds the values that were sent with the round.
void fold_infos(Context& context, Round& round, const Request& request, const std::byte* payload,
                const std::vector<transport::Incoming>& in) {
  const Layout& layout = context.layout;
  std::vector<const void*> partials;
  for (std::size_t h = 0; h < in.size(); ++h) {
    if (static_cast<int>(h) != layout.host && in[h].bytes != round.info.size()) {
      const int leader = layout.leader(static_cast<int>(h));
      context.world.end_and_throw(
          ErrorCode::Corrupt, leader, context.sequence,
          fmt::format("rank {} ({}) sent a description of {} bytes where {} belong to the operation", leader,
                      context.world.host_name(leader), in[h].bytes, round.info.size()));
    }
    partials.push_back(
        static_cast<int>(h) == layout.host ? payload : round.infos[h].data() + sizeof(InfoHeader) + sizeof(Descriptor));
  }
  void* const to = small_result(context, round, request);
  fold_hosts(request, partials, to, request.input_count, layout.size);
  finish_small(context, round, request, to);
}

/// Called by leaders: each sends its host's descriptions to all others.
void exchange_infos(Context& context, Round& round, const Request* request, const Descriptor& own,
                    const std::byte* payload) {
  const Layout& layout = context.layout;
  const std::size_t bytes = request != nullptr ? request->input_bytes() : 0;
  const std::size_t described = round.here_brings.size();
  InfoHeader header;
  header.ranks = static_cast<std::uint32_t>(layout.locals);
  header.flags = round.agreed_here ? InfoHeader::kUniform : std::uint16_t{0};
  header.doublings = static_cast<std::uint8_t>(context.tuner.doublings());
  header.on_the_way = static_cast<std::uint8_t>(context.tuner.on_the_way());
  header.payload = bytes;
  round.info.resize(sizeof header + described * sizeof(Descriptor) + bytes);
  std::memcpy(round.info.data(), &header, sizeof header);
  std::memcpy(round.info.data() + sizeof header, round.here_brings.data(), described * sizeof(Descriptor));
  if (bytes > 0) std::memcpy(round.info.data() + sizeof header + described * sizeof(Descriptor), payload, bytes);

  const auto hosts = static_cast<std::size_t>(layout.hosts);
  round.infos.resize(hosts);
  std::vector<transport::Outgoing> out(hosts);
  std::vector<transport::Incoming> in(hosts);
  const FrameGuard guard(context.world);
  for (int host = 0; host < layout.hosts; ++host) {
    const auto h = static_cast<std::size_t>(host);
    if (host == layout.host) continue;
    round.infos[h].resize(sizeof header + layout.on(host).size() * sizeof(Descriptor) + context.sum_inline_bytes());
    context.receive(in[h], layout.leader(host), tag(Step::Info, 0), round.infos[h].data(), round.infos[h].size());
    context.send(out[h], layout.leader(host), tag(Step::Info, 0), round.info.data(), round.info.size());
  }
  // Wait for all together, so that every missing rank is named.
  std::size_t next = 0;
  const auto reached = [&](std::size_t h) {
    return static_cast<int>(h) == layout.host || in[h].done.load(std::memory_order_acquire);
  };
  context.wait(
      [&] {
        while (next < hosts && reached(next)) ++next;
        return next == hosts;
      },
      [&] {
        std::vector<int> missing;
        for (std::size_t h = next; h < hosts; ++h) {
          if (!reached(h)) missing.push_back(layout.leader(static_cast<int>(h)));
        }
        return missing;
      });
  for (std::size_t h = 0; h < hosts; ++h) {
    if (static_cast<int>(h) != layout.host) context.wait_for(out[h]);
  }

  context.agreement.uniform = round.agreed_here;
  context.pieces_doubled = context.tuner.doublings();
  context.on_the_way = context.tuner.on_the_way();
  for (std::size_t i = 0; i < layout.here().size(); ++i) {
    context.agreement.brought[static_cast<std::size_t>(layout.here()[i])] =
        round.here_brings[round.agreed_here ? 0 : i];
  }
  for (int host = 0; host < layout.hosts; ++host) {
    if (host == layout.host) continue;
    const auto& info = round.infos[static_cast<std::size_t>(host)];
    const std::size_t length = in[static_cast<std::size_t>(host)].bytes;
    if (!take_info(context, host, {reinterpret_cast<const char*>(info.data()), std::min(length, info.size())}, own)) {
      context.world.end_and_throw(
          ErrorCode::Corrupt, layout.leader(host), context.sequence,
          fmt::format("rank {} ({}) sent a description of {} bytes that cannot be read", layout.leader(host),
                      context.world.host_name(layout.leader(host)), length));
    }
  }
  if (context.agreement.uniform && bytes > 0) fold_infos(context, round, *request, payload, in);
}

}  // namespace

void meet_all(Context& context, Round& round, const Request* request, const Descriptor& own) {
  const Layout& layout = context.layout;
  round.delivered = context.over = false;
  const auto begun = Context::Clock::now();
  meet_here(context, round, request, own);
  const bool brings_result = round.agreed_here && request != nullptr && goes_inline(context, *request);
  const std::byte* const payload = brings_result ? small_partial(context, round, *request) : nullptr;
  const std::size_t bytes = brings_result ? request->input_bytes() : 0;
  round.small.resize(sizeof(Decision) + bytes);
  Decision decision;
  if (layout.leads()) {
    const Request* const inline_request = brings_result ? request : nullptr;
    if (layout.hosts <= Levels::kRadix) {
      exchange_infos(context, round, inline_request, own, payload);
    } else {
      void* const result = brings_result ? small_result(context, round, *request) : nullptr;
      exchange_by_levels(context, round, inline_request, own, payload, result);
      if (brings_result && context.agreement.uniform) finish_small(context, round, *request, result);
    }
    decision.uniform = context.agreement.uniform ? 1 : 0;
    decision.doublings = static_cast<std::uint64_t>(context.pieces_doubled);
    std::memcpy(round.small.data(), &decision, sizeof decision);
  }
  if (layout.locals > 1) {
    context.with_neighbours([&] { local::hand_out(context.local, 0, round.small.data(), round.small.size()); });
    std::memcpy(&decision, round.small.data(), sizeof decision);
    context.agreement.uniform = decision.uniform != 0;
    context.pieces_doubled = static_cast<int>(decision.doublings);
    if (!context.agreement.uniform) {
      context.with_neighbours([&] {
        local::hand_out(context.local, 0, context.agreement.brought.data(),
                        context.agreement.brought.size() * sizeof(Descriptor));
      });
    }
  }
  if (context.agreement.uniform && brings_result && !folds_in_place(context, *request)) {
    const std::byte* const result = round.small.data() + sizeof decision;
    if (std::byte* const to = destination(context, *request, 0)) {
      std::memcpy(to, result, bytes);
    } else {
      place(context, *request, 0, request->input_count, result);
    }
  }
  round.delivered = context.agreement.uniform && (brings_result || own.kind == Kind::Barrier);
  context.over = true;
  round.waited = Context::Clock::now() - begun;
  if (context.agreement.uniform) {
    context.agreement.settle_on(own);
  } else {
    context.agreement.settle();
  }
  if (context.agreement.agreed.weighted != 0) context.weights_differ = !context.agreement.uniform;
}

std::optional<Disagreement> disagreement(const Context& context) {
  return context.agreement.disagreement(
      context.layout.rank, [&](int rank) { return fmt::format(" (host {})", context.world.host_name(rank)); });
}

std::optional<Disagreement> compare_counts(Context& context, const Request& request) {
  const Layout& layout = context.layout;
  const auto ranks = static_cast<std::size_t>(layout.size);
  std::vector<std::int64_t> own = request.counts->input;
  own.insert(own.end(), request.counts->output.begin(), request.counts->output.end());
  std::vector<std::int64_t> all(2 * ranks * ranks);
  all_gather(context, own.data(), all.data(),
             std::vector<std::int64_t>(ranks, static_cast<std::int64_t>(own.size() * sizeof own[0])));
  const auto row = [&](int rank) { return all.data() + static_cast<std::size_t>(rank) * 2 * ranks; };
  return comm::compare_counts(
      layout.size, layout.rank, [&](int from, int to) { return row(from)[to]; },
      [&](int to, int from) { return row(to)[ranks + static_cast<std::size_t>(from)]; });
}

void refuse_if(const Context& context, std::optional<Disagreement> found) {
  if (!found) return;
  // A rank with a different description may have ended the world meanwhile; then that cause counts.
  context.transport.progress();
  context.world.throw_if_ended();
  throw refusal(context.world.label().doing(), context.layout.rank, context.world.options().placement.host,
                context.sequence, *std::move(found));
}

}  // namespace cohort::comm::hosts
