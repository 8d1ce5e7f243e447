#include "launch/agent/worker.h"

#include "base/parse.h"
#include "base/signals.h"
#include "launch/output/other_hosts.h"
#include "launch/output/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

constexpr std::string_view kFrame = "frame #";
constexpr std::string_view kTraceback = "Traceback (most recent call last):";
/// Texts that Python writes between the traceback of a cause and that of its consequence.
constexpr std::string_view kLinks[] = {"\nThe above exception was the direct cause of the following exception:\n\n",
                                       "\nDuring handling of the above exception, another exception occurred:\n\n"};

/// Returns the start of the last `count` lines.
std::size_t last_lines(std::string_view text, std::size_t count) {
  std::size_t begin = text.size();
  if (begin > 0 && text[begin - 1] == '\n') --begin;
  for (std::size_t seen = 0; begin > 0; --begin) {
    if (text[begin - 1] == '\n' && ++seen == count) break;
  }
  return begin;
}

std::size_t line_after(std::string_view text, std::size_t at) {
  const auto end = text.find('\n', at);
  return end == std::string_view::npos ? text.size() : end + 1;
}

/// Returns the start of the line that follows the exception's line (the first one that is not indented).
std::size_t traceback_end(std::string_view text, std::size_t begin) {
  std::size_t line = line_after(text, begin);
  while (line < text.size() && text[line] == ' ') line = line_after(text, line);
  return line_after(text, line);
}

/// Returns the last position before `before` at which a line is the traceback's header.
std::size_t last_header(std::string_view text, std::size_t before) {
  for (std::size_t at = text.rfind(kTraceback, before); at != std::string_view::npos;
       at = text.rfind(kTraceback, at - 1)) {
    const std::size_t end = at + kTraceback.size();
    if ((at == 0 || text[at - 1] == '\n') && end < text.size() && text[end] == '\n') return at;
    if (at == 0) break;
  }
  return std::string_view::npos;
}

/// Returns the start of the last traceback, including the tracebacks of its causes; npos if there is none.
std::size_t traceback_in(std::string_view text) {
  std::size_t begin = last_header(text, text.size());
  while (begin != std::string_view::npos && begin > 0) {
    const std::string_view before = text.substr(0, begin);
    const bool linked = before.ends_with(kLinks[0]) || before.ends_with(kLinks[1]);
    const std::size_t cause = linked ? last_header(text, begin - 1) : std::string_view::npos;
    if (cause == std::string_view::npos) break;
    begin = cause;
  }
  return begin;
}

}  // namespace

void Tail::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const std::size_t end = line_after(bytes, 0);
    bytes_.append(bytes.substr(0, end));
    bytes.remove_prefix(end);
    if (bytes_.back() == '\n') {
      if (std::string_view(bytes_).substr(line_).starts_with(kFrame)) bytes_.resize(line_);
      line_ = bytes_.size();
    }
    // Cuts only at twice the size, so that a flood of small writes does not move memory each time.
    if (bytes_.size() <= 2 * longest_) continue;
    const std::size_t cut = bytes_.size() - longest_;
    bytes_.erase(0, cut);
    line_ -= std::min(line_, cut);
  }
}

std::string Tail::text() const {
  std::string_view text(bytes_);
  if (text.size() > longest_) text.remove_prefix(text.size() - longest_);
  const std::size_t last = last_lines(text, lines_);
  const std::size_t traceback = traceback_in(text);
  if (traceback == std::string_view::npos || traceback >= last) return std::string(text.substr(last));
  if (last_lines(text, kTracebackLines) <= traceback) return std::string(text.substr(traceback));
  constexpr std::size_t kAfter = 10;
  const std::size_t end = traceback_end(text, last_header(text, text.size()));
  std::string_view whole = text.substr(traceback, end - traceback);
  std::string out;
  if (const std::size_t cut = last_lines(whole, kTracebackLines - kAfter); cut > 0) {
    out = "...\n";
    whole.remove_prefix(cut);
  }
  out += whole;
  std::string_view rest = text.substr(end);
  if (const std::size_t cut = last_lines(rest, kAfter); cut > 0) {
    out += "...\n";
    rest.remove_prefix(cut);
  }
  return out.append(rest);
}

