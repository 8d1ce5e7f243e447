#include "launch/output/display.h"

#include "base/result.h"
#include "base/terminal.h"
#include "launch/output/text.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace cohort::launch {
namespace {

bool is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

}  // namespace

Console::Console() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) raise(ErrorCode::Unavailable, "eventfd: {}", errno_text(errno));
}

Console::~Console() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    queue_.clear();
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(20), [this] { return ended_; })) interrupt();
  }
  thread_.join();
}

void Console::interrupt() {
  // A terminal with space for one byte counts as ready and then blocks a longer write. A signal interrupts the thread's
  // write; its handler does nothing.
  static const bool handled = [] {
    struct sigaction nothing {};
    nothing.sa_handler = [](int) {};
    return ::sigaction(SIGRTMIN, &nothing, nullptr) == 0;
  }();
  if (handled && thread_.joinable()) ::pthread_kill(thread_.native_handle(), SIGRTMIN);
}

void Console::drop() {
  const std::lock_guard lock(mutex_);
  for (const Item& item : queue_) written_.fetch_add(item.weight, std::memory_order_release);
  queue_.clear();
  ++generation_;
  if (writing_) interrupt();
}

bool Console::dropped(std::uint64_t generation) const {
  const std::lock_guard lock(mutex_);
  return closing_ || generation != generation_;
}

void Console::write(int fd, std::string bytes, std::uint64_t weight) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({fd, std::move(bytes), weight});
    // Started late: short jobs that print nothing never need the thread.
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_one();
}

void Console::acknowledge() const {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(event_.get(), &count, sizeof count);
}

bool Console::idle() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !writing_;
}

void Console::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (closing_) break;
    const Item item = std::move(queue_.front());
    queue_.pop_front();
    writing_ = true;
    const std::uint64_t generation = generation_;
    lock.unlock();
    put(item, generation);
    written_.fetch_add(item.weight, std::memory_order_release);
    lock.lock();
    writing_ = false;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto put_one = ::write(event_.get(), &one, sizeof one);
  }
  ended_ = true;
  changed_.notify_all();
}

void Console::put(const Item& item, std::uint64_t generation) {
  const std::size_t which = item.fd == 2;
  std::atomic<bool>& gone = gone_[which];
  std::string after_gap;
  std::string_view rest(item.bytes);
  if (gap_[which] && !rest.empty()) {
    after_gap = "\n" + item.bytes;
    rest = after_gap;
  }
  while (!rest.empty() && !gone.load(std::memory_order_relaxed) && !dropped(generation)) {
    // Polls first, and writes pieces that a ready pipe takes whole, so that the thread can give up at any time.
    pollfd waited{item.fd, POLLOUT, 0};
    if (::poll(&waited, 1, 100) <= 0) continue;
    const ssize_t put = ::write(item.fd, rest.data(), std::min<std::size_t>(rest.size(), 4096));
    if (put > 0) {
      mid_line_[which] = rest[static_cast<std::size_t>(put) - 1] != '\n';
      gap_[which] = false;
      rest.remove_prefix(static_cast<std::size_t>(put));
      taken_.fetch_add(static_cast<std::uint64_t>(put), std::memory_order_relaxed);
    } else if (put < 0 && is_full(errno)) {
      no_room_[which].store(errno, std::memory_order_relaxed);
      gap_[which] = mid_line_[which];
      return;
    } else if (put < 0 && errno != EINTR && errno != EAGAIN) {
      gone.store(true, std::memory_order_relaxed);
    }
  }
}

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Divides the limit of `drain` into this many looks, so that time in which this process itself was stopped (Ctrl-Z)
/// counts as one look only.
constexpr int kLooks = 10;
/// Time for the complaint to be read, if stderr has another reader than stdout.
constexpr milliseconds kComplaintLimit{500};

int terminal_columns() {
  winsize size{};
  for (const int fd : {1, 2}) {
    if (::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  }
  return 80;
}

}  // namespace

Display::Display(Loop& loop) : loop_(loop) {
  watch_ = Watch(loop_, console_.event_fd());
  watch_.on_readable([this] { on_console(); });
}

void Display::set_up(const JobSpec& spec, const Plan& plan, const std::vector<int>& ranks) {
  ViewOptions view;
  view.style = spec.json ? PrefixStyle::Json : spec.prefix;
  view.hosts = hosts_of_processes(plan);
  view.roles = plan.roles();
  some_hidden_ = !ranks.empty();
  hidden_.assign(view.hosts.size(), some_hidden_);
  for (const int rank : ranks) hidden_[static_cast<std::size_t>(rank)] = false;
  view.columns = terminal_columns;
  view.speakers = ranks.size();
  const bool prefixes = view.style == PrefixStyle::Rank || view.style == PrefixStyle::Full;
  for (std::size_t i = 0; i < 2; ++i) {
    const int fd = static_cast<int>(i) + 1;
    view.terminal[i] = !spec.json && ::isatty(fd) != 0;
    view.colour[i] = !spec.json && sys::wants_colour(fd);
    view.collapse[i] = ranks.size() != 1 && prefixes &&
                       (spec.collapse == Collapse::Always || (spec.collapse == Collapse::Auto && view.terminal[i]));
  }
  if (prefixes) find_terminal();
  view_.emplace(std::move(view));
}

