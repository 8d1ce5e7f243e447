#include "launch/supervise/warnings.h"

#include "launch/record/live_run.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

namespace cohort::launch {
namespace {

constexpr std::chrono::seconds kLookAtDiskEvery{1};

}  // namespace

Warnings::Warnings(Loop& loop, const RunFolder& folder, WarningsOptions options)
    : loop_(loop), folder_(folder), options_(std::move(options)), file_(folder) {
  if (!options_.on_warning.empty()) {
    command_.emplace(
        loop,
        WarningCommandOptions{
            .command = options_.on_warning, .job_id = options_.job_id, .run_folder = folder.path, .say = options_.say});
  }
  look_at_disk();
}

void Warnings::tell(const Warning& warning) {
  const double uptime = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (!repeats_.lets_through(warning, uptime)) return;
  const std::string line = warning_line(warning, seconds_now());
  options_.show(warning);
  file_.append(line);
  if (command_) command_->run(warning, line);
}

void Warnings::look_at_disk() {
  const auto room = file_.room();
  const bool full = room && nearly_full(*room);
  if (full && !full_) {
    constexpr double kMega = 1e6;
    tell({.kind = WarningKind::DiskFull,
          .text = fmt::format("{:.0f} MB of {:.0f} MB are free where {} is: checkpoints and logs may not fit",
                              static_cast<double>(room->free) / kMega, static_cast<double>(room->size) / kMega,
                              folder_.shown),
          .rank = {},
          .step = {}});
  }
  full_ = full;
  look_ = Timer(loop_, kLookAtDiskEvery, [this] { look_at_disk(); });
}

void Warnings::finish() {
  look_ = Timer();
  if (command_) command_->finish();
}

}  // namespace cohort::launch
