// Rounds: how all ranks learn what all others bring, and come to one decision before anything is delivered. Small sums
// travel along.
#include "comm/hosts/engine.h"

#include "base/result.h"
#include "comm/hosts/elements.h"
#include "comm/kernels/bfloat16.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm::hosts {

/// Whether the result can come with the round. Of a reduce_scatter all comes to every host, which needs only a part.
bool Engine::beside(const Request& request) const noexcept {
  if (!is_reduction(request.kind) || request.weighted) return false;
  if (may_be_object(request.dtype) && !transport_.authenticates_all()) return false;
  const bool whole = request.kind == Kind::AllReduce || request.kind == Kind::Reduce;
  const std::size_t share = whole ? 1 : layout_.size == layout_.hosts ? 8 : 4;  // measured
  return request.input_bytes() <= beside_bytes_ / share;
}

/// Whether the sum of a description goes straight to where it is wanted.
bool Engine::folds_in_place(const Request& request) const noexcept {
  return layout_.locals == 1 && destination(request, 0) != nullptr;
}

/// What this host's leader brings to a small sum: its ranks' inputs, folded; elsewhere null.
const std::byte* Engine::small_partial(const Request& request) {
  const std::size_t bytes = request.input_bytes();
  const bool as_it_is = request.prescale == 1 && !request.bf16_wire;
  if (layout_.locals == 1 && as_it_is) return static_cast<const std::byte*>(request.input);
  std::vector<std::byte>& partial = scratch(0, bytes);
  if (layout_.locals == 1) {
    scale_by(request.prescale, request.dtype, request.input, partial.data(), request.input_count);
    if (request.bf16_wire) round_to_bfloat16(reinterpret_cast<float*>(partial.data()), bytes / sizeof(float));
    return partial.data();
  }
  Request here = local_request(Kind::Reduce, request.dtype);
  here.op = within_host(request.op);
  here.prescale = request.prescale;
  here.input = request.input;
  here.input_count = request.input_count;
  here.output = layout_.leads() ? partial.data() : nullptr;
  here.output_count = layout_.leads() ? request.input_count : 0;
  if (!local_.has_room_beside(bytes)) {
    run_local(here);
  } else if (layout_.leads()) {
    local_.fold_beside(here);
  }
  if (!layout_.leads()) return nullptr;
  if (request.bf16_wire) round_to_bfloat16(reinterpret_cast<float*>(partial.data()), bytes / sizeof(float));
  return partial.data();
}

/// The ranks of this host learn what the others bring.
void Engine::meet(const Request* request, const Descriptor& own) {
  agreed_here_ = own.kind != Kind::Joined && own.weighted == 0;
  if (layout_.locals > 1) {
    const bool small = request != nullptr && (request->kind == Kind::Barrier ||
                                              (beside(*request) && local_.has_room_beside(request->input_bytes())));
    with_neighbours([&] {
      const Agreement& here = local_.meet(own, request, small);
      if (here.uniform) return;
      for (const Descriptor& each : here.brought) {
        agreed_here_ = agreed_here_ && each.kind != Kind::Joined && each.weighted == 0 && agree(each, own);
      }
      if (!agreed_here_) here_brings_ = here.brought;
    });
  }
  if (agreed_here_ || layout_.locals == 1) here_brings_.assign(1, own);
}

