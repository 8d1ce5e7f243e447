// Puts data from other hosts into the run's files here: the output of their processes, their ranks' timelines, the
// offsets of their clocks, and what ranks send the job's owner. A file that cannot be written is reported once and the
// job goes on. One thread.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"
#include "launch/messages.h"
#include "launch/processes.h"
#include "net/secret.h"
#include "telemetry/trace_encoder.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::launch {

struct ClockOffset {
  std::int64_t there_ns = 0;        ///< when, by the other clock
  std::int64_t offset_ns = 0;       ///< the other clock minus this one
  std::int64_t uncertainty_ns = 0;  ///< it cannot be wrong by more
};

/// How far another host's clock is ahead of this one's, by messages there and back: each tells that the other's moment
/// lies between two of ours, so the shortest of several says most, and its half is what the answer may be wrong by.
/// Asks a round of times one after the other. Pure: `now_ns` is this clock.
class ClockSync {
 public:
  static constexpr int kQuestions = 16;
  /// If none of these was answered soon, as on a busy host, asks on until one is.
  static constexpr int kMostQuestions = 160;
  static constexpr std::int64_t kSoon = 50'000;  ///< half of there and back

  struct Next {
    std::optional<std::uint64_t> ask = {};  ///< the other's clock is asked for, under this number
    std::optional<ClockOffset> found = {};
  };
  /// Begins a round, if none is under way.
  Next begin(std::int64_t now_ns);
  /// The other's answer. What was not asked is ignored.
  Next answer(std::uint64_t number, std::int64_t there_ns, std::int64_t now_ns);
  /// Nothing more comes: what is known of the round counts.
  Next end();

 private:
  Next ask(std::int64_t now_ns);

  std::uint64_t number_ = 0;
  int asked_ = 0;  ///< in this round; 0: none is under way
  std::int64_t asked_ns_ = 0;
  std::optional<ClockOffset> best_;
};

/// "rank-3.err", "server-0.out", "evaluator.out".
std::string log_name(Role role, int number, Stream stream);

/// The complete output of processes on other hosts, in files here as their agents would write them: what the supervisor
/// gets from an agent is kept before it is shown.
class RemoteLogs {
 public:
  /// `folder` is made when the first line comes.
  RemoteLogs(std::string folder, const Roles& roles) : folder_(std::move(folder)), roles_(roles) {}
  void grow(const Roles& roles) { roles_ = roles; }
  /// Files of those that print nothing are there, too.
  void open(const std::vector<int>& processes);
  void keep(const Output& output);
  /// Names, for the user, what could not be written since the last call.
  std::vector<std::string> take_troubles() { return std::exchange(troubles_, {}); }

 private:
  sys::UniqueFd& file(int process, Stream stream);
  std::string name_of(int process, Stream stream) const;

  std::string folder_;
  Roles roles_;
  std::vector<std::string> troubles_;
  std::map<std::pair<int, Stream>, sys::UniqueFd> files_;  ///< invalid: given up
};

/// Timelines of ranks as sent by agents, in the run's folder: trace/host-N.pftrace, one per host, appended to as data
/// comes, together with what is known of the host's clock. `programs/trace` makes one trace of them.
class TracePieces {
 public:
  /// No host's file gets longer: viewers have their limits, and so have disks.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{2} << 30;

  explicit TracePieces(const std::string& run_folder) : folder_(run_folder + "/trace") {}

  /// `base_ns`: as TracePiece has it.
  void keep(const status::HostTrace& host, std::int64_t base_ns, std::string_view packets);
  void keep_offset(const status::HostTrace& host, const ClockOffset& offset);
  /// As RemoteLogs'.
  std::vector<std::string> take_troubles() { return std::exchange(troubles_, {}); }

 private:
  struct File {
    sys::UniqueFd fd;
    std::uint64_t bytes = 0;
    std::optional<std::int64_t> base_ns = {};
    std::vector<ClockOffset> early = {};  ///< that came before it
  };
  File& file(const status::HostTrace& host);
  void write(File& file, const status::HostTrace& host, std::string_view bytes);
  std::string path_of(const status::HostTrace& host) const;

  const std::string folder_;
  std::vector<std::string> troubles_;
  std::map<int, File> files_;  ///< by the host's index
};

/// Payloads between an owner (--owner-folder) and ranks on other hosts, where no file system is shared: files of the
/// owner's folder that all ranks may read, and one of each rank. They travel through the job's store, so ranks need its
/// secret. The owner's folder has a folder `to-ranks` if the owner wants this; `from-ranks/RANK` are the answers.
/// Blocks for as long as the store in this process takes.
struct PayloadTransferOptions {
  std::string folder;  ///< the owner's
  std::uint16_t store_port = 0;
  net::Secret secret;
};

/// Whether the owner has something for ranks that cannot read its folder.
bool has_payloads(const std::string& owner_folder);
/// Before ranks are started.
Result<void> bring_to_ranks(const PayloadTransferOptions& options);
/// After they have ended. Ranks that have sent nothing have no file. What of one rank cannot be brought leaves the
/// others' alone; the error names the first such rank.
Result<void> bring_from_ranks(const PayloadTransferOptions& options, int world_size);

}  // namespace cohort::launch
