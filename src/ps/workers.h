// The workers of a parameter server as one server knows them: who is there, which of a worker's changes have been made,
// how many clocks it has ended. Pure bookkeeping; one thread at a time.
#pragma once

#include "base/result.h"
#include "ps/protocol.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::ps {

/// Of whom and what a change is.
struct Author {
  std::uint32_t worker = 0;
  std::uint64_t incarnation = 0;
  Order order;
};

struct Worker {
  enum class Phase : std::uint8_t {
    Expected,  ///< has not come yet; holds the others at clock 0
    Joined,    ///< has been let in, and not said yet at which clock it begins: holds nobody
    Live,
    Gone,  ///< has left, or is lost: holds nobody
  };
  Phase phase = Phase::Expected;
  bool fenced = false;  ///< nothing is taken from this incarnation any more
  std::uint64_t incarnation = 0;
  std::uint64_t nonce = 0;
  std::uint64_t mark = 0;
  std::int64_t committed = 0;  ///< clocks that have ended
  bool late = false;           ///< with backup workers: the last of them had ended without it
  std::uint64_t barrier = 0;
  std::uint64_t banned = 0;                            ///< incarnations up to this one are not let in any more
  std::map<std::uint64_t, std::int64_t> earlier = {};  ///< clocks that earlier incarnations had ended, by incarnation
  std::map<std::uint64_t, Error> refused = {};         ///< by number, until their answers have been acknowledged
  std::string host = {};
};

class Workers {
 public:
  /// How many there are is what the first says.
  std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(all_.size()); }
  void expect(std::uint32_t workers) { all_.resize(workers); }
  Worker& at(std::uint32_t worker) { return all_[worker]; }
  const Worker& at(std::uint32_t worker) const { return all_[worker]; }

  /// Whether others wait for it.
  bool holds_others(std::uint32_t worker) const noexcept;
  /// The least number of ended clocks of those that hold others; nullopt: nobody does.
  std::optional<std::int64_t> least() const noexcept;
  std::int64_t most() const noexcept;
  std::uint64_t latest_barrier() const noexcept;
  /// Whether all that hold others have come to this barrier.
  bool past_barrier(std::uint64_t number) const noexcept;
  /// "worker 3 on host b, which is at clock 4", of those that have not ended so many clocks.
  std::string behind(std::int64_t clocks) const;
  std::string not_at_barrier(std::uint64_t number) const;

  enum class Verdict { New, Made };
  /// Made: it has been made before. Errors: Aborted (the worker is taken for lost, or a later incarnation has come),
  /// Corrupt (changes before it never came: this server has an older state than the worker has seen).
  Result<Verdict> judge(const Author& author) const;

 private:
  std::vector<Worker> all_;
};

}  // namespace cohort::ps
