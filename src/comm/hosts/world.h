// The placement and shared state of a world on several hosts, and the choice of its transport: TCP, or MPI on top of
// TCP. Only this file and world.cpp name concrete transports.
#pragma once

#include "comm/api/communicator_impl.h"
#include "comm/engine/agreement.h"
#include "comm/engine/channel.h"
#include "comm/hosts/levels.h"
#include "comm/shm/control.h"
#include "comm/shm/local_communicator.h"
#include "comm/shm/rendezvous.h"
#include "comm/transport/tcp/tcp_transport.h"
#include "comm/transport/transport.h"
#include "telemetry/status_page.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm::hosts {

// Placement of the ranks: hosts, the ranks on each host, and stripes (ranks with the same local number, one on each
// host). Plain data, made once; any thread may read.
struct Layout {
  /// `host_of[r]` is the number of rank r's host; hosts are numbered from 0 without gaps.
  Layout(std::vector<int> host_of, int own) : host_of_rank(std::move(host_of)), rank(own) {
    size = static_cast<int>(host_of_rank.size());
    for (int r = 0; r < size; ++r) {
      const auto h = static_cast<std::size_t>(host_of_rank[static_cast<std::size_t>(r)]);
      if (ranks.size() <= h) ranks.resize(h + 1);
      local_of_rank.push_back(static_cast<int>(ranks[h].size()));
      ranks[h].push_back(r);
    }
    hosts = static_cast<int>(ranks.size());
    host = host_of_rank[static_cast<std::size_t>(rank)];
    local = local_of_rank[static_cast<std::size_t>(rank)];
    locals = static_cast<int>(here().size());
    stripes = size;
    for (const std::vector<int>& there : ranks) {
      stripes = std::min(stripes, static_cast<int>(there.size()));
      contiguous = contiguous && there.back() - there.front() + 1 == static_cast<int>(there.size());
    }
  }

  const std::vector<int>& here() const noexcept { return ranks[static_cast<std::size_t>(host)]; }
  const std::vector<int>& on(int which) const noexcept { return ranks[static_cast<std::size_t>(which)]; }
  int leader(int which) const noexcept { return on(which).front(); }
  bool leads() const noexcept { return local == 0; }
  int host_of(int which) const noexcept { return host_of_rank[static_cast<std::size_t>(which)]; }
  int local_of(int which) const noexcept { return local_of_rank[static_cast<std::size_t>(which)]; }

  /// Returns how many of the first `count` hosts have a rank with this local number.
  int hosts_with(int local_number, int count) const noexcept {
    return static_cast<int>(std::count_if(ranks.begin(), ranks.begin() + count, [&](const auto& there) {
      return static_cast<int>(there.size()) > local_number;
    }));
  }

  std::vector<int> host_of_rank;
  std::vector<int> local_of_rank;
  std::vector<std::vector<int>> ranks;  ///< by host, ascending
  int rank = 0;
  int size = 1;
  int hosts = 1;
  int host = 0;    ///< this rank's host
  int local = 0;   ///< this rank's number on that host
  int locals = 1;  ///< number of ranks on that host
  int stripes = 1;
  bool contiguous = true;  ///< the ranks of each host are numbered one after the other
};

/// Adds to a rank's description what the others need for the world's transport. If the transport is MPI, the first call
/// in a process initialises MPI, collectively. Throws the reason if MPI is not available.
void complete_info(transport::tcp::PeerInfo& info, const FormOptions& options);

/// Makes the world's transport. Throws Mismatch if the ranks cannot reach each other by it.
std::unique_ptr<transport::Transport> make_transport(const FormOptions& options,
                                                     transport::tcp::TcpTransport::Options tcp,
                                                     transport::tcp::Listeners listeners,
                                                     transport::TransportEvents& events);

// State of a world on several hosts: where each rank is, the local world of this host, the transport to other hosts,
// and why the world ended. The first cause is kept in the local world's control memory, so all ranks of a host report
// the same cause; it is also sent to all connected ranks. Any thread.

/// Describes the rank's operation, for the messages of the local world.
class HostsOperationLabel final : public OperationLabel {
 public:
  explicit HostsOperationLabel(std::vector<int> names) : names_(std::move(names)) {}
  void begin(std::uint64_t number, const Descriptor& what);
  int name_of(int rank) const noexcept override { return names_[static_cast<std::size_t>(rank)]; }
  std::string doing() const override;
  std::uint64_t number() const noexcept override { return number_.load(std::memory_order_relaxed); }

 private:
  const std::vector<int> names_;
  std::atomic<std::uint64_t> number_{0};
  mutable std::mutex mutex_;
  Descriptor what_;
};

