#include <cohort/track.h>

#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace cohort::track {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBarWidth = 24;
constexpr std::string_view kClearLine = "\r\x1b[2K";

std::string clock_text(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e7) return "-:--";
  const auto whole = static_cast<std::int64_t>(seconds + 0.5);
  if (whole >= 3600) return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string speed_text(double speed) {
  if (!std::isfinite(speed)) return "-";
  return speed < 10 ? fmt::format("{:.2g}", speed) : fmt::format("{:.0f}", speed);
}

}  // namespace

struct Progress::Impl {
  ProgressOptions options;
  bool terminal = false;
  bool drawn = false;  // a bar stands on the terminal's last line
  bool finished = false;
  std::chrono::milliseconds interval{0};

  std::int64_t step = 0;
  double loss = 0;
  // The interval that is being measured: training time alone, skipped time cut out.
  std::int64_t samples = 0;
  double busy = 0;
  Clock::time_point resumed = Clock::now(), last_drawing = resumed;
  // For the time left: the mean over the whole run.
  std::int64_t all_steps = 0;
  double all_busy = 0;
  double speed = 0;

  std::int64_t per_epoch() const { return std::max<std::int64_t>(options.steps_per_epoch, 1); }
  /// Where an epoch would have begun whose steps were all this run's: step + `shift` counts from there.
  std::int64_t shift() const {
    if (!options.steps_left_in_first_epoch) return 0;
    return (options.first_epoch + 1) * per_epoch() - *options.steps_left_in_first_epoch - options.first_step;
  }
  std::int64_t total() const { return options.steps_per_epoch * options.epochs - shift(); }

  void clear() {
    if (drawn) std::fwrite(kClearLine.data(), 1, kClearLine.size(), options.stream);
    drawn = false;
  }

  void draw() {
    if (busy > 0) speed = static_cast<double>(samples) / busy;
    const std::int64_t epoch = std::min((std::max<std::int64_t>(step + shift(), 1) - 1) / per_epoch() + 1,
                                        std::max<std::int64_t>(options.epochs, 1));
    const double per_step = all_steps > 0 ? all_busy / static_cast<double>(all_steps) : 0;
    const double left = per_step * static_cast<double>(std::max<std::int64_t>(total() - step, 0));
    const std::string figures = fmt::format("epoch {}/{}  step {}/{}  loss {:.4f}  {} samples/s  {} left", epoch,
                                            options.epochs, step, total(), loss, speed_text(speed), clock_text(left));
    if (terminal) {
      const double share = total() > 0 ? std::min(1.0, static_cast<double>(step) / static_cast<double>(total())) : 0;
      const auto full = static_cast<int>(share * kBarWidth);
      std::string bar;
      for (int i = 0; i < kBarWidth; ++i) bar += i < full ? "━" : "─";
      fmt::print(options.stream, "{}{} {:3.0f} %  {}", kClearLine, bar, share * 100, figures);
      drawn = true;
    } else {
      fmt::print(options.stream, "{}\n", figures);
    }
    std::fflush(options.stream);
    samples = 0;
    busy = 0;
    last_drawing = Clock::now();
  }

  void count(std::int64_t new_samples) {
    const Clock::time_point now = Clock::now();
    const double passed = std::chrono::duration<double>(now - resumed).count();
    busy += passed;
    all_busy += passed;
    samples += new_samples;
    ++all_steps;
    resumed = now;
  }
};

Progress::Progress(const ProgressOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
  impl_->step = options.first_step;
  impl_->terminal = options.terminal.value_or(::isatty(::fileno(options.stream)) == 1);
  impl_->interval = options.interval.value_or(std::chrono::milliseconds(impl_->terminal ? 100 : 2000));
}

Progress::~Progress() { finish(); }

void Progress::update(std::int64_t step, double loss, std::int64_t samples) {
  if (impl_->finished) return;
  impl_->step = step;
  impl_->loss = loss;
  impl_->count(samples);
  if (Clock::now() - impl_->last_drawing >= impl_->interval) impl_->draw();
}

void Progress::skip_time() { impl_->resumed = Clock::now(); }

void Progress::line(std::string_view text) {
  impl_->clear();
  fmt::print(impl_->options.stream, "{}\n", text);
  std::fflush(impl_->options.stream);
}

void Progress::finish() {
  if (impl_->finished) return;
  impl_->clear();
  std::fflush(impl_->options.stream);
  impl_->finished = true;
}

}  // namespace cohort::track
