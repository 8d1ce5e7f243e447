// State that the ranks of one host share while their communicator lives: the control memory, the sockets that pass
// memory, who the peers are and whether they live, why the world ended, and reading a peer's memory through the kernel.
// The context (collectives) and the matcher (send, recv) each run on a thread of their own over one World.
// `record`, `ring` and the accessors may be called from any thread; `lost` and `read_peer` too.
#pragma once

#include "base/memory.h"
#include "base/process.h"
#include "comm/api/communicator_impl.h"
#include "comm/engine/channel.h"
#include "comm/shm/control.h"
#include "comm/shm/rendezvous.h"
#include "telemetry/status_page.h"

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm::local {

class Rendezvous;

/// Entry in this process's status page for a world, with the names of what its ranks do.
status::GroupStatus& open_status(std::uint64_t id, int rank, int size, bool background) noexcept;

class World final : public messages::Members {
 public:
  /// Meets the other ranks; see `meet` for what it throws. Afterwards they have mapped the control memory, but may not
  /// have said where they run: `Context` waits for that.
  World(const FormOptions& options, std::unique_ptr<Rendezvous> point);
  /// Informs the peers that this rank has left.
  ~World() override;
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  const std::string& host() const noexcept { return host_; }
  const std::string& host_name(int) const noexcept override { return host_; }
  /// The number of a rank in messages: its own, or that of the larger world that this one is part of.
  int name(int rank) const noexcept { return label_ && rank >= 0 ? label_->name_of(rank) : rank; }
  const OperationLabel* label() const noexcept { return label_.get(); }
  const ControlLayout& layout() const noexcept { return layout_; }
  const std::shared_ptr<Mesh>& mesh() const noexcept { return mesh_; }
  void* control() const noexcept { return control_.data(); }
  Header& header() const noexcept { return ControlLayout::header(control_.data()); }
  RankState& state(int rank) const noexcept { return layout_.state(control_.data(), rank); }
  pid_t pid(int rank) const noexcept;
  /// "pid 12", for messages; empty if the rank is in this process or its pid means nothing here.
  std::string pid_text(int rank) const override;
  /// The same number on all ranks; 0: none.
  std::uint64_t group() const noexcept { return status_->id.load(std::memory_order_relaxed); }
  /// Status in which this rank reports its collective; nobody reads it in a part of a larger world.
  status::LaneStatus& collectives() const noexcept { return status_->collectives; }
  status::LaneStatus& messages() const noexcept override { return status_->messages; }
  /// More ranks than cores. Set once, before operations.
  bool crowded() const noexcept override { return crowded_; }
  void set_crowded(bool crowded) noexcept { crowded_ = crowded; }

  // --- the end of the world ---

  bool ended() const noexcept override {
    return header().abort.state.load(std::memory_order_acquire) != AbortRecord::kNone;
  }
  /// False: whatever this thread has read of its peers' memory so far was theirs to give.
  bool ended_before_reads() const noexcept {
    return local::ended_before_reads(header().abort.state, AbortRecord::kNone);
  }
  /// Writes down why the world ends and wakes everyone; false if somebody has done so before. `peer` as messages call
  /// it.
  bool record(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text) noexcept {
    return record(code, peer, sequence, text, name(rank_));
  }
  /// The same for what another rank found out.
  bool record(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text, int reporter) noexcept;
  /// The same on the program's request.
  void abort(std::string_view reason) noexcept;
  void end(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text) override {
    record(code, peer, sequence, text);
  }
  void tell_if_ended() override {}  // all see it
  /// The first cause, as this rank reports it while it was `doing` operation `sequence`.
  Error recorded(const std::string& doing, std::uint64_t sequence) const override;
  /// Reason why a peer will not come, e.g. "its process 12 has ended"; nullopt if it may.
  std::optional<std::string> lost(int rank) const override;
  /// True if so many operations have ended after their turn on all ranks that are still here.
  bool are_over(std::uint64_t number) const noexcept;

  // --- waking ---

  /// Wakes sleeping peers, after a store that they wait for. They need not have seen it by then: see context.h.
  void ring() noexcept {
    if (header().sleepers.load(std::memory_order_relaxed) != 0) wake();
  }

  // --- a peer's memory, through the kernel ---

  /// True if this process may read all peers' memory. Tries it; the peers have to be `ready`.
  bool try_reading_peers() const noexcept;
  /// Reads from a peer's address space. Unavailable or PeerLost if that fails.
  Result<void> read_peer(int rank, void* to, std::uint64_t address, std::size_t bytes) const;

 private:
  void wake() noexcept;
  Error as_error(const std::string& doing, std::uint64_t sequence) const;

  const int rank_;
  const int size_;
  const std::string host_;
  const std::shared_ptr<const OperationLabel> label_;
  const ControlLayout layout_;
  status::GroupStatus* status_ = nullptr;
  sys::Mapping control_;
  std::shared_ptr<Mesh> mesh_;
  std::vector<sys::PeerProcess> processes_;
  bool crowded_ = false;
};

}  // namespace cohort::comm::local