Worker::Worker(Loop& loop, const WorkerPlan& plan, std::size_t tail_lines, Upstream& upstream)
    : loop_(loop), rank_(plan.rank), role_(plan.role), number_(plan.number), upstream_(upstream), tail_(tail_lines) {}

Result<void> Worker::prepare(const std::string& log_folder, Log log, bool with_input) {
  sys::UniqueFd logs;
  if (!log_folder.empty()) {
    auto folder = open_folder(log_folder);
    if (!folder) return fail(ErrorCode::Io, "folder {}", folder.error().what());
    logs = *std::move(folder);
  }
  for (std::size_t i = 0; i < 2; ++i) {
    auto ends = make_pipe();
    if (!ends) return tl::unexpected(ends.error());
    pipes_[i].fd = std::move(ends->read_end);
    child_ends_[i + 1] = std::move(ends->write_end);
    // Makes only our end nonblocking: programs do not expect EAGAIN on their own end.
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
  } else {  // a job can run without it
    upstream_.send(Trouble{fmt::format("what {} does will not be known: {}", name(), page.error().what())});
  }
  if (with_input) {
    auto ends = make_pipe();
    if (!ends) return tl::unexpected(ends.error());
    child_ends_[0] = std::move(ends->read_end);
    input_ = std::move(ends->write_end);
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
  // The worker's group exists since setpgid, which precedes the confirmed exec.
  ::kill(-child_.pid, number);
}

bool Worker::is_of_this_rank(pid_t pid) const {
  return pid > 0 && (pid == child_.pid || ::getpgid(pid) == child_.pid || sys::descends_from(pid, child_.pid));
}

pid_t Worker::takes_term() const {
  // The rank can write anything into the page, so the number need not be a pid of its own processes.
  const pid_t pid = page() != nullptr ? page()->pid.load() : 0;
  return is_of_this_rank(pid) && sys::signal_fate(pid, SIGTERM) == sys::SignalFate::Taken ? pid : 0;
}

void Worker::ask_to_end(int number) {
  asked_alone_ = alive() && number == SIGTERM ? takes_term() : 0;
  // A rank that has saved and is ending would die of the signal, and its status would be lost.
  if (number == SIGTERM && makes_room()) {
    if (asked_alone_ == 0) asked_alone_ = child_.pid;
    return;
  }
  if (asked_alone_ == 0) return signal(number);
  (void)sys::signal_if(asked_alone_, number, [this](pid_t pid) { return is_of_this_rank(pid); });
}

void Worker::ask_group() {
  asked_alone_ = 0;
  signal(SIGTERM);
}

bool Worker::left_by_its_rank() const {
  if (!alive() || asked_alone_ == 0 || asked_alone_ == child_.pid) return false;
  const auto stat = sys::process_stat(asked_alone_);
  return !stat || stat->state == 'Z' || !is_of_this_rank(asked_alone_);
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
    // A process that ignores the signal does so on purpose, so there is nothing to wait for.
    used = used || sent || fate == sys::SignalFate::Ignored;
  }
  return used;
}

bool Worker::saves_when_asked() const {
  return alive() && page() != nullptr && (page()->abilities.load() & status::StatusLayout::kSavesWhenAsked) != 0;
}

std::uint64_t Worker::meetings() const {
  return page() == nullptr ? 0 : std::uint64_t{page()->worlds.load()} << 1 | (page()->forming.load() != 0 ? 1U : 0U);
}

bool Worker::makes_room() const { return page() != nullptr && page()->preempted_by.load() != 0; }

void Worker::announce(std::uint64_t epoch) noexcept {
  if (page() != nullptr) page()->epoch.store(epoch, std::memory_order_relaxed);
}