void Engine::round(const Request* request, const Descriptor& own) {
  delivered_ = over_ = false;
  const auto begun = Clock::now();
  meet(request, own);
  const bool brings_result = agreed_here_ && request != nullptr && beside(*request);
  const std::byte* const payload = brings_result ? small_partial(*request) : nullptr;
  const std::size_t bytes = brings_result ? request->input_bytes() : 0;
  small_.resize(sizeof(Decision) + bytes);
  Decision decision;
  if (layout_.leads()) {
    exchange_infos(brings_result ? request : nullptr, own, payload);
    decision.uniform = round_.uniform ? 1 : 0;
    decision.doublings = static_cast<std::uint64_t>(pieces_doubled_);
    std::memcpy(small_.data(), &decision, sizeof decision);
  }
  if (layout_.locals > 1) {
    with_neighbours([&] { local_.hand_out(small_.data(), small_.size()); });
    std::memcpy(&decision, small_.data(), sizeof decision);
    round_.uniform = decision.uniform != 0;
    pieces_doubled_ = static_cast<int>(decision.doublings);
    if (!round_.uniform) {
      with_neighbours([&] { local_.hand_out(round_.brought.data(), round_.brought.size() * sizeof(Descriptor)); });
    }
  }
  if (round_.uniform && brings_result && !folds_in_place(*request)) {
    const std::byte* const result = small_.data() + sizeof decision;
    if (std::byte* const to = destination(*request, 0)) {
      std::memcpy(to, result, bytes);
    } else {
      place(*request, 0, request->input_count, result);
    }
  }
  delivered_ = round_.uniform && (brings_result || own.kind == Kind::Barrier);
  over_ = true;
  waited_ = Clock::now() - begun;
  if (round_.uniform) {
    round_.settle_on(own);
  } else {
    round_.settle();
  }
}

/// Leaders: each sends its host's description to all others.
void Engine::exchange_infos(const Request* request, const Descriptor& own, const std::byte* payload) {
  const std::size_t bytes = request != nullptr ? request->input_bytes() : 0;
  const std::size_t described = here_brings_.size();
  InfoHeader header;
  header.ranks = static_cast<std::uint32_t>(layout_.locals);
  header.flags = agreed_here_ ? InfoHeader::kUniform : std::uint16_t{0};
  header.doublings = static_cast<std::uint16_t>(tuner_.doublings());
  header.payload = bytes;
  info_.resize(sizeof header + described * sizeof(Descriptor) + bytes);
  std::memcpy(info_.data(), &header, sizeof header);
  std::memcpy(info_.data() + sizeof header, here_brings_.data(), described * sizeof(Descriptor));
  if (bytes > 0) std::memcpy(info_.data() + sizeof header + described * sizeof(Descriptor), payload, bytes);

  const auto hosts = static_cast<std::size_t>(layout_.hosts);
  std::vector<transport::Outgoing> out(hosts);
  std::vector<transport::Incoming> in(hosts);
  const FrameGuard guard(world_);
  for (int host = 0; host < layout_.hosts; ++host) {
    const auto h = static_cast<std::size_t>(host);
    if (host == layout_.host) continue;
    infos_[h].resize(sizeof header + layout_.on(host).size() * sizeof(Descriptor) + beside_bytes_);
    receive(in[h], layout_.leader(host), tag(Step::Info, 0), infos_[h].data(), infos_[h].size());
    send(out[h], layout_.leader(host), tag(Step::Info, 0), info_.data(), info_.size());
  }
  // All at once, so that everyone who is missing is named.
  std::size_t next = 0;
  const auto reached = [&](std::size_t h) {
    return static_cast<int>(h) == layout_.host || in[h].done.load(std::memory_order_acquire);
  };
  wait(
      [&] {
        while (next < hosts && reached(next)) ++next;
        return next == hosts;
      },
      [&] {
        std::vector<int> missing;
        for (std::size_t h = next; h < hosts; ++h) {
          if (!reached(h)) missing.push_back(layout_.leader(static_cast<int>(h)));
        }
        return missing;
      });
  for (std::size_t h = 0; h < hosts; ++h) {
    if (static_cast<int>(h) != layout_.host) wait_for(out[h]);
  }

  round_.uniform = agreed_here_;
  pieces_doubled_ = tuner_.doublings();
  for (std::size_t i = 0; i < layout_.here().size(); ++i) {
    round_.brought[static_cast<std::size_t>(layout_.here()[i])] = here_brings_[agreed_here_ ? 0 : i];
  }
  for (int host = 0; host < layout_.hosts; ++host) {
    if (host == layout_.host) continue;
    const auto& info = infos_[static_cast<std::size_t>(host)];
    const std::size_t length = in[static_cast<std::size_t>(host)].bytes;
    if (!take_info(host, {reinterpret_cast<const char*>(info.data()), std::min(length, info.size())}, own)) {
      world_.end_and_throw(ErrorCode::Corrupt, layout_.leader(host), sequence_,
                           fmt::format("rank {} ({}) sent a description of {} bytes that cannot be read",
                                       layout_.leader(host), world_.host_name(layout_.leader(host)), length));
    }
  }
  if (!round_.uniform || bytes == 0) return;
  std::vector<const void*> partials;
  for (std::size_t h = 0; h < hosts; ++h) {
    if (static_cast<int>(h) != layout_.host && in[h].bytes != info_.size()) {
      const int leader = layout_.leader(static_cast<int>(h));
      world_.end_and_throw(ErrorCode::Corrupt, leader, sequence_,
                           fmt::format("rank {} ({}) sent a description of {} bytes where {} belong to the operation",
                                       leader, world_.host_name(leader), in[h].bytes, info_.size()));
    }
    partials.push_back(
        static_cast<int>(h) == layout_.host ? payload : infos_[h].data() + sizeof(InfoHeader) + sizeof(Descriptor));
  }
  void* const to = folds_in_place(*request) ? request->output : small_.data() + sizeof(Decision);
  fold_hosts(*request, partials, to, request->input_count, layout_.size);
  if (request->bf16_wire && layout_.hosts > 2) round_to_bfloat16(static_cast<float*>(to), bytes / sizeof(float));
}

