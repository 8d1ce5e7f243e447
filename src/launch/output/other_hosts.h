// Writes data from other hosts into the run's files here: the output of their processes, their ranks' timelines, the
// offsets of their clocks, and the payloads that ranks send to the job's owner. A file that cannot be written is
// reported once, and the job goes on. One thread.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"
#include "launch/messages.h"
#include "launch/processes.h"
#include "net/secret.h"
#include "telemetry/trace_writer.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::launch {

struct ClockOffset {
  std::int64_t there_ns = 0;        ///< time of the measurement, by the other clock
  std::int64_t offset_ns = 0;       ///< the other clock minus this one
  std::int64_t uncertainty_ns = 0;  ///< largest possible error
};

/// Measures how far another host's clock is ahead of this one's, by questions and answers. Each exchange shows that the
/// other clock was read between two moments of ours, so the shortest exchange is the most accurate; half of its
/// duration is the largest error. Asks the questions of a round one after the other. Pure: `now_ns` is this clock.
class ClockSync {
 public:
  static constexpr int kQuestions = 16;
  /// If no question is answered soon, as on a busy host, more questions follow until one is.
  static constexpr int kMostQuestions = 160;
  static constexpr std::int64_t kSoon = 50'000;  ///< half of an exchange

  struct Next {
    std::optional<std::uint64_t> ask = {};  ///< number under which the other's clock is to be asked
    std::optional<ClockOffset> found = {};
  };
  /// Begins a round, unless one is running.
  Next begin(std::int64_t now_ns);
  /// Takes the other's answer. An answer that was not asked for is ignored.
  Next answer(std::uint64_t number, std::int64_t there_ns, std::int64_t now_ns);
  /// Ends the round, when nothing more comes: its best measurement so far counts.
  Next end();

 private:
  Next ask(std::int64_t now_ns);

  std::uint64_t number_ = 0;
  int asked_ = 0;  ///< questions asked in this round; 0: no round is running
  std::int64_t asked_ns_ = 0;
  std::optional<ClockOffset> best_;
};

/// Returns "rank-3.err", "server-0.out", "evaluator.out".
std::string log_name(Role role, int number, Stream stream);

/// A file that may be closed and continued.
struct KeptFile {
  sys::UniqueFd fd;
  bool made = false;
  bool given_up = false;  ///< it could not be opened or written: what comes for it is dropped

  /// Makes the file `name` in `folder`, which is made as well, or opens it again. Does nothing if it is open or given
  /// up.
  Result<void> open(const std::string& folder, const std::string& name);
  /// Returns false if not all could be written: then the file is given up, and errno says why.
  bool write(std::string_view bytes);
};

/// Keeps the complete output of processes on other hosts, in files here as their agents would write them: the
/// supervisor keeps the output of an agent before it shows it.
class RemoteLogs {
 public:
  /// `folder` is made when the first line comes.
  RemoteLogs(std::string folder, const Roles& roles) : folder_(std::move(folder)), roles_(roles) {}
  void grow(const Roles& roles) { roles_ = roles; }
  /// Makes the files of these processes, also of those that print nothing.
  void open(const std::vector<int>& processes);
  /// Closes the files of a process that has ended; output that still comes is appended.
  void close(int process);
  void keep(const Output& output);
  /// Returns messages for the user about data that could not be written since the last call.
  std::vector<std::string> take_troubles() { return std::exchange(troubles_, {}); }

 private:
  KeptFile& file(int process, Stream stream);
  std::string name_of(int process, Stream stream) const;

  std::string folder_;
  Roles roles_;
  std::vector<std::string> troubles_;
  std::map<std::pair<int, Stream>, KeptFile> files_;
};

/// Keeps the timelines of ranks, as sent by agents, in the run's folder: trace/host-N.json, one per host, to which
/// data is appended as it comes, with the offsets of the host's clock. `extensions/observe/trace` makes one trace of
/// them.
class TracePieces {
 public:
  /// Limit of each host's file: viewers have limits, and so have disks.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{2} << 30;

  explicit TracePieces(const std::string& run_folder) : folder_(run_folder + "/trace") {}

  /// `base_ns`: TracePiece::base_ns.
  void keep(const status::HostTrace& host, std::int64_t base_ns, std::string_view events);
  void keep_offset(const status::HostTrace& host, const ClockOffset& offset);
  /// Closes the file of a host whose agent has gone; what another agent there sends is appended.
  void close(int host);
  /// Like RemoteLogs::take_troubles.
  std::vector<std::string> take_troubles() { return std::exchange(troubles_, {}); }

 private:
  struct File : KeptFile {
    std::uint64_t bytes = 0;
    std::optional<std::int64_t> base_ns = {};
    std::vector<ClockOffset> early = {};  ///< offsets that came before base_ns
  };
  File& file(const status::HostTrace& host);
  void write(File& file, const status::HostTrace& host, std::string_view bytes);
  std::string path_of(const status::HostTrace& host) const;

  const std::string folder_;
  std::vector<std::string> troubles_;
  std::map<int, File> files_;  ///< by the host's index
};

/// Transfers payloads between an owner (--owner) and ranks on other hosts without a shared file system: files of
/// the owner's folder that all ranks may read, and one file of each rank. They travel through the job's store, so ranks
/// need its secret. If the owner wants this, its folder has a folder `to-ranks`; the answers are put into
/// `from-ranks/RANK`. Blocks while it exchanges data with the store in this process.
struct PayloadTransferOptions {
  std::string folder;  ///< the owner's
  std::uint16_t store_port = 0;
  net::Secret secret;
};

/// Returns true if the owner has payloads for ranks that cannot read its folder.
bool has_payloads(const std::string& owner_folder);
/// To be called before ranks are started.
Result<void> bring_to_ranks(const PayloadTransferOptions& options);
/// To be called after the ranks have ended. A rank that has sent nothing gets no file. If one rank's payload fails, the
/// others' are still written; the error names the first such rank.
Result<void> bring_from_ranks(const PayloadTransferOptions& options, int world_size);

}  // namespace cohort::launch
