// Who takes part in a world, as far as sends and receives have to know, and how it ends. Any thread.
#pragma once

#include "status/status_page.h"

#include <cohort/error.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::comm::messages {

class Members {
 public:
  virtual ~Members() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual const std::string& host_name(int rank) const noexcept = 0;
  /// "pid 12"; empty if the rank is in this process or its pid means nothing here.
  virtual std::string pid_text(int rank) const = 0;
  /// More ranks than cores.
  virtual bool crowded() const noexcept = 0;
  /// Where this rank says for which message it waits.
  virtual status::LaneStatus& messages() const noexcept = 0;

  virtual bool ended() const noexcept = 0;
  /// Writes down why the world ends, unless it has ended.
  virtual void end(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text) = 0;
  /// Tells whoever has to be told if the world has ended. Then nobody touches the memory of messages any more.
  virtual void tell_if_ended() = 0;
  /// The first cause, as this rank reports it while it was `doing` operation `sequence`.
  virtual Error recorded(const std::string& doing, std::uint64_t sequence) const = 0;
  /// Why nothing will come from a peer any more; nullopt if something may.
  virtual std::optional<std::string> lost(int rank) const = 0;
};

}  // namespace cohort::comm::messages
