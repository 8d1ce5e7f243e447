#include "bindings.h"

#include "errors.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace cohort::python {
namespace {

// Never destroyed: at process exit all members have left, and a forked child may not touch them.
std::vector<std::weak_ptr<Member>>& members() {
  static auto* const all = new std::vector<std::weak_ptr<Member>>();
  return *all;
}

std::vector<std::shared_ptr<Member>>& lingering_members() {
  static auto* const all = new std::vector<std::shared_ptr<Member>>();
  return *all;
}

void forget_gone(std::vector<std::weak_ptr<Member>>& list) {
  list.erase(std::remove_if(list.begin(), list.end(), [](const auto& member) { return member.expired(); }), list.end());
}

}  // namespace

// --- Held ---

Held::Held(std::vector<Array> arrays, std::shared_ptr<const void> keep)
    : arrays_(std::move(arrays)),
      keep_(std::move(keep)),
      holds_(std::make_shared<std::atomic<bool>>(!arrays_.empty() || keep_)) {
  for (const Array& array : arrays_) {
    if (array.const_buffer().device.type != DeviceType::CPU) gpu_ = array.const_buffer().device.index;
  }
}

void Held::let_go() {
  *holds_ = false;
  // Destroying an array may run any Python code, which must not find the arrays here.
  const std::vector<Array> arrays = std::exchange(arrays_, {});
  const std::shared_ptr<const void> kept = std::exchange(keep_, nullptr);
}

void Held::let_go_at_end(const std::shared_ptr<Held>& self, const std::function<void(std::function<void()>)>& on_done) {
  if (std::exchange(self->told_of_end_, true)) return;
  try {
    auto& thread = CompletionThread<Over>::get();
    on_done([&thread, over = Over{self->holds_, self}] { thread.push(over); });
  } catch (const std::system_error&) {
  }
}

/// Runs on a thread of its own.
void tell(const std::deque<Held::Over>& over) {
  // A thread that waits for an operation releases the arrays itself; this gives it time to take the GIL.
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (std::none_of(over.begin(), over.end(), [](const auto& one) { return one.holds->load(); })) return;
  const py::gil_scoped_acquire gil;
  for (const auto& one : over) {
    if (const std::shared_ptr<Held> held = one.held.lock()) held->end();
  }
}

// --- Operation ---

// The error, if there is one, is thrown again by work_.wait().
bool Operation::is_over(std::optional<std::chrono::nanoseconds> limit) {
  try {
    if (limit) return work_.wait_for(*limit);
    work_.wait();  // may run the operation on this thread
    return true;
  } catch (const Error&) {
    return true;
  }
}

bool Operation::wait(std::optional<std::chrono::nanoseconds> limit) {
  if (home_ != fork_generation()) work_.wait();  // refuses
  if (!work_.done()) {
    const std::optional<Clock::time_point> until = end_of(limit);
    std::unique_lock turn(waiting_, std::try_to_lock);
    if (!turn && !wait_in_slices([&](std::chrono::nanoseconds slice) { return turn.try_lock_for(slice); }, until)) {
      return false;
    }
    if (!wait_until([&](auto slice) { return is_over(slice); }, until)) return false;
  }
  let_go();
  work_.wait();
  return true;
}

void Operation::synchronize(const Device& stream) {
  if (home_ != fork_generation()) work_.wait();  // refuses
  if (!work_.done()) {
    std::unique_lock turn(waiting_, std::try_to_lock);
    if (!turn) {
      wait_in_slices([&](std::chrono::nanoseconds slice) { return turn.try_lock_for(slice); }, std::nullopt);
    }
    std::optional<Error> failed;
    const auto is_given = [&](std::chrono::nanoseconds slice) {
      try {
        return work_.synchronize_for(stream, slice);
      } catch (const Error& error) {
        failed = error;
        return true;
      }
    };
    wait_until([&](auto slice) { return is_given(slice.value_or(std::chrono::hours(24 * 365))); }, std::nullopt);
    if (failed) throw *failed;
  }
  if (work_.done()) {
    wait(std::nullopt);
  } else if (work_.is_ordered() &&
             std::all_of(arrays().begin(), arrays().end(), [](const Array& one) { return one.goes_by_stream(); })) {
    // Bounds memory, because a rank far ahead of its GPU would otherwise hold the arrays of all operations in flight.
    let_go();
  } else {
    let_go_at_end();
  }
}

void Operation::let_go_at_end() {
  if (!holds()) return;
  Held::let_go_at_end(shared_from_this(), [this](std::function<void()> call) { work_.on_done(std::move(call)); });
}

void Operation::wait_for_end() {
  const py::gil_scoped_release release;
  const std::lock_guard turn(waiting_);
  static_cast<void>(is_over(std::nullopt));
}

// --- Member ---

Member::Member(Communicator communicator)
    : rank(communicator.rank()),
      size(communicator.size()),
      local_rank(communicator.local_rank()),
      local_size(communicator.local_size()),
      cross_rank(communicator.cross_rank()),
      cross_size(communicator.cross_size()),
      host(communicator.host()),
      hosts(communicator.hosts()),
      timeout(communicator.timeout()),
      communicator_(std::move(communicator)) {}

