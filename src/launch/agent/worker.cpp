#include "launch/agent/worker.h"

#include "launch/record/run_folder.h"
#include "launch/record/other_hosts.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

Result<std::pair<sys::UniqueFd, sys::UniqueFd>> make_pipe(const std::string& name) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    return fail(ErrorCode::Unavailable, "pipe for {}: {}; raise the limit of open files (ulimit -n)", name,
                errno_text(errno));
  }
  return std::pair(sys::UniqueFd(ends[0]), sys::UniqueFd(ends[1]));
}

/// Our end only: the other end is the worker's, and programs do not expect EAGAIN there.
void set_nonblocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

Worker::Worker(Loop& loop, const WorkerPlan& plan, std::size_t tail_lines, Events events)
    : loop_(loop),
      rank_(plan.rank),
      role_(plan.role),
      number_(plan.number),
      events_(std::move(events)),
      tail_(tail_lines) {}

Result<void> Worker::prepare(const std::string& log_folder, Log log, bool with_input) {
  sys::UniqueFd logs;
  if (!log_folder.empty()) {
    auto folder = open_folder(log_folder);
    if (!folder) return fail(ErrorCode::Io, "folder {}", folder.error().what());
    logs = *std::move(folder);
  }
  for (std::size_t i = 0; i < 2; ++i) {
    auto ends = make_pipe(name());
    if (!ends) return tl::unexpected(ends.error());
    pipes_[i].fd = std::move(ends->first);
    child_ends_[i + 1] = std::move(ends->second);
    set_nonblocking(pipes_[i].fd.get());
    if (!logs) continue;
    const std::string name = log_name(role_, number_, static_cast<Stream>(i));
    pipes_[i].log_path = log_folder + "/" + name;
    auto file = log == Log::New ? make_file(logs.get(), name, 0666) : continue_file(logs.get(), name, 0666);
    if (!file) return fail(ErrorCode::Io, "log {}/{}", log_folder, file.error().what());
    pipes_[i].log = *std::move(file);
  }
  auto page = status::create_status_page();
  if (page) {
    status_ = *std::move(page);
  } else {  // the job can do without
    events_.trouble(fmt::format("what {} does will not be known: {}", name(), page.error().what()));
  }
  if (with_input) {
    auto ends = make_pipe(name());
    if (!ends) return tl::unexpected(ends.error());
    child_ends_[0] = std::move(ends->first);
    input_ = std::move(ends->second);
    set_nonblocking(input_.get());
  }
  return {};
}

Result<void> Worker::start(const sys::SpawnOptions& program) {
  sys::SpawnOptions options = program;
  if (child_ends_[0]) options.stdin_fd = child_ends_[0].get();
  options.stdout_fd = child_ends_[1].get();
  options.stderr_fd = child_ends_[2].get();
  auto spawned = sys::spawn(options);
  for (sys::UniqueFd& end : child_ends_) end.reset();
  if (!spawned) {
    return fail(ErrorCode::Unavailable, "{}", sys::to_string(spawned.error()));
  }
  pending_ = std::move(*spawned);
  return {};
}

Result<void> Worker::confirm() {
  auto child = std::move(*pending_).confirm();
  pending_.reset();
  if (!child) {
    return fail(ErrorCode::Unavailable, "{}", sys::to_string(child.error()));
  }
  child_ = *std::move(child);
  for (const Stream stream : {Stream::Stdout, Stream::Stderr}) {
    Pipe& pipe = pipes_[static_cast<std::size_t>(stream)];
    pipe.watch = Watch(loop_, pipe.fd.get());
  }
  if (input_) input_watch_ = Watch(loop_, input_.get());
  resume_reading();
  return {};
}

void Worker::signal(int number) const {
  if (!alive()) return;
  // Its own group is there from setpgid on, which the confirmed exec comes after.
  ::kill(-child_.pid, number);
}

bool Worker::offer(int number) const {
  bool used = false;
  if (!alive()) return used;
  for (const pid_t pid : sys::descendants(::getpid())) {
    std::optional<sys::SignalFate> fate;
    const bool sent = sys::signal_if(pid, number, [&](pid_t held) {
      if (::getpgid(held) == child_.pid) fate = sys::signal_fate(held, number);
      return fate == sys::SignalFate::Taken;
    });
    // A process that ignores it has decided so: nothing to wait for.
    used = used || sent || fate == sys::SignalFate::Ignored;
  }
  return used;
}

bool Worker::saves_when_asked() const {
  return alive() && page() != nullptr && (page()->abilities.load() & status::StatusLayout::kSavesWhenAsked) != 0;
}

bool Worker::makes_room() const { return page() != nullptr && page()->preempted_by.load() != 0; }

RankReport Worker::report() const {
  RankReport report = page() != nullptr ? read_status(*page()) : RankReport();
  report.rank = rank_;
  if (report.pid <= 0) report.pid = static_cast<std::int32_t>(child_.pid);
  const auto stat = sys::process_stat(report.pid);
  const auto own = report.pid == child_.pid ? stat : sys::process_stat(child_.pid);
  if (!stat) return report;
  report.state = static_cast<std::uint8_t>(own && own->state == 'T' ? 'T' : stat->state);
  report.memory = stat->memory;
  report.cpu_ms = stat->cpu_ticks * 1000 / static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
  return report;
}

