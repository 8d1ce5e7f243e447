#include "observe/watch/runs.h"

#include "base/files.h"
#include "base/hardware.h"
#include "base/json.h"
#include "base/parse.h"
#include "base/process.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "launch/output/live_run.h"
#include "launch/output/run_folder.h"
#include "launch/output/text.h"
#include "rendezvous/identity.h"
#include "telemetry/record.h"

#include <cohort/exit_status.h>

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>
#include <fstream>
#include <iterator>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

namespace cohort::watch {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// Size of the end of a record that is read, since the end has the last values.
constexpr std::streamoff kTail = std::streamoff{1} << 20;
/// Seconds without live.json being written (usually every 2 s) after which a launcher counts as gone.
constexpr double kSilence = 15;
/// The same for a launcher on another host, since clocks differ, and networks and their file systems recover.
constexpr double kSilenceElsewhere = 3600;
/// Beginning of the name of a run's folder while it is removed.
constexpr std::string_view kRemoved = ".removed-";
/// Names that `cohort` makes in a run's folder, besides earlier-N; `checkpoints` as in the documentation.
constexpr std::string_view kOwnNames[] = {
    "job.json",   "live.json",   "run.jsonl",  "usage.jsonl", "warnings.jsonl", "logs",           "trace",
    "trace.json", "checkpoints", "curves.svg", "compare.svg", "on-warning.log", "page.url",       "control",
    "submit.sh",  "submit.json", "output.txt", "wandb",       ".job.json.new",  ".live.json.new", launch::kLockFile};

std::string text_of(const fs::path& file, std::streamoff tail) {
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  if (!in) return {};
  const std::streamoff size = in.tellg();
  in.seekg(std::max<std::streamoff>(size - tail, 0));
  std::string text(static_cast<std::size_t>(std::min(size, tail)), '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(std::max<std::streamsize>(in.gcount(), 0)));
  if (size > tail) text.erase(0, text.find('\n') + 1);
  return text;
}

std::optional<Json> job_of(const fs::path& run) {
  if (run.filename().string().starts_with(kRemoved)) return std::nullopt;
  const auto text = sys::read_file((run / "job.json").string(), {.max_bytes = std::uint64_t{64} << 20});
  if (!text) return std::nullopt;
  Json job = parse_json_or_discard<Json>(text->text());
  if (!job.is_object() || text_in(job, "job_id").empty()) return std::nullopt;
  return job;
}

/// True if the launcher or its agents on this host hold the lock in the folder. (Does not try to take the lock, which
/// could disturb a job that is about to take it.)
bool is_locked_here(const fs::path& run) {
  struct stat status {};
  if (::stat((run / launch::kLockFile).c_str(), &status) != 0) return false;
  const std::string file = fmt::format("{:02x}:{:02x}:{}", major(status.st_dev), minor(status.st_dev), status.st_ino);
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    if (line.find(" FLOCK ") != std::string::npos && line.find(" " + file + " ") != std::string::npos) return true;
  }
  return false;
}

/// Returns whether the run's launcher, or an agent of it on its host, lives; nullopt: it was on another host, or in
/// another container, or a Cohort that did not record it.
std::optional<bool> lives(const Json& job, const fs::path& run) {
  const auto found = job.find("launcher");
  if (found == job.end() || text_in(*found, "host_id") != rendezvous::host_identity().id) return std::nullopt;
  const auto stat = sys::process_stat(static_cast<pid_t>(number_in(*found, "pid").value_or(0)));
  const bool is =
      stat && !stat->exiting && static_cast<double>(stat->start_ticks) == number_in(*found, "start_time").value_or(-1);
  return is || is_locked_here(run);
}

std::uint64_t bytes_in(const fs::path& folder) {
  std::uint64_t bytes = 0;
  std::error_code error;
  const auto options = fs::directory_options::skip_permission_denied;
  for (fs::recursive_directory_iterator entry(folder, options, error), end; !error && entry != end;
       entry.increment(error)) {
    struct stat status {};
    if (::lstat(entry->path().c_str(), &status) == 0) bytes += static_cast<std::uint64_t>(status.st_blocks) * 512;
  }
  return bytes;
}

std::optional<RunSummary> read_run(const fs::path& folder) {
  std::error_code error;
  const auto job = fs::is_directory(folder, error) ? job_of(folder) : std::nullopt;
  if (!job) return std::nullopt;
  RunSummary run;
  run.folder = fs::canonical(folder, error);
  if (error) return std::nullopt;
  run.name = run.folder.filename().string();
  const double now = launch::seconds_now();
  const auto text = sys::read_file((folder / launch::kLiveFile).string(), {.max_bytes = std::uint64_t{256} << 20});
  auto read = text ? launch::parse_live_run(text->text()) : Result<LiveRun>(LiveRun());
  const LiveRun live = read ? *std::move(read) : LiveRun();
  run.elsewhere = text_in(*job, "host") != sys::host_name();
  struct stat written {};
  run.ended = live.time > 0                                          ? live.time
              : ::stat((folder / "job.json").c_str(), &written) == 0 ? static_cast<double>(written.st_mtime)
                                                                     : 0;
  run.started = live.start > 0 ? live.start : run.ended;
  if (live.state == "ended") {
    run.exit_status = live.exit_status.value_or(1);
    const bool told = run.exit_status > 128 && live.reason.find("told to end by SIG") != std::string::npos;
    run.state = run.exit_status == 0                ? "finished"
                : run.exit_status == kRequeueStatus ? "preempted"
                : told                              ? "stopped"
                                                    : "failed";
  } else if (lives(*job, folder)
                 .value_or(now - run.ended < (run.elsewhere ? kSilenceElsewhere : kSilence) ||
                           is_locked_here(folder))) {
    run.state = "running";
    run.ended = now;
  } else {
    run.state = "lost";
  }
  run.ranks = live.ranks.size();
  ProgressReader record;
  for (const track::RecordLine& line : track::parse_record(text_of(folder / "run.jsonl", kTail)).events)
    record.take(line);
  run.step = record.progress().step;
  for (const LiveRank& rank : live.ranks) run.step = std::max(run.step, rank.figures.step);
  run.values = record.progress().values;
  // Puts the values that people look at first in front.
  std::stable_partition(run.values.begin(), run.values.end(), [&](const Logged& one) {
    return one.name == record.progress().loss_name || one.name.find("accuracy") != std::string::npos;
  });
  run.bytes = bytes_in(folder);
  return run;
}

bool is_within(const fs::path& path, const fs::path& folder) {
  const auto [end, rest] = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return end == folder.end();
}

/// True for names of folders made by `cohort run` and `cohort submit`, whose whole contents belong to the run.
bool has_own_name(const std::string& name, std::string_view job_id) {
  constexpr std::string_view kTime = "dddddddd-dddddd-";
  for (std::size_t i = 0; i < kTime.size(); ++i) {
    if (i >= name.size() || (kTime[i] == 'd' ? name[i] < '0' || name[i] > '9' : name[i] != kTime[i])) return false;
  }
  const std::size_t end = job_id.rfind('-');
  return end != std::string_view::npos && name.substr(kTime.size()).starts_with(job_id.substr(0, end + 1));
}

bool is_earlier(std::string_view name) {
  return name.starts_with("earlier-") && name.find_first_not_of("0123456789", 8) == std::string_view::npos;
}

/// Describes files in the run's folder that do not belong to the run; empty: none.
std::string others_in(const fs::path& run, std::string_view job_id) {
  std::error_code error;
  std::vector<std::string> others;
  const bool all_own = has_own_name(run.filename().string(), job_id);
  for (fs::recursive_directory_iterator entry(run, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;
    if (entry->is_directory(ignored) && !entry->is_symlink(ignored) && !(entry.depth() == 0 && is_earlier(name)) &&
        job_of(entry->path()))
      return fmt::format("the run {} is in it", entry->path().lexically_relative(run).string());
    if (entry.depth() == 0 && !all_own && !is_earlier(name) &&
        std::ranges::find(kOwnNames, name) == std::end(kOwnNames))
      others.push_back(name);
  }
  if (error) return fmt::format("not all of it can be read: {}", error.message());
  if (others.empty()) return {};
  std::ranges::sort(others);
  const std::size_t more = others.size() - std::min<std::size_t>(others.size(), 5);
  others.resize(others.size() - more);
  return fmt::format("it holds what no run makes: {}{} -- move that away, or remove the folder yourself",
                     fmt::join(others, ", "), more == 0 ? "" : fmt::format(" and {} more", more));
}

[[noreturn]] void refuse(const RunSummary& run, const std::string& why) {
  raise(ErrorCode::InvalidArgument, "{} is not removed -- {}", run.folder.string(), why);
}

}  // namespace

RunSummary summary_of(const fs::path& run) {
  if (auto found = read_run(run)) return *std::move(found);
  raise(ErrorCode::InvalidArgument, "{} is no run -- `cohort run` has left no job.json in it", run.string());
}

std::vector<RunSummary> list_runs(const fs::path& folder) {
  std::vector<RunSummary> runs;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    if (entry->is_symlink(ignored)) continue;
    if (auto run = read_run(entry->path())) runs.push_back(*std::move(run));
  }
  if (error) raise(ErrorCode::Unavailable, "no runs in {} -- {}", folder.string(), error.message());
  std::sort(runs.begin(), runs.end(), [](const RunSummary& a, const RunSummary& b) {
    return std::pair(a.started, a.name) < std::pair(b.started, b.name);
  });
  return runs;
}

