#include "base/env.h"
#include "base/json.h"
#include "base/log.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "telemetry/record.h"
#include "telemetry/status_page.h"

#include <cohort/digest.h>
#include <cohort/track.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <map>
#include <mutex>

namespace cohort::track {
namespace {

// ordered_json puts "event" and "time" first, for people who read these lines.
using OrderedJson = nlohmann::ordered_json;

constexpr int kSchema = 1;

double unix_seconds(std::chrono::system_clock::time_point time = std::chrono::system_clock::now()) {
  const auto now = time.time_since_epoch();
  return static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count()) / 1000.0;
}

double seconds(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

OrderedJson to_json(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

OrderedJson to_json(const Value& value) {
  return std::visit(
      [](const auto& held) -> OrderedJson {
        if constexpr (std::is_same_v<std::decay_t<decltype(held)>, double>)
          return to_json(held);
        else
          return held;
      },
      value.get());
}

void add(OrderedJson& line, const Fields& fields) {
  for (const auto& [name, value] : fields) line[name] = to_json(value);
}

std::string line_of(const OrderedJson& line) {
  // Text that is not UTF-8 is replaced, since it must not stop a training run.
  return json_text(line) + "\n";
}

/// Notes the first non-finite loss on the rank's status page, from which the launcher warns.
void look_at_loss(std::string_view name, double value, std::int64_t step) {
  const bool is_loss = name.find("loss") != name.npos || name.find("Loss") != name.npos;
  if (std::isfinite(value) || !is_loss) return;
  status::StatusPage::own().note_not_finite(fmt::format("{} is {}", name,
                                                        std::isnan(value) ? "NaN"
                                                        : value > 0       ? "infinite"
                                                                          : "-infinite"),
                                            step);
}

void look_at_losses(const Fields& fields) {
  std::int64_t step = 0;
  for (const auto& [name, value] : fields) {
    if (const auto* const number = std::get_if<std::int64_t>(&value.get()); number != nullptr && name == "step")
      step = *number;
  }
  for (const auto& [name, value] : fields) {
    if (const auto* const number = std::get_if<double>(&value.get())) look_at_loss(name, *number, step);
  }
}

struct OperationTotals {
  std::int64_t count = 0, failed = 0, zero_copy = 0;
  std::uint64_t bytes = 0;
  std::chrono::nanoseconds time{0}, waited{0};
};

struct Totals {
  std::map<std::string, OperationTotals, std::less<>> operations;
  std::int64_t steps = 0, samples = 0, buckets = 0;
  double step_seconds = 0, exposed_seconds = 0;
};

/// Returns the offset at which the last whole line ends.
off_t end_of_last_line(int fd, off_t size) {
  char bytes[4096];
  while (size > 0) {
    const off_t begin = size > static_cast<off_t>(sizeof bytes) ? size - static_cast<off_t>(sizeof bytes) : 0;
    const ssize_t got = ::pread(fd, bytes, static_cast<std::size_t>(size - begin), begin);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return -1;
    for (ssize_t i = got; i > 0; --i) {
      if (bytes[i - 1] == '\n') return begin + i;
    }
    size = begin;
  }
  return 0;
}

}  // namespace

struct RunRecord::Impl {
  std::filesystem::path file;
  std::mutex write_mutex;
  sys::UniqueFd fd;

  // Separate from write_mutex, so that a progress thread never waits for the disk.
  std::mutex totals_mutex;
  Totals totals;

  [[noreturn]] void fail_with(std::string_view what, int error) const { raise_io({-1, file, what}, error); }

  void open() {
    if (file.has_parent_path()) {
      std::error_code error;
      std::filesystem::create_directories(file.parent_path(), error);
      if (error) fail_with("making the folder of the run record", error.value());
    }
    // Readable by this user only, like job.json, since programs log all of their parameters.
    fd.reset(::open(file.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    if (!fd) fail_with("opening the run record", errno);
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      raise(ErrorCode::Unavailable,
            "opening the run record failed -- {} -- another process is writing to it -- give this run a folder of its "
            "own",
            file.string());
    }
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0) fail_with("opening the run record", errno);
    if (!S_ISREG(status.st_mode)) return;
    const off_t whole = end_of_last_line(fd.get(), status.st_size);
    if (whole < 0) fail_with("reading the run record", errno);
    if (whole < status.st_size) {
      log::warn("track", "{}: its last line is torn (an earlier process was killed while writing); cut off {} bytes",
                file.string(), static_cast<std::int64_t>(status.st_size - whole));
      if (::ftruncate(fd.get(), whole) != 0) fail_with("cutting off the run record's torn line", errno);
    }
  }

  void append(const OrderedJson& line) { append(line_of(line)); }
  void append(const std::string& text) {
    const std::scoped_lock lock(write_mutex);
    append_all({fd.get(), file, "writing to the run record"}, text);
  }
};

std::filesystem::path run_folder() { return env::get(env::kRunDir).value_or(""); }

RunRecord::RunRecord(const std::filesystem::path& file, const RunRecordOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->file = file;
  impl_->open();
  OrderedJson line = {{"event", "start"},           {"time", unix_seconds()},           {"schema", kSchema},
                      {"program", options.program}, {"world_size", options.world_size}, {"pid", ::getpid()}};
  char host[256] = {};
  if (::gethostname(host, sizeof host - 1) == 0) line["host"] = host;
  if (const auto job = env::get(env::kJobId)) line["job"] = *job;
  OrderedJson parameters = OrderedJson::object();
  add(parameters, options.parameters);
  line["parameters"] = std::move(parameters);
  impl_->append(line);
}

RunRecord::~RunRecord() = default;

const std::filesystem::path& RunRecord::file() const noexcept { return impl_->file; }

void RunRecord::write(std::string_view event, const Fields& fields) {
  OrderedJson line = {{"event", event}, {"time", unix_seconds()}};
  add(line, fields);
  look_at_losses(fields);
  impl_->append(line);
}

void RunRecord::write_communication() {
  Totals totals;
  {
    const std::scoped_lock lock(impl_->totals_mutex);
    totals = std::exchange(impl_->totals, Totals());
  }
  if (totals.operations.empty() && totals.steps == 0) return;
  OrderedJson line = {{"event", "communication"},
                      {"time", unix_seconds()},
                      {"steps", totals.steps},
                      {"samples", totals.samples},
                      {"step_seconds", totals.step_seconds},
                      {"exposed_seconds", totals.exposed_seconds},
                      {"buckets", totals.buckets}};
  OrderedJson operations = OrderedJson::object();
  for (const auto& [name, operation] : totals.operations) {
    operations[name] = {{"count", operation.count},           {"bytes", operation.bytes},
                        {"seconds", seconds(operation.time)}, {"waited_seconds", seconds(operation.waited)},
                        {"zero_copy", operation.zero_copy},   {"failed", operation.failed}};
  }
  line["operations"] = std::move(operations);
  impl_->append(line);
}

void RunRecord::write_metrics(std::span<const MetricLine> lines) {
  std::string text;
  for (const MetricLine& metric : lines) {
    OrderedJson line = {{"event", "metric"}, {"time", unix_seconds(metric.time)}, {"step", metric.step}};
    if (metric.rank) line["rank"] = *metric.rank;
    OrderedJson values = OrderedJson::object();
    for (const auto& [name, value] : metric.values) {
      values[name] = to_json(value);
      look_at_loss(name, value, metric.step);
    }
    line["values"] = std::move(values);
    text += line_of(line);
  }
  if (!text.empty()) impl_->append(text);
}

namespace {

/// All runs have the same key, since they are compared with each other: the first 256 bits of pi's fraction. A key with
/// a pattern would let different bytes have one digest.
constexpr DigestKey kWeightsKey = {0x24, 0x3F, 0x6A, 0x88, 0x85, 0xA3, 0x08, 0xD3, 0x13, 0x19, 0x8A,
                                   0x2E, 0x03, 0x70, 0x73, 0x44, 0xA4, 0x09, 0x38, 0x22, 0x29, 0x9F,
                                   0x31, 0xD0, 0x08, 0x2E, 0xFA, 0x98, 0xEC, 0x4E, 0x6C, 0x89};

std::string weights_digest(ConstBuffer values) {
  const Digest digest = cohort::digest_of(values, kWeightsKey);
  return fmt::format("{:016x}{:016x}", digest[0], digest[1]);
}

}  // namespace

void RunRecord::write_weights(std::int64_t step, std::span<const Weight> weights) {
  OrderedJson tensors = OrderedJson::object();
  std::map<std::string, std::string> by_name;
  for (const Weight& weight : weights) {
    if (weight.values.device.type != DeviceType::CPU)
      raise(ErrorCode::InvalidArgument, "write_weights: '{}' is on a GPU -- give a copy in host memory", weight.name);
    const std::string name(weight.name), digest = weights_digest(weight.values);
    if (!by_name.emplace(name, digest).second)
      raise(ErrorCode::InvalidArgument, "write_weights: two tensors are called '{}'", name);
    tensors[name] = digest;
  }
  std::string all;
  for (const auto& [name, digest] : by_name) all.append(name).append(digest);
  impl_->append(OrderedJson{
      {"event", "weights"},
      {"time", unix_seconds()},
      {"step", step},
      {"digest", weights_digest(ConstBuffer(all.data(), static_cast<std::int64_t>(all.size()), DType::UInt8))},
      {"tensors", std::move(tensors)}});
}

void RunRecord::on_collective(const CollectiveEvent& event) {
  const std::scoped_lock lock(impl_->totals_mutex);
  auto found = impl_->totals.operations.find(event.operation);
  if (found == impl_->totals.operations.end()) {
    found = impl_->totals.operations.emplace(std::string(event.operation), OperationTotals()).first;
  }
  OperationTotals& totals = found->second;
  ++totals.count;
  totals.failed += event.failed ? 1 : 0;
  totals.zero_copy += event.zero_copy ? 1 : 0;
  totals.bytes += event.bytes;
  totals.time += event.ended - event.called;
  totals.waited += event.waited;
}

void RunRecord::on_bucket_ready(const BucketEvent&) {
  const std::scoped_lock lock(impl_->totals_mutex);
  ++impl_->totals.buckets;
}

void RunRecord::on_step(const StepEvent& event) {
  const std::scoped_lock lock(impl_->totals_mutex);
  ++impl_->totals.steps;
  impl_->totals.samples += event.samples;
  impl_->totals.step_seconds += event.seconds;
  impl_->totals.exposed_seconds += event.exposed_communication_seconds;
}

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
  bool drawn = false;  // the terminal's last line shows a bar
  bool finished = false;
  std::chrono::milliseconds interval{0};

  std::int64_t step = 0;
  double loss = 0;
  // The interval whose speed is measured: training time only, without skipped time.
  std::int64_t samples = 0;
  double busy = 0;
  Clock::time_point resumed = Clock::now(), last_drawing = resumed;
  // The mean over the whole run, for the remaining time.
  std::int64_t all_steps = 0;
  double all_busy = 0;
  double speed = 0;

  std::int64_t per_epoch() const { return std::max<std::int64_t>(options.steps_per_epoch, 1); }
  /// Returns the offset such that step + shift() is the position if all epochs have this run's number of steps.
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