std::string Worker::words() const { return page() != nullptr ? last_words(*page()) : std::string(); }

CauseReport Worker::cause() const { return page() != nullptr ? read_cause(*page()) : CauseReport(); }

std::optional<std::chrono::steady_clock::time_point> Worker::words_began() const {
  if (page() == nullptr || page()->words_ready.load(std::memory_order_acquire) == 0) return std::nullopt;
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(page()->words_ns));
}

bool Worker::ask_stacks() {
  if (!alive() || page() == nullptr || (page()->abilities.load() & status::StatusLayout::kTellsStacks) == 0)
    return false;
  if (::lseek(status_.fd.get(), status::kStatusStacksBegin, SEEK_SET) < 0) return false;
  const auto takes_it = [this](pid_t pid) {
    const bool of_this_rank = ::getpgid(pid) == child_.pid || sys::descends_from(pid, child_.pid);
    return of_this_rank && sys::signal_fate(pid, SIGQUIT) == sys::SignalFate::Taken;
  };
  // The page is the rank's to write: what stands there may be no pid of its own.
  return sys::signal_if(page()->pid.load(), SIGQUIT, takes_it) || sys::signal_if(child_.pid, SIGQUIT, takes_it);
}

std::string Worker::stacks() const {
  // The rank's descriptor is a copy of ours: they have one position.
  const off_t end = ::lseek(status_.fd.get(), 0, SEEK_CUR);
  const auto begin = static_cast<off_t>(status::kStatusStacksBegin);
  if (end <= begin) return {};
  std::string text(static_cast<std::size_t>(std::min<off_t>(end, status::kStatusBytes) - begin), '\0');
  const ssize_t got = ::pread(status_.fd.get(), text.data(), text.size(), begin);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  return text;
}

void Worker::pause_reading() {
  for (Pipe& pipe : pipes_) {
    if (pipe.watch) pipe.watch.on_readable(nullptr);
  }
}

void Worker::resume_reading() {
  for (const Stream stream : {Stream::Stdout, Stream::Stderr}) {
    Pipe& pipe = pipes_[static_cast<std::size_t>(stream)];
    if (pipe.watch) pipe.watch.on_readable([this, stream] { read_some(stream); });
  }
}

bool Worker::drain() {
  // stderr first: it explains most.
  const bool more_errors = read_some(Stream::Stderr);
  return read_some(Stream::Stdout) || more_errors;
}

bool Worker::read_some(Stream stream) {
  Pipe& pipe = pipes_[static_cast<std::size_t>(stream)];
  if (!pipe.fd) return false;
  std::string bytes(kOutputPiece, '\0');
  ssize_t got = 0;
  do {
    got = ::read(pipe.fd.get(), bytes.data(), bytes.size());
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EAGAIN) return false;
  if (got <= 0) {
    pipe.watch = Watch();
    pipe.fd.reset();
    pipe.log.reset();
    return false;
  }
  bytes.resize(static_cast<std::size_t>(got));
  write_log(pipe, bytes);
  if (stream == Stream::Stderr) tail_.append(bytes);
  events_.output({rank_, stream, std::move(bytes)});
  return true;
}

void Worker::write_log(Pipe& pipe, std::string_view bytes) {
  while (pipe.log && !bytes.empty()) {
    const ssize_t put = ::write(pipe.log.get(), bytes.data(), bytes.size());
    if (put > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(put));
    } else if (put < 0 && errno != EINTR) {
      const int error = errno;
      pipe.log.reset();
      events_.trouble(fmt::format("{} ends here, the job goes on: {}", pipe.log_path, errno_text(error)));
    }
  }
}

void Worker::give_input(std::string_view bytes) {
  if (!input_) {
    if (!bytes.empty()) events_.input_taken(bytes.size());
    return;
  }
  if (bytes.empty()) input_ended_ = true;
  unwritten_.append(bytes);
  write_input();
}

void Worker::write_input() {
  while (!unwritten_.empty()) {
    const ssize_t put = ::write(input_.get(), unwritten_.data(), unwritten_.size());
    if (put > 0) {
      unwritten_.erase(0, static_cast<std::size_t>(put));
      events_.input_taken(static_cast<std::size_t>(put));
    } else if (put < 0 && errno == EAGAIN) {
      input_watch_.on_writable([this] { write_input(); });
      return;
    } else if (put < 0 && errno != EINTR) {
      return close_input();  // the rank has closed its stdin: the rest has no reader
    }
  }
  input_watch_.on_writable(nullptr);
  if (input_ended_) close_input();
}

void Worker::close_input() {
  input_watch_ = Watch();
  input_.reset();
  if (!unwritten_.empty()) events_.input_taken(std::exchange(unwritten_, {}).size());
}

}  // namespace cohort::launch
