#include "launch/supervise/trackers.h"

#include "base/result.h"
#include "launch/environment.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

constexpr auto kNoticeTime = std::chrono::seconds(2);
constexpr std::string_view kOwnPrefix = "cohort: ";  // which `say` puts before each line anyway

}  // namespace

Trackers::Trackers(Loop& loop, Options options) : loop_(loop), options_(std::move(options)) {
  for (const std::string& destination : options_.destinations) {
    trackers_.push_back(std::make_unique<Tracker>());
    trackers_.back()->destination = destination;
    try {
      start(*trackers_.back());
    } catch (const Error& error) {
      trackers_.pop_back();
      options_.say(fmt::format("--track {}: {}", destination, error.what()));
    }
  }
}

Trackers::~Trackers() {
  for (const auto& tracker : trackers_) {
    if (tracker->process.pid < 0) continue;
    ::kill(tracker->process.pid, SIGKILL);
    while (::waitpid(tracker->process.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

void Trackers::start(Tracker& tracker) {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) raise(ErrorCode::Unavailable, "pipe: {}", errno_text(errno));
  tracker.output.reset(ends[0]);
  const sys::UniqueFd in(ends[1]);
  const sys::UniqueFd nowhere(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  (void)::fcntl(tracker.output.get(), F_SETFL, O_NONBLOCK);
  sys::SpawnOptions spawn;
  spawn.path = value_or_throw(sys::own_executable());
  spawn.arguments = {"cohort", "export", options_.run_folder, "--to", tracker.destination, "--follow"};
  spawn.environment = Environment::current().assignments();
  spawn.stdout_fd = nowhere.get();
  spawn.stderr_fd = in.get();
  spawn.group = sys::Group::Session;  // a Ctrl-C is for the job, whose end it then tells of
  spawn.parent_death_signal = SIGTERM;
  auto pending = sys::spawn(spawn);
  auto child = pending ? std::move(*pending).confirm() : tl::unexpected(pending.error());
  if (!child) {
    raise(ErrorCode::Unavailable, "{} {}: {}", child.error().step, spawn.path, errno_text(child.error().error_number));
  }
  tracker.process = *std::move(child);
  tracker.output_watch = Watch(loop_, tracker.output.get());
  tracker.output_watch.on_readable([this, &tracker] { read(tracker); });
  tracker.process_watch = Watch(loop_, tracker.process.pidfd.get());
  tracker.process_watch.on_readable([this, &tracker] { on_ended(tracker); });
}

std::vector<pid_t> Trackers::pids() const {
  std::vector<pid_t> pids;
  for (const auto& tracker : trackers_) {
    if (tracker->process.pid >= 0) pids.push_back(tracker->process.pid);
  }
  return pids;
}

void Trackers::read(Tracker& tracker) {
  char bytes[4096];
  while (true) {
    const ssize_t got = ::read(tracker.output.get(), bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      tracker.output_watch = Watch();
      return;
    }
    for (Line& line : tracker.lines.feed({bytes, static_cast<std::size_t>(got)})) {
      if (line.text.starts_with(kOwnPrefix)) line.text.erase(0, kOwnPrefix.size());
      options_.say(line.text);
    }
  }
}

void Trackers::on_ended(Tracker& tracker) {
  tracker.process_watch = Watch();
  read(tracker);
  int word = 0;
  const pid_t reaped = ::waitpid(tracker.process.pid, &word, WNOHANG);
  tracker.process.pid = -1;
  const sys::ExitStatus status = sys::exit_status_from_wait(word);
  if (reaped > 0 && !status.success())
    options_.say(
        fmt::format("--track {}: ended with {}; {}", tracker.destination, to_string(status), way_out(tracker)));
  check_done();
}

std::string Trackers::way_out(const Tracker& tracker) const {
  return fmt::format("what is missing there: cohort export {} --to '{}'", options_.run_folder, tracker.destination);
}

void Trackers::finish(std::chrono::milliseconds limit, std::function<void()> on_done) {
  on_done_ = std::move(on_done);
  limit_ = Timer(loop_, limit, [this] { on_limit(); });
  notice_ = Timer(loop_, kNoticeTime, [this, limit] {
    for (const auto& tracker : trackers_) {
      if (tracker->process.pid < 0) continue;
      options_.say(fmt::format("waiting for --track {} to catch up, for {:g} s at most (Ctrl-C ends that; {})",
                               tracker->destination, std::chrono::duration<double>(limit).count(), way_out(*tracker)));
    }
  });
  check_done();
}

void Trackers::on_limit() {
  for (const auto& tracker : trackers_) {
    if (tracker->process.pid < 0) continue;
    tracker->process_watch = Watch();
    read(*tracker);
    ::kill(tracker->process.pid, SIGKILL);
    while (::waitpid(tracker->process.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    tracker->process.pid = -1;
    options_.say(fmt::format("--track {}: it has not caught up in time; {}", tracker->destination, way_out(*tracker)));
  }
  check_done();
}

void Trackers::check_done() {
  const bool all =
      std::all_of(trackers_.begin(), trackers_.end(), [](const auto& one) { return one->process.pid < 0; });
  if (!all || !on_done_) return;
  limit_ = Timer();
  notice_ = Timer();
  // Not from within a callback of what this has to do with.
  done_ = Timer(loop_, {}, [call = std::exchange(on_done_, nullptr)] { call(); });
}

}  // namespace cohort::launch