void Worker::announce_end() noexcept {
  if (page() != nullptr) page()->job_ends.store(1, std::memory_order_relaxed);
}

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
    return is_of_this_rank(pid) && sys::signal_fate(pid, SIGQUIT) == sys::SignalFate::Taken;
  };
  return sys::signal_if(page()->pid.load(), SIGQUIT, takes_it) || sys::signal_if(child_.pid, SIGQUIT, takes_it);
}

std::string Worker::stacks() const {
  // The rank's descriptor is a copy of ours: both share one file position.
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
  // stderr first, since it explains most.
  const bool more_errors = read_some(Stream::Stderr);
  return read_some(Stream::Stdout) || more_errors;
}

bool Worker::read_some(Stream stream) {
  Pipe& pipe = pipes_[static_cast<std::size_t>(stream)];
  if (!pipe.fd) return false;
  auto bytes = read_piece(pipe.fd.get(), kOutputPiece);
  if (!bytes) {
    pipe.watch = Watch();
    pipe.fd.reset();
    pipe.log.reset();
  }
  if (!bytes || bytes->empty()) return false;
  if (!write_or_close(pipe.log, *bytes))
    upstream_.send(Trouble{fmt::format("{} ends here, the job goes on: {}", pipe.log_path, errno_text(errno))});
  if (stream == Stream::Stderr) tail_.append(*bytes);
  upstream_.send(Output{rank_, stream, *std::move(bytes)});
  return true;
}

void Worker::give_input(std::string_view bytes) {
  if (!input_) {
    if (!bytes.empty()) upstream_.send(InputTaken{bytes.size()});
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
      upstream_.send(InputTaken{static_cast<std::size_t>(put)});
    } else if (put < 0 && errno == EAGAIN) {
      input_watch_.on_writable([this] { write_input(); });
      return;
    } else if (put < 0 && errno != EINTR) {
      return close_input();  // the rank has closed its stdin, so the rest has no reader
    }
  }
  input_watch_.on_writable(nullptr);
  if (input_ended_) close_input();
}

void Worker::close_input() {
  input_watch_ = Watch();
  input_.reset();
  if (!unwritten_.empty()) upstream_.send(InputTaken{std::exchange(unwritten_, {}).size()});
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLookAgainAfter = std::chrono::milliseconds(100);
/// A starting program will soon install its handler; one that has none after this time may never have one.
constexpr auto kTellAfter = std::chrono::seconds(3);

}  // namespace

void KeptSignals::pass_on(int signal) {
  for (const auto& worker : workers_) {
    if (!worker->alive() || worker->offer(signal)) continue;
    if (worker->role() == Role::Worker) kept_.emplace(signal, worker->rank());  // the signal is for ranks only
  }
  if (kept_.empty() || again_) return;
  since_ = Clock::now();
  told_ = false;
  again_ = Timer(loop_, kLookAgainAfter, [this] { look_again(); });
}

void KeptSignals::look_again() {
  again_ = Timer();
  for (const auto& worker : workers_) {
    for (auto next = kept_.begin(); next != kept_.end();) {
      const auto [signal, rank] = *next;
      const bool over = rank == worker->rank() && (!worker->alive() || worker->offer(signal));
      next = over ? kept_.erase(next) : std::next(next);
    }
  }
  if (kept_.empty()) return;
  if (!told_ && Clock::now() - since_ >= kTellAfter) {
    told_ = true;
    std::vector<int> ranks;
    for (const auto& [signal, rank] : kept_) ranks.push_back(rank);
    const bool one = kept_.size() == 1;
    upstream_.send(Trouble{
        fmt::format("rank{} {} {} no handler for {}, which would end {}; it is kept until {} one -- cohort::Preemption "
                    "has one, and lets the program save and end",
                    one ? "" : "s", to_ranges(ranks), one ? "has" : "have", sys::signal_name(kept_.begin()->first),
                    one ? "it" : "them", one ? "it has" : "they have")});
  }
  again_ = Timer(loop_, kLookAgainAfter, [this] { look_again(); });
}

}  // namespace cohort::launch