void Display::grow(const Plan& plan) {
  std::vector<std::string> hosts = hosts_of_processes(plan);
  hidden_.resize(hosts.size(), some_hidden_);
  view_->grow(std::move(hosts));
}

// Chooses the terminal for the status: the one of both streams, or of the only stream that has one.
void Display::find_terminal() {
  const char* const kind = std::getenv("TERM");
  if (kind == nullptr || std::string_view(kind) == "dumb") return;
  struct stat one {
  }, other{};
  for (const int fd : {1, 2}) {
    if (::isatty(fd) == 0 || ::fstat(fd, &other) != 0) continue;
    if (status_fd_ >= 0 && one.st_rdev != other.st_rdev) continue;
    status_fd_ = fd;
    one = other;
    on_it_[fd == 2] = true;
  }
}

void Display::write(int fd, std::string text) {
  if (!on_it_[fd == 2] || text.empty()) return console_.write(fd, std::move(text));
  mid_line_ = text.back() != '\n';
  if (std::exchange(status_shown_, false)) text.insert(0, kEraseLine);
  if (!mid_line_ && !status_.empty()) {
    text += status_line();
    status_shown_ = true;
  }
  console_.write(fd, std::move(text));
}

void Display::set_status(std::string text) {
  if (status_fd_ < 0 || text == status_) return;
  status_ = std::move(text);
  // A terminal that has not taken the earlier output gets no status.
  if (mid_line_ || (!status_.empty() && !console_.idle())) return;
  if (!status_shown_ && status_.empty()) return;
  status_shown_ = !status_.empty();
  console_.write(status_fd_, std::string(kEraseLine) + status_line());
}

/// Returns the status cut to one line, since a longer one could not be erased.
std::string Display::status_line() const {
  const auto columns = static_cast<std::size_t>(std::max(terminal_columns() - 1, 0));
  const std::string text = status_.substr(0, columns);
  return text.empty() || !sys::wants_colour(status_fd_) ? text : "\033[2m" + text + "\033[0m";
}

void Display::feed(std::size_t source, const Output& output) {
  const auto size = static_cast<std::uint64_t>(output.bytes.size());
  if (!hidden_[static_cast<std::size_t>(output.rank)]) {
    show(view_->feed(output.rank, output.stream, output.bytes, Clock::now()));
  }
  shown_.emplace_back(source, size);
  console_.write(1, {}, size);
  wait_for_release();
  if (view_->has_partial() && !partial_) {
    partial_ = Timer(loop_, milliseconds(100), [this] {
      partial_ = Timer();
      show(view_->show_partial());
    });
  }
}

void Display::wait_for_release() {
  const auto due = view_->next_release();
  if (!due || release_) return;
  release_ = Timer(loop_, std::max(*due - Clock::now(), Clock::duration(milliseconds(1))), [this] {
    release_ = Timer();
    show(view_->release(Clock::now()));
    wait_for_release();
  });
}

void Display::on_console() {
  console_.acknowledge();
  const std::uint64_t written = console_.written();
  auto& credits = news_.taken;
  while (!shown_.empty() && credited_ + shown_.front().second <= written) {
    const auto [source, weight] = shown_.front();
    shown_.pop_front();
    credited_ += weight;
    if (!credits.empty() && credits.back().first == source)
      credits.back().second += weight;
    else
      credits.emplace_back(source, weight);
  }
  news_.reader_gone = news_.reader_gone || console_.reader_gone(1);
  if (all_out() && draining_ == Draining::Begun) done();
}

bool Display::all_out() {
  // Asks for `idle` first: once the console is idle, it is known which output did not fit.
  const bool idle = console_.idle();
  for (const int fd : {1, 2}) {
    const int error = console_.no_room(fd);
    if (error != 0 && !std::exchange(no_room_told_[fd == 2], true)) news_.no_room.emplace_back(fd, error);
  }
  return idle && news_.no_room.empty();
}

void Display::show(const std::vector<Text>& texts) {
  for (const Text& text : texts) write(text.fd, text.bytes);
}

void Display::say(const std::string& text) { write(2, "cohort: " + text + "\n"); }

void Display::end_lines() {
  release_ = Timer();
  if (view_) show(view_->finish());
}

void Display::drain(milliseconds limit, std::string complaint) {
  limit_ = limit;
  complaint_ = std::move(complaint);
  draining_ = Draining::Begun;
  seen_ = console_.taken();
  if (all_out()) return done();
  wait_for_reader();
}

void Display::wait_for_reader() {
  look_ = Timer(loop_, limit_ / kLooks, [this] { look_at_reader(); });
}

void Display::look_at_reader() {
  const std::uint64_t taken = console_.taken();
  idle_looks_ = taken == seen_ ? idle_looks_ + 1 : 0;
  seen_ = taken;
  if (idle_looks_ >= kLooks) return give_up();
  wait_for_reader();
}

void Display::give_up() {
  console_.drop();
  say(complaint_);
  look_ = Timer(loop_, kComplaintLimit, [this] { done(); });
}

void Display::done() {
  look_ = Timer();
  watch_ = Watch();
  draining_ = Draining::Done;
}

}  // namespace cohort::launch