std::string to_json(const std::vector<RunSummary>& runs) {
  Json all = Json::array();
  for (const RunSummary& run : runs) {
    Json values = Json::object();
    for (const Logged& one : run.values)
      values[one.name] = std::isfinite(one.last) ? Json(one.last) : Json(track::text_of(one.last));
    Json object = {{"name", run.name},
                   {"folder", run.folder.string()},
                   {"state", run.state},
                   {"started", run.started},
                   {"seconds", std::round(std::max(0.0, run.ended - run.started) * 1e3) / 1e3},
                   {"ranks", run.ranks},
                   {"step", run.step},
                   {"bytes", run.bytes},
                   {"values", values}};
    if (run.state != "running" && run.state != "lost") object["exit_status"] = run.exit_status;
    all.push_back(std::move(object));
  }
  return json_text(all, 2) + "\n";
}

std::string to_table(const std::vector<RunSummary>& runs) {
  std::size_t width = 3;
  for (const RunSummary& run : runs) width = std::max(width, run.name.size());
  std::string text = fmt::format("{:<{}}  {:<9}  {:<16}  {:>9}  {:>5}  {:>8}  {:>6}  {}\n", "run", width, "state",
                                 "started", "duration", "ranks", "step", "size", "last values");
  for (const RunSummary& run : runs) {
    std::string values;
    for (std::size_t i = 0; i < std::min<std::size_t>(run.values.size(), 3); ++i)
      values += fmt::format("{}{} {:.4g}", i == 0 ? "" : "  ", run.values[i].name, run.values[i].last);
    const bool known = run.started >= 1 && run.started < 253402300800.0;  // up to the year 9999
    const auto started = known ? static_cast<std::time_t>(run.started) : 0;
    std::string line =
        fmt::format("{:<{}}  {:<9}  {:<16}  {:>9}  {:>5}  {:>8}  {:>6}  {}", run.name, width, run.state,
                    !known ? std::string("-") : fmt::format("{:%Y-%m-%d %H:%M}", fmt::localtime(started)),
                    duration_text(run.ended - run.started), run.ranks, run.step,
                    bytes_text(static_cast<double>(run.bytes)), values);
    line.erase(line.find_last_not_of(' ') + 1);
    text += launch::plain(line) + "\n";
  }
  return text;
}