void Member::check_usable(const char* name) const {
  if (left_)
    refuse(name, "this Communicator has left its world -- call cohort.init() (or new_world) to form a new one");
  if (in_child()) {
    refuse(name,
           "this Communicator belongs to the process that formed it, and this is a forked child of it -- use it "
           "in the parent only; start processes that need a world of their own with 'spawn'");
  }
  if (given_) {
    refuse(name,
           "this Communicator was given to a NamedEngine, which alone may use it -- use the engine's operations, or "
           "give the engine a split() of this Communicator");
  }
}

bool Member::has_left() const noexcept {
  if (left_ || !given_) return left_;
  const auto tenant = tenant_.lock();
  return !tenant || tenant->has_left();
}

std::unique_lock<std::timed_mutex> Member::lock(const char* name) {
  check_usable(name);
  std::unique_lock held(starting_, std::try_to_lock);
  if (!held) {
    wait_in_slices([&](std::chrono::nanoseconds slice) { return held.try_lock_for(slice); }, std::nullopt);
    check_usable(name);  // another thread may have left meanwhile
  }
  return held;
}

std::shared_ptr<Operation> Member::start(const char* name, const std::function<Work(Communicator&)>& start,
                                         std::vector<Array> arrays, std::shared_ptr<const void> keep) {
  running_.tidy();
  Work work;
  {
    const std::unique_lock held = lock(name);
    const py::gil_scoped_release release;
    work = start(communicator_);
  }
  // The operation reports errors, even early ones.
  if (work.done() && !work.error() && !work.finite() && !work.source()) return nullptr;
  auto operation = std::make_shared<Operation>(std::move(work), std::move(arrays), std::move(keep));
  running_.keep(operation);
  if (operation->gpu()) operation->let_go_at_end();
  return operation;
}

Memory Member::allocate(std::size_t bytes) {
  const std::unique_lock held = lock("allocate");
  const py::gil_scoped_release release;
  return communicator_.allocate(bytes);
}

void Member::observe(std::shared_ptr<Observer> observer) {
  const std::unique_lock held = lock("observe");
  observers_.push_back(std::move(observer));
  communicator_.set_observer(observers_.back().get());
}

void Member::abort(const std::string& reason) {
  check_usable("abort");
  Communicator communicator = communicator_;
  const py::gil_scoped_release release;
  communicator.abort(reason);
}

std::shared_ptr<Member> Member::make(Communicator communicator) {
  auto member = std::make_shared<Member>(std::move(communicator));
  forget_gone(members());
  members().push_back(member);
  // Releases members whose last operations have finished.
  auto& kept = lingering_members();
  const auto first_idle =
      std::stable_partition(kept.begin(), kept.end(), [](const auto& one) { return one->running_.any(); });
  const std::vector<std::shared_ptr<Member>> idle(first_idle, kept.end());
  kept.erase(first_idle, kept.end());
  for (const auto& one : idle) let_go(one);
  return member;
}

std::shared_ptr<Member> Member::add_group(Communicator communicator) {
  auto member = make(std::move(communicator));
  forget_gone(groups_);
  groups_.push_back(member);
  return member;
}

Communicator Member::give_over(const char* name, std::weak_ptr<Tenant> tenant) {
  const std::unique_lock held = lock(name);
  running_.finish(std::nullopt);
  check_usable(name);
  given_ = true;
  tenant_ = std::move(tenant);
  return std::exchange(communicator_, {});
}

void Member::finish_aborted(const std::string& reason) {
  Communicator communicator = communicator_;
  {
    const py::gil_scoped_release release;
    if (communicator) communicator.abort(reason);
  }
  while (const auto operation = running_.next()) operation->wait_for_end();
}

void Member::leave(const LeaveOptions& options) {
  if (left_) return;
  if (in_child()) {
    left_ = true;  // keeps the core's state, which detects forked children itself
    return;
  }
  for (const auto& group : std::exchange(groups_, {})) {
    if (const auto member = group.lock()) member->leave(options);
  }
  if (given_) {
    left_ = true;
    if (const auto tenant = tenant_.lock()) tenant->leave(options);
    return;
  }
  std::optional<Clock::time_point> until;
  if (options.grace) until = Clock::now() + *options.grace;
  std::optional<py::error_already_set> interrupt;
  std::unique_lock held(starting_, std::try_to_lock);
  bool finished = false;
  try {
    // Another thread may be starting an operation, or be waiting in `split`.
    finished = !options.failed &&
               (held.owns_lock() ||
                wait_in_slices([&](std::chrono::nanoseconds slice) { return held.try_lock_for(slice); }, until)) &&
               running_.finish(until);
  } catch (py::error_already_set& raised) {
    interrupt.emplace(raised);
  }
  if (!finished) finish_aborted(options.reason);
  if (!held) {
    const py::gil_scoped_release release;
    held.lock();
  }
  left_ = true;
  {
    Communicator last = std::exchange(communicator_, {});
    const py::gil_scoped_release release;
    last = {};  // ends the progress threads
  }
  held.unlock();
  if (interrupt) throw std::move(*interrupt);
}

void Member::leave_all(const LeaveOptions& options) {
  for (const auto& one : std::vector<std::weak_ptr<Member>>(members())) {
    if (const auto member = one.lock()) member->leave(options);
  }
  lingering_members().clear();
}

void Member::let_go(std::shared_ptr<Member> member) {
  if (member->left_ || member->in_child() || !member->running_.any()) {
    Communicator last = std::exchange(member->communicator_, {});
    if (!last) return;
    const py::gil_scoped_release release;
    last = {};
    return;
  }
  lingering_members().push_back(std::move(member));
}

}  // namespace cohort::python
