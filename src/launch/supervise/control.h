// Orders to a job that runs, from its own user (`cohort ctl`): a line over a Unix socket in the run's folder, and a
// line back. Only the job's user and root are heard. What comes is bytes from outside, and a job takes no harm from
// them. One thread.
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
  std::string host;  ///< to be added: perhaps with ":SLOTS"
};

/// "add HOST[:SLOTS]", "drain HOST", "remove HOST".
Result<ControlOrder> parse_order(std::string_view line);

class ControlSocket {
 public:
  /// Throws cohort::Error (Io) where the folder takes no socket. `folder` outlives this.
  ControlSocket(Loop& loop, const RunFolder& folder);
  ~ControlSocket();
  ControlSocket(const ControlSocket&) = delete;
  ControlSocket& operator=(const ControlSocket&) = delete;

  /// To be asked after each step of the loop. Each order is to be answered before the next is asked for.
  std::optional<ControlOrder> next();
  /// Answers with what has been done, or why not.
  void answer(const Result<std::string>& done);

 private:
  struct Client {
    sys::UniqueFd connection;
    Watch watch;
    Timer limit;
    std::string line;
    std::optional<ControlOrder> order = {};  ///< that it waits for
  };
  void accept();
  void read(std::list<Client>::iterator client);

  Loop& loop_;
  const RunFolder& folder_;
  sys::UniqueFd listener_;
  Watch watch_;
  std::list<Client> clients_;
};

/// Asks the job whose run has this folder. Unavailable: it cannot be asked, or says no; the message says why.
Result<std::string> ask_job(const std::string& run_folder, const std::string& order);

}  // namespace cohort::launch
