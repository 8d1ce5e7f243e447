// What the ranks of a host do for an operation of a larger world (comm/hosts). Nothing here is negotiated: that has
// been done once, in `meet`. Counters alone say when a peer has staged, lent or read a part.
#include "comm/local/engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::comm::local {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(2);

}  // namespace

void Engine::serve_larger(Waiters& waiters, std::function<void()> meanwhile) {
  waiters_ = &waiters;
  meanwhile_ = std::move(meanwhile);
  set_slice(kSlice);
  inputs_.resize(static_cast<std::size_t>(size_));
}

const Agreement& Engine::meet(const Descriptor& own, const Request* request, bool beside) {
  throw_if_ended();
  ++sequence_;
  small_ = beside;
  Descriptor& brought = own_slot().descriptor;
  brought = own;
  brought.check_finite = 0;
  tiny_ = beside && request->input_bytes() <= Slot::kTiny;
  if (request != nullptr && !beside) note_memory(brought, *request);
  publish(beside && rank_ != 0 && request->input_count > 0 ? request : nullptr);  // rank 0 has its own
  gather();
  inputs_known_ = !small_;
  for (std::size_t rank = 0; inputs_known_ && rank < inputs_.size(); ++rank) {
    inputs_[rank] = round_.brought[rank].input();
  }
  return round_;
}

/// All ranks of the host bring this, each its own memory.
void Engine::begin_part(const Request& part) {
  round_.settle_on(describe(part));
  serving_ = false;
  non_finite_ = false;
  for (Descriptor& brought : round_.brought) brought.input_segment = 0;
  if (is_reduction(part.kind)) set_members(part);
}

void Engine::fold_beside(const Request& part) {
  begin_part(part);
  all_reduce_beside(part);
}

struct Engine::FirstsCounters {
  using State = RankState;
  Engine& engine;
  void wait(CounterOf counter, std::uint64_t number) const {
    if (counter != &RankState::staged) return engine.wait_for_counters(counter, number);
    const auto has_come = [&] { return reached(engine.state(0).staged.value, number); };
    engine.wait_until(has_come, [&] { return has_come() ? std::vector<int>() : std::vector<int>{0}; });
  }
  void post(CounterOf counter, std::uint64_t number) const noexcept {
    if (counter == &RankState::staged && engine.rank_ != 0) {
      local::publish(engine.state(engine.rank_).staged.value, number);  // nobody is to wake for it
    } else {
      engine.post(counter, number);
    }
  }
};

void Engine::hand_out(void* data, std::size_t bytes) {
  const std::size_t per_chunk = layout().chunk_bytes();
  const auto place = [&](std::uint64_t chunk) { return static_cast<std::byte*>(data) + chunk * per_chunk; };
  const auto bytes_of = [&](std::uint64_t chunk) { return std::min(per_chunk, bytes - chunk * per_chunk); };
  const Chunks all{chunks_, (bytes + per_chunk - 1) / per_chunk, rank_ == 0, rank_ != 0};
  run_one_ahead(
      FirstsCounters{*this}, all,
      [&](std::uint64_t chunk, std::uint64_t number) {
        std::memcpy(layout().staging(world_.control(), 0, number), place(chunk), bytes_of(chunk));
      },
      [&](std::uint64_t chunk, std::uint64_t number) {
        std::memcpy(place(chunk), layout().staging(world_.control(), 0, number), bytes_of(chunk));
      });
  chunks_ += all.count;
}

// Registered inputs are read in place, at once: they have been there since all met. Who brings one has it back when the
// all_gather that ends the block has begun on all ranks.
void Engine::reduce_scatter_part(const Request& part, std::optional<std::int64_t> begin) {
  begin_part(part);
  if (begin && inputs_known_ && plan_.zero_copy != 0) {
    const std::size_t offset = static_cast<std::size_t>(*begin) * size_of(part.dtype);
    for (std::size_t rank = 0; rank < inputs_.size(); ++rank) {
      round_.brought[rank].input_segment = inputs_[rank].segment;
      round_.brought[rank].input_offset = inputs_[rank].offset + offset;
    }
  }
  if (inputs_mapped()) {
    reduce_scatter_direct(part);
  } else {
    measure_again();
    reduce_scatter_staged(part);
  }
  check_reads();
}

std::uint64_t Engine::all_gather_part(const Request& part) {
  begin_part(part);
  if (largest_block(part) < plan_.cross_copy_bytes) {
    move_staged(part);
    return 0;
  }
  run_one_ahead(
      Counters{*this}, {chunks_, 1},
      [&](std::uint64_t, std::uint64_t number) {
        state(rank_).lent[number % 2] = reinterpret_cast<std::uint64_t>(part.input);
      },
      [&](std::uint64_t, std::uint64_t number) {
        for (int step = 0; step < size_; ++step) {
          const int source = (rank_ + step) % size_;  // not all at the same one
          const Block own = block(part, source, rank_);
          std::byte* const to = static_cast<std::byte*>(part.output) + own.to;
          if (source == rank_) {
            copy_pieces(to, static_cast<const std::byte*>(part.input), own.bytes);
          } else {
            pull(source, {0, state(source).lent[number % 2]}, 0, own.bytes, to);
          }
        }
      });
  check_reads();
  return ++chunks_;
}

void Engine::wait_until_read(std::uint64_t number) {
  if (number > 0) wait_for_counters(&RankState::reduced, number);
}

void Engine::run_part(const Request& part) {
  announce(part);
  gather();
  if (part.kind == Kind::AllToAllV) check_room_for_counts();
  execute(part, nullptr);
  if (!small_) check_reads();
}

}  // namespace cohort::comm::local