std::chrono::seconds parse_age(const std::string& text) {
  std::int64_t unit = 1;
  std::string number = text;
  for (const auto& [letter, seconds] : {std::pair('s', 1), {'m', 60}, {'h', 3600}, {'d', 86400}, {'w', 604800}}) {
    if (!number.ends_with(letter)) continue;
    unit = seconds;
    number.pop_back();
    break;
  }
  const auto count = parse_integer<std::int64_t>(number);
  if (!count || *count < 0 || *count > 1'000'000'000)
    raise(ErrorCode::InvalidArgument, "'{}' is no time -- 30d, 12h, 15m or seconds", text);
  return std::chrono::seconds(*count * unit);
}

void require_removable(const RunSummary& run) {
  if (run.state == "running") refuse(run, "it goes on");
  std::error_code error;
  if (is_within(fs::current_path(error), run.folder)) refuse(run, "it has the working directory");
  const auto job = job_of(run.folder);
  if (!job) refuse(run, "it is no run any more");
  // With --run-dir, a run can be in any folder.
  if (const fs::path from = text_in(*job, "folder"); from.empty() || is_within(from, run.folder))
    refuse(run, "its command was started in that folder, which holds more than the run");
  if (const std::string others = others_in(run.folder, text_in(*job, "job_id")); !others.empty()) refuse(run, others);
}

void remove_run(const RunSummary& run) {
  require_removable(run);
  const sys::UniqueFd fd(::open((run.folder / launch::kLockFile).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (fd && ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) refuse(run, "a job runs in it");
  const fs::path parent = run.folder.parent_path(), aside = parent / (std::string(kRemoved) + run.name);
  value_or_throw(sys::remove_tree(aside.string()));  // left by a removal that was killed
  value_or_throw(sys::rename_path(run.folder.string(), aside.string()));
  value_or_throw(sys::remove_tree(aside.string()));
  std::error_code error;
  const fs::path latest = parent / "latest";
  if (fs::is_symlink(latest, error) && !fs::exists(latest, error)) fs::remove(latest, error);
}

}  // namespace cohort::watch
