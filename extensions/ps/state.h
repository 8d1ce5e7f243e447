// Workers: what one server knows of its workers: their presence, the changes made for each, the clocks each has ended.
// Pure bookkeeping; one thread at a time.
// Image, ImageReader: the pieces of a state's view, and a new state made of them.
// State: tables, workers, and pushes whose clock has not ended. Only commands change a state, and it is a function of
// them, their order and their times. So a journal of commands restores a server; reads are not in it. No I/O. One
// thread at a time, except for views of it.
#pragma once

#include "base/result.h"
#include "ps/protocol.h"
#include "ps/tables.h"

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::ps {

/// The worker that made a change, and the change's order.
struct Author {
  std::uint32_t worker = 0;
  std::uint64_t incarnation = 0;
  Order order;
};

struct Worker {
  enum class Phase : std::uint8_t {
    Expected,  ///< has not come yet; holds the others at clock 0
    Joined,    ///< has been let in, but has not said at which clock it begins: holds nobody
    Live,
    Gone,  ///< has left, or is lost: holds nobody
  };
  Phase phase = Phase::Expected;
  bool fenced = false;  ///< nothing more is accepted from this incarnation
  std::uint64_t incarnation = 0;
  std::uint64_t nonce = 0;
  std::uint64_t mark = 0;
  std::int64_t committed = 0;  ///< clocks that this worker has ended
  std::uint64_t barrier = 0;
  std::uint64_t banned = 0;                            ///< incarnations up to this number are not let in any more
  std::map<std::uint64_t, std::int64_t> earlier = {};  ///< clocks that earlier incarnations had ended, by incarnation
  std::map<std::uint64_t, Error> refused = {};         ///< by number of the change, until the answer is acknowledged
  std::string host = {};
};

class Workers {
 public:
  /// Number of workers, as the first worker states it.
  std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(all_.size()); }
  void expect(std::uint32_t workers) { all_.resize(workers); }
  Worker& at(std::uint32_t worker) { return all_[worker]; }
  const Worker& at(std::uint32_t worker) const { return all_[worker]; }

  /// The least number of ended clocks among workers that hold others; nullopt if no worker does.
  std::optional<std::int64_t> least() const noexcept;
  /// The largest number of ended clocks; a returning worker begins there.
  std::int64_t most() const noexcept;
  std::uint64_t latest_barrier() const noexcept;
  /// Returns whether all workers that others wait for have reached this barrier.
  bool past_barrier(std::uint64_t number) const noexcept;
  /// Names the workers that have not ended this many clocks: "worker 3 on host b, which is at clock 4".
  std::string behind(std::int64_t clocks) const;
  std::string not_at_barrier(std::uint64_t number) const;

  enum class Verdict { New, Made };
  /// Returns Made if the change has been made before. Fails with Aborted (the worker is taken for lost, or a later
  /// incarnation has come) or Corrupt (earlier changes never came: this server has an older state than the worker has
  /// seen).
  Result<Verdict> judge(const Author& author) const;

 private:
  std::vector<Worker> all_;
};

/// A view of a state at one moment, readable on any thread.
struct FrozenState {
  std::optional<Hello> introduced;
  Workers workers;
  std::int64_t settled;
  FrozenTables tables;
};

/// The pieces of a state's image: bodies of Method::Piece, of about a megabyte at most. A new state that replays them
/// all equals the original.
class Image {
 public:
  explicit Image(std::shared_ptr<const FrozenState> of);
  /// Returns the next piece; nullopt after the last one.
  std::optional<std::string> next();

 private:
  void begin_table();
  std::shared_ptr<const FrozenState> of_;
  std::deque<std::string> ready_;
  std::size_t table_ = 0;
  std::uint32_t place_ = 0;
  std::size_t staged_ = 0;
  bool ended_ = false;
};

/// Takes the pieces of an image, in order.
class ImageReader {
 public:
  /// The parts of the state that gets the image.
  struct Parts {
    std::optional<Hello>& introduced;
    Workers& workers;
    std::int64_t& settled;
    Tables& tables;
  };
  /// True if an image has begun and has not ended.
  bool loading() const noexcept { return loading_; }
  /// Fails with Corrupt if no Image has made the piece, or the parts had something before the first one.
  Result<void> load(std::string_view piece, const Parts& parts);

 private:
  void take(std::string_view piece, const Parts& parts);
  bool loading_ = false;
};

struct Command {
  std::uint32_t now = 0;  ///< seconds since 1970
  Method method = Method::Push;
  std::uint32_t worker = 0;
  std::uint64_t incarnation = 0;
  std::string_view body = {};
};

class State {
 public:
  const Workers& workers() const noexcept { return workers_; }
  const Tables& tables() const noexcept { return tables_; }
  /// Greeting of the worker that joined last; it also lists the servers.
  const std::optional<Hello>& introduced() const noexcept { return introduced_; }
  /// Number of clocks whose pushes have been made in tables of Mode::Sync.
  std::int64_t settled() const noexcept { return settled_; }

  /// Checks whether a worker may join with this greeting. Fails with InvalidArgument, Mismatch or Aborted.
  Result<void> may_join(const Hello& hello) const;
  /// Checks that a change's body is complete, its table known, and memory sufficient; otherwise says why it is refused.
  /// `limit`: bytes that tables and waiting pushes may take.
  Result<void> check(const Command& command, std::size_t limit);
  /// Runs a change that came in its turn, and records its number. Never fails for a command that `check` accepted.
  void run(const Command& command);

  /// Checks and runs a command from a journal, or one sent to a copy. Fails with Corrupt if no server could have
  /// written it, or if rows differ from the digest in a command of Method::Verify.
  Result<void> replay(const Command& command);

  /// Returns a view of the present state. Takes no longer than a push.
  std::shared_ptr<const FrozenState> freeze();
  /// Approximate upper bound of the cost of running the command.
  SparseTable::Effort effort(const Command& command) const;
  /// True if an image has begun and has not ended.
  bool loading() const noexcept { return image_.loading(); }

  /// Returns whether a worker at this clock may read the table.
  bool may_read(std::uint32_t table, std::int64_t clock) const noexcept;
  /// Returns whether a read, barrier, end of a clock or snapshot need not wait for other workers.
  bool is_due(Method method, std::string_view body) const;
  /// Names such a call, and the workers that it waits for.
  std::string awaited(Method method, std::string_view body) const;
  /// The table's clock: all pushes of earlier clocks are in the table.
  std::int64_t clock_of(std::uint32_t table) const noexcept;

  /// Returns whether the worker has staged pushes of this clock or later ones.
  bool has_staged(std::uint32_t worker, std::int64_t clock) const noexcept;
  /// Number of clocks that the incarnation had ended, after a command of Method::Settle.
  std::int64_t ended(const Settle& asked) const;

 private:
  void push(const Command& command, const Change& change, std::string_view payload);
  void commit(std::uint32_t worker, std::int64_t clocks, std::uint32_t now);
  void fence(const Settle& asked);
  /// Drops the pushes of clocks that the worker has not ended, when it is lost, has left, or comes again.
  void drop_staged(std::uint32_t worker);
  /// Makes a worker's staged pushes of clocks that it has ended, in tables that wait for no other worker.
  void make_committed(std::uint32_t worker, std::uint32_t now);
  void settle(std::uint32_t now);

  Workers workers_;
  std::optional<Hello> introduced_;
  ImageReader image_;
  Tables tables_;
  std::int64_t settled_ = 0;
};

}  // namespace cohort::ps
