// State that the ranks of one host share while their communicator lives: the control memory, the sockets that pass
// memory, the peers' processes, and the reason why the world ended. Also reads a peer's memory through the kernel.
// The context (collectives) and the matcher (send, recv) each run on their own thread over one World.
// `record`, `ring`, `lost`, `read_peer` and the accessors may be called from any thread.
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

/// Opens the entry for a world in this process's status page, and writes the names of operations there.
status::GroupStatus& open_status(std::uint64_t id, int rank, int size, bool background) noexcept;

class World final : public messages::Members {
 public:
  /// Meets the other ranks; throws as `meet` does. Afterwards the ranks have mapped the control memory, but may not
  /// have written there yet which cores they have; `Context` waits for that.
  World(const FormOptions& options, std::unique_ptr<Rendezvous> point);
  /// Informs the peers that this rank has left.
  ~World() override;
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  const std::string& host() const noexcept { return host_; }
  const std::string& host_name(int) const noexcept override { return host_; }
  /// The number of a rank in messages: in this world, or in the larger world of which this one is a part.
  int name(int rank) const noexcept { return label_ && rank >= 0 ? label_->name_of(rank) : rank; }
  const OperationLabel* label() const noexcept { return label_.get(); }
  const ControlLayout& layout() const noexcept { return layout_; }
  const std::shared_ptr<Mesh>& mesh() const noexcept { return mesh_; }
  void* control() const noexcept { return control_.data(); }
  Header& header() const noexcept { return ControlLayout::header(control_.data()); }
  RankState& state(int rank) const noexcept { return layout_.state(control_.data(), rank); }
  pid_t pid(int rank) const noexcept;
  /// The rank's process, as "pid 12"; empty if the rank is in this process or its pid means nothing here.
  std::string pid_text(int rank) const override;
  /// The world's id, the same on all ranks; 0 in a part of a larger world.
  std::uint64_t group() const noexcept { return status_->id.load(std::memory_order_relaxed); }
  /// Status in which this rank reports its collective. It is not read in a part of a larger world.
  status::LaneStatus& collectives() const noexcept { return status_->collectives; }
  status::LaneStatus& messages() const noexcept override { return status_->messages; }
  /// True if there are more ranks than cores. Set once, before operations.
  bool crowded() const noexcept override { return crowded_; }
  void set_crowded(bool crowded) noexcept { crowded_ = crowded; }

  // --- the end of the world ---

  bool ended() const noexcept override {
    return header().abort.state.load(std::memory_order_acquire) != AbortRecord::kNone;
  }
  /// False if the world had not ended when this thread read its peers' memory, so that the data read so far is valid.
  bool ended_before_reads() const noexcept {
    return local::ended_before_reads(header().abort.state, AbortRecord::kNone);
  }
  /// Ends the world: records the reason and wakes all ranks. Returns false if the world had ended already. `peer` is
  /// the number used in messages.
  bool record(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text) noexcept {
    return record(code, peer, sequence, text, name(rank_));
  }
  /// Does the same for a reason that another rank reports.
  bool record(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text, int reporter) noexcept;
  /// Does the same at the program's request.
  void abort(std::string_view reason) noexcept;
  void end(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text) override {
    record(code, peer, sequence, text);
  }
  void tell_if_ended() override {}  // all ranks see the end in the control memory
  /// The error that ended the world, as this rank reports it for operation `sequence`; `doing` describes the operation.
  Error recorded(const std::string& doing, std::uint64_t sequence) const override;
  /// Reason why a peer will not come, e.g. "its process 12 has ended"; nullopt if it may still come.
  std::optional<std::string> lost(int rank) const override;
  /// `FormOptions::lost` for a group of these ranks. Valid as long as this.
  std::function<std::optional<std::string>(int)> losses_of(std::vector<int> ranks) const;
  /// True if `number` operations have ended after their turn on all other ranks except lost ones, or if the world has
  /// ended.
  bool are_over(std::uint64_t number) const noexcept;

  // --- waking ---

  /// Wakes sleeping peers after a store that they wait for. May miss a peer that is about to sleep (see context.h).
  void ring() noexcept {
    if (header().sleepers.load(std::memory_order_relaxed) != 0) wake();
  }

  // --- a peer's memory, through the kernel ---

  /// Tries to read all peers' memory, and returns true if this process may. The peers have to be `ready`.
  bool try_reading_peers() const noexcept;
  /// Reads from a peer's address space. Returns Unavailable or PeerLost if that fails.
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
