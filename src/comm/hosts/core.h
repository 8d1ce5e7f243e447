// The operations of a world on several hosts: a queue, whose thread also drives the transport while nobody waits, and
// sends and receives. Lock order: the queue's mutex, then the transport's.
#pragma once

#include "comm/control/queue.h"
#include "comm/hosts/engine.h"
#include "comm/hosts/transport_channels.h"
#include "comm/hosts/world.h"
#include "comm/local/shm_channels.h"
#include "comm/messages/matcher.h"

#include <memory>
#include <optional>
#include <vector>

namespace cohort::comm::hosts {

class Core final : public Queue {
 public:
  Core(const FormOptions& options, std::unique_ptr<Place> place);
  /// To be called once it is owned by a shared_ptr.
  void begin();

  Work submit(const Request& request) override;
  void abort(std::string_view reason) override;
  void stop() override;
  bool in_child() const noexcept override { return world_.in_child(); }

  World& world() noexcept { return world_; }

 private:
  std::vector<messages::Channels*> kinds();
  bool run_one(const Request& request, Clock::time_point called, bool& announced, Clock::time_point limit,
               CollectiveEvent* event) override;
  int run_join(std::chrono::milliseconds patience) override { return engine_.join(patience); }
  std::byte* fusing() override;
  bool wants_rousing() override { return asleep_; }
  void rouse() noexcept override { world_.transport().wake(); }
  void leave_to_thread() noexcept override;
  int ranks() const noexcept override { return world_.layout().size; }
  void attend() override { engine_.attend(); }
  bool ended() noexcept override;
  Error recorded(const std::string& doing) const override { return world_.recorded(doing, 0); }
  void tell_over(std::uint64_t number) noexcept override;
  bool are_over(std::uint64_t number) const noexcept override;
  void serve();

  World world_;
  std::optional<local::ShmChannels> lanes_;  // to the ranks of this host
  TransportChannels wire_;
  messages::Matcher matcher_;
  Engine engine_;
  bool asleep_ = false;  // the thread sleeps in the transport
  std::vector<std::byte> fusing_;
};

}  // namespace cohort::comm::hosts