/// Inputs for forming a group without a store: its members have exchanged this data already.
struct Place {
  std::unique_ptr<transport::tcp::Listeners> listeners;
  std::unique_ptr<local::Rendezvous> point;
  std::vector<transport::tcp::PeerInfo> infos;  ///< by rank
  std::vector<std::string> entries;             ///< by local rank, names of meeting points
  std::string token;
};

class World final : public transport::TransportEvents, public messages::Members {
 public:
  /// Throws any error of forming a world.
  World(const FormOptions& options, std::unique_ptr<Place> place);
  ~World() override;

  const Layout& layout() const noexcept { return layout_; }
  const Levels& levels() const noexcept { return levels_; }
  int rank() const noexcept override { return layout_.rank; }
  int size() const noexcept override { return layout_.size; }
  const std::string& host_name(int rank) const noexcept override { return infos_[static_cast<std::size_t>(rank)].host; }
  /// Returns "pid 12", for messages; empty if the rank is in this process.
  std::string pid_text(int rank) const override;
  bool crowded() const noexcept override { return local_world().crowded(); }
  local::LocalCommunicator& local() noexcept { return *local_; }
  local::World& local_world() const noexcept { return local_->core().world(); }
  transport::Transport& transport() noexcept { return *transport_; }
  HostsOperationLabel& label() noexcept { return *label_; }
  /// Status in which this rank reports its activity.
  status::GroupStatus& status() noexcept { return *status_; }
  status::LaneStatus& messages() const noexcept override { return status_->messages; }
  bool in_child() const noexcept { return local_->core().in_child(); }
  const FormOptions& options() const noexcept { return options_; }
  /// Options for listening to ranks of other hosts.
  transport::tcp::Listeners::Options listening() const;

  bool ended() const noexcept override { return local_world().ended(); }
  /// Ends the world, unless it has ended.
  void end(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text) override;
  [[noreturn]] void end_and_throw(ErrorCode code, int peer, std::uint64_t sequence, const std::string& text);
  /// Tells the other ranks that the world has ended, if it has and they were not told yet.
  void tell_if_ended() override;
  void throw_if_ended() {
    if (ended()) throw_ended();
  }
  [[noreturn]] void throw_ended();
  /// Throws, for an operation that has not begun, if the world has ended.
  void throw_if_ended_before(const std::string& what, std::uint64_t sequence);
  Error recorded(const std::string& doing, std::uint64_t sequence) const override {
    return local_world().recorded(doing, sequence);
  }
  /// Returns the reason why a rank can send nothing any more; nullopt if it may still send.
  std::optional<std::string> lost(int rank) const override {
    const bool here = layout_.host_of(rank) == layout_.host;
    return here ? local_world().lost(layout_.local_of(rank)) : transport_->lost(rank);
  }
  /// Ends the world because the peer is lost, for the reason `how`, and throws.
  [[noreturn]] void end_lost(int peer, const std::string& how);

  /// Tells all connected ranks that this one waits in operation `sequence`; 0: that it goes on.
  void tell_waiting(std::uint64_t sequence);
  /// True if the rank has reported that it waits in this operation, or in the previous one, whose end it may not know.
  bool waits(int rank, std::uint64_t sequence) const noexcept {
    const std::uint64_t told = waits_[static_cast<std::size_t>(rank)].load(std::memory_order_relaxed);
    return told != 0 && told + 1 >= sequence;
  }

  /// Handler for messages of send and recv.
  std::function<void(int peer, std::uint32_t tag, std::string_view bytes)> message_handler;

  void on_message(int peer, std::uint32_t tag, std::string_view bytes) override;
  void on_ended(int peer, std::string_view bytes) override;
  void on_broken(int peer, std::string_view why) override;

 private:
  void form_from_store();
  void form_from(Place& place);
  std::string tell_locals(std::string text);
  void make_local(std::unique_ptr<local::Rendezvous> point, std::vector<std::string> entries);
  void make_transport(transport::tcp::Listeners listeners, std::string_view token);

  FormOptions options_;
  const Layout layout_;
  const Levels levels_;
  const std::shared_ptr<HostsOperationLabel> label_;
  std::vector<transport::tcp::PeerInfo> infos_;
  std::unique_ptr<local::LocalCommunicator> local_;
  std::unique_ptr<transport::Transport> transport_;
  status::GroupStatus* status_ = nullptr;
  std::atomic<bool> told_{false};
  std::vector<std::atomic<std::uint64_t>>
      waits_;  // by rank, the operation in which it waits; 0: as far as is known, none
};

/// Runs `request` in the local world. All ranks of this host have to call it with the same request.
void run_local(World& world, const Request& request);

}  // namespace cohort::comm::hosts
