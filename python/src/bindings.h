// The module's classes and their common part: membership in a world.
#pragma once

#include "arrays.h"
#include "waiting.h"

#include <cohort/communicator.h>
#include <cohort/error.h>
#include <cohort/observer.h>

#include <pybind11/pybind11.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::python {

/// An operation's arrays, kept alive until it is over, even if Python drops its references. Needs the GIL.
class Held {
 public:
  virtual ~Held() = default;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  /// Returns the GPU of the arrays.
  std::optional<int> gpu() const noexcept { return gpu_; }
  /// Releases the arrays soon after the operation has ended, even if Python neither waits for it nor starts another,
  /// because GPU memory is too scarce to keep for forgotten operations. `on_done` is that of the operation. Call once;
  /// if no thread can be started, the next operation releases them.
  static void let_go_at_end(const std::shared_ptr<Held>& self,
                            const std::function<void(std::function<void()>)>& on_done);
  /// Ends the thread that releases arrays. Call without the GIL. The thread is started again when needed.
  static void stop() { CompletionThread<Over>::stop(); }

 protected:
  Held(std::vector<Array> arrays, std::shared_ptr<const void> keep);
  const std::vector<Array>& arrays() const noexcept { return arrays_; }
  bool holds() const noexcept { return *holds_; }
  void let_go();
  /// Called when the operation has ended and nobody has waited for it.
  virtual void end() { let_go(); }

 private:
  struct Over {
    std::shared_ptr<const std::atomic<bool>> holds;  // can be read without the GIL
    std::weak_ptr<Held> held;
  };
  friend void tell(const std::deque<Over>& over);

  std::vector<Array> arrays_;
  std::shared_ptr<const void> keep_;
  const std::shared_ptr<std::atomic<bool>> holds_;  // has any value; only its lifetime matters
  std::optional<int> gpu_;
  bool told_of_end_ = false;
};

/// An operation under way and its arrays.
class Operation : public Held, public std::enable_shared_from_this<Operation> {
 public:
  Operation(Work work, std::vector<Array> arrays, std::shared_ptr<const void> keep)
      : Held(std::move(arrays), std::move(keep)), work_(std::move(work)) {}

  /// Returns true when the operation has finished, and throws its error; false after `limit`. An interrupt ends the
  /// waiting, not the operation.
  bool wait(std::optional<std::chrono::nanoseconds> limit);
  /// Like Work::synchronize; torch's tensors may be released in the order of their own stream. An interrupt ends the
  /// waiting for the other ranks, not the operation.
  void synchronize(const Device& stream);
  /// Waits until the operation has finished, with or without an error, ignoring signals.
  void wait_for_end();
  bool done() const noexcept { return work_.done(); }
  std::optional<Error> error() const { return work_.error(); }
  std::optional<bool> finite() const { return work_.finite(); }
  std::optional<int> source() const { return work_.source(); }
  /// See Held.
  void let_go_at_end();

 private:
  bool is_over(std::optional<std::chrono::nanoseconds> limit);

  const std::uint64_t home_ = fork_generation();
  Work work_;
  std::timed_mutex waiting_;  // one thread at a time may wait for a Work
};

/// Options for leaving a world.
struct LeaveOptions {
  /// Grace period of unfinished operations before they are aborted; default: until their own deadlines.
  std::optional<std::chrono::milliseconds> grace = {};
  /// The reason reported to the other ranks if some operations had to be aborted.
  std::string reason = {};
  /// This rank has failed, so it waits for nothing, and informs the others in any case.
  bool failed = false;
};

/// An object that has taken over a Member's communicator; it ends with the Member.
class Tenant {
 public:
  virtual ~Tenant() = default;
  virtual void leave(const LeaveOptions& options) = 0;
  virtual bool has_left() const noexcept = 0;
};

/// This process's membership in a world, shared by a Python Communicator, its Works and its groups. One thread at a
/// time starts operations. Every unfinished operation is kept alive, with its arrays, even if Python drops its
/// references. Needs the GIL; waits without it.
class Member {
 public:
  /// Makes a Member that `leave_all` knows.
  static std::shared_ptr<Member> make(Communicator communicator);
  explicit Member(Communicator communicator);
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  // Unchanged after `leave`, and in forked children.
  const int rank, size, local_rank, local_size, cross_rank, cross_size;
  const std::string host;
  const std::vector<int> hosts;
  const std::chrono::milliseconds timeout;

