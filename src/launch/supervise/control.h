// Orders to a running job from its own user (`cohort ctl`): one line over a Unix socket in the run's folder, answered
// by one line. Only the job's user and root are accepted. The lines come from outside and are checked, so none can harm
// the job. One thread.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"
#include "launch/loop.h"
#include "launch/output/run_folder.h"

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::launch {

struct ControlOrder {
  enum class Kind : std::uint8_t { Add, Drain, Remove };
  Kind kind = Kind::Add;
  std::string host;  ///< host to act on; for Add also "HOST:SLOTS"
};

/// Parses "add HOST[:SLOTS]", "drain HOST" and "remove HOST".
Result<ControlOrder> parse_order(std::string_view line);

class ControlSocket {
 public:
  /// Throws cohort::Error (Io) if the folder takes no socket. `folder` outlives this.
  ControlSocket(Loop& loop, const RunFolder& folder);
  ~ControlSocket();
  ControlSocket(const ControlSocket&) = delete;
  ControlSocket& operator=(const ControlSocket&) = delete;

  /// Returns the next order; to be called after each step of the loop. Answer each order before the next call.
  std::optional<ControlOrder> next();
  /// Answers the last order with what has been done, or why it has not.
  void answer(const Result<std::string>& done);

 private:
  struct Client {
    sys::UniqueFd connection;
    Watch watch;
    Timer limit;
    std::string line;
    std::optional<ControlOrder> order = {};  ///< the order that the client waits for
  };
  void accept();
  void read(std::list<Client>::iterator client);

  Loop& loop_;
  const RunFolder& folder_;
  sys::UniqueFd listener_;
  Watch watch_;
  std::list<Client> clients_;
};

/// Sends an order to the job of this run folder. Fails with Unavailable if the job cannot be reached or refuses; the
/// message says why.
Result<std::string> ask_job(const std::string& run_folder, const std::string& order);

}  // namespace cohort::launch