/// False if the description does not hold together.
bool Engine::take_info(int host, std::string_view bytes, const Descriptor& own) {
  InfoHeader header;
  const std::vector<int>& ranks = layout_.on(host);
  if (bytes.size() < sizeof header) return false;
  std::memcpy(&header, bytes.data(), sizeof header);
  const bool agreed_there = header.flags == InfoHeader::kUniform;
  const std::size_t described = agreed_there ? 1 : ranks.size();
  if (header.ranks != ranks.size() || header.flags > InfoHeader::kUniform || header.doublings > tuner_.most() ||
      header.payload > beside_bytes_ ||
      bytes.size() != sizeof header + described * sizeof(Descriptor) + header.payload) {
    return false;
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    Descriptor& each = round_.brought[static_cast<std::size_t>(ranks[i])];
    std::memcpy(&each, bytes.data() + sizeof header + (agreed_there ? 0 : i * sizeof(Descriptor)), sizeof each);
  }
  pieces_doubled_ = std::min<int>(pieces_doubled_, header.doublings);
  round_.uniform =
      round_.uniform && agreed_there && agree(round_.brought[static_cast<std::size_t>(ranks.front())], own);
  return true;
}

std::optional<Disagreement> Engine::disagreement() const {
  return round_.disagreement(layout_.rank, [&](int rank) { return fmt::format(" (host {})", world_.host_name(rank)); });
}

std::optional<Disagreement> Engine::compare_counts(const Request& request) {
  const auto ranks = static_cast<std::size_t>(layout_.size);
  std::vector<std::int64_t> own = request.counts->input;
  own.insert(own.end(), request.counts->output.begin(), request.counts->output.end());
  std::vector<std::int64_t> all(2 * ranks * ranks);
  all_gather(own.data(), all.data(),
             std::vector<std::int64_t>(ranks, static_cast<std::int64_t>(own.size() * sizeof own[0])));
  const auto row = [&](int rank) { return all.data() + static_cast<std::size_t>(rank) * 2 * ranks; };
  return comm::compare_counts(
      layout_.size, layout_.rank, [&](int from, int to) { return row(from)[to]; },
      [&](int to, int from) { return row(to)[ranks + static_cast<std::size_t>(from)]; });
}

void Engine::refuse_if(std::optional<Disagreement> found) const {
  if (!found) return;
  // Who brought something else may have ended the world since: that is what counts then.
  transport_.progress();
  world_.throw_if_ended();
  throw refusal(world_.label().doing(), layout_.rank, world_.options().placement.host, sequence_, *std::move(found));
}

}  // namespace cohort::comm::hosts