  /// Starts an operation. The arrays, and the objects that `keep` owns, live as long as the operation. Returns null if
  /// it has finished already and has nothing to report.
  std::shared_ptr<Operation> start(const char* name, const std::function<Work(Communicator&)>& start,
                                   std::vector<Array> arrays, std::shared_ptr<const void> keep = nullptr);
  /// Runs a call that has no Work, and blocks. An interrupt aborts the world, since nothing else would end the call.
  template <class T>
  T call(const char* name, const std::function<T(Communicator&)>& body);

  Memory allocate(std::size_t bytes);
  /// Gives the observer events from now on. It lives as long as this Member, since progress threads may be calling it.
  void observe(std::shared_ptr<Observer> observer);
  void abort(const std::string& reason);

  /// Returns the communicator when unfinished operations have ended; from then on only the tenant uses it.
  Communicator give_over(const char* name, std::weak_ptr<Tenant> tenant);

  /// Waits for unfinished operations, then leaves the world and its groups' worlds. In a forked child nothing is
  /// touched.
  void leave(const LeaveOptions& options);
  bool has_left() const noexcept;
  bool in_child() const noexcept { return home_ != fork_generation(); }

  /// Called when nobody refers to the Member any more; unfinished operations go on.
  static void let_go(std::shared_ptr<Member> member);
  /// Leaves with every Member of this process that still exists.
  static void leave_all(const LeaveOptions& options);

  /// Adds a group that leaves with this world.
  std::shared_ptr<Member> add_group(Communicator communicator);

 private:
  std::unique_lock<std::timed_mutex> lock(const char* name);
  void check_usable(const char* name) const;
  void finish_aborted(const std::string& reason);

  const std::uint64_t home_ = fork_generation();
  std::vector<std::shared_ptr<Observer>> observers_;  // outlive the communicator
  Communicator communicator_;
  std::timed_mutex starting_;  // the core allows one thread at a time
  Unfinished<Operation> running_{16};
  std::vector<std::weak_ptr<Member>> groups_;
  bool left_ = false;
  bool given_ = false;
  std::weak_ptr<Tenant> tenant_;
};

template <class T>
T Member::call(const char* name, const std::function<T(Communicator&)>& body) {
  const std::unique_lock held = lock(name);
  Communicator communicator = communicator_;
  const std::string reason = "rank " + std::to_string(rank) + " was interrupted in " + name;
  return run_interruptibly<T>([&] { return body(communicator); }, [&] { communicator.abort(reason); });
}

/// cohort.Communicator. Releases its membership, without waiting, when Python has dropped it.
class PyCommunicator {
 public:
  explicit PyCommunicator(std::shared_ptr<Member> member) noexcept : member_(std::move(member)) {}
  ~PyCommunicator() {
    if (member_) Member::let_go(std::move(member_));
  }
  PyCommunicator(PyCommunicator&&) = default;
  PyCommunicator& operator=(PyCommunicator&&) = delete;

  Member& member() const noexcept { return *member_; }
  const std::shared_ptr<Member>& shared() const noexcept { return member_; }

 private:
  std::shared_ptr<Member> member_;
};

/// cohort.Work. A null operation has finished without an error.
struct PyWork {
  std::shared_ptr<Operation> operation;
};

void bind_types(pybind11::module_& module);
/// Binds memory, and questions about arrays.
void bind_memory(pybind11::module_& module);
void bind_work(pybind11::module_& module);
void bind_communicator(pybind11::module_& module);
/// Binds files of tensors.
void bind_formats(pybind11::module_& module);
/// Binds folders of checkpoints.
void bind_checkpoints(pybind11::module_& module);
/// Binds records of runs.
void bind_track(pybind11::module_& module);
/// Binds the reduction of gradients.
void bind_gradients(pybind11::module_& module);
void bind_slots(pybind11::module_& module);
void bind_process(pybind11::module_& module);
/// Binds the parts of an elastic training.
void bind_elastic(pybind11::module_& module);
/// Functions of extensions that end what they have when the process leaves all worlds; called with the GIL.
inline std::vector<void (*)()>& called_at_leave() {
  static std::vector<void (*)()> all;
  return all;
}
/// Binds the methods that move data.
void bind_collectives(pybind11::class_<PyCommunicator>& communicator);

}  // namespace cohort::python
