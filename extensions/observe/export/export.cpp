#include "observe/export/export.h"

#include "base/files.h"
#include "base/json.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "net/http.h"
#include "observe/export/client_sink.h"
#include "observe/export/kubeflow.h"
#include "observe/export/prometheus.h"
#include "shared/destination.h"
#include "telemetry/record.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace cohort::track {
namespace {

// Writes a run record's values as a table with a row for each value (RFC 4180), for spreadsheets and pandas.

constexpr std::string_view kWritingCsv = "writing the CSV file";

void add_text(std::string& row, std::string_view text) {
  if (text.find_first_of("\",\r\n") == std::string_view::npos) {
    row += text;
    return;
  }
  row += '"';
  for (const char c : text) {
    row += c;
    if (c == '"') row += c;
  }
  row += '"';
}

/// Columns time, step, rank (empty: the whole run), name, value. Rows are appended whole; values that are not finite
/// are NaN, Infinity or -Infinity.
class CsvSink final : public Sink {
 public:
  /// Replaces the file. Throws Io.
  explicit CsvSink(std::filesystem::path file) : file_(std::move(file)) {
    std::error_code error;
    if (file_.has_parent_path()) std::filesystem::create_directories(file_.parent_path(), error);
    if (error) raise_io({-1, file_, kWritingCsv}, error.value());
    begin();
  }

  void take(const SinkLine& line) override {
    if (line.superseded) return;
    points_.read(line.line, [this](const MetricPoint& point) {
      fmt::format_to(std::back_inserter(rows_), "{:.3f},{},", point.time, point.step);
      if (point.rank) fmt::format_to(std::back_inserter(rows_), "{}", *point.rank);
      rows_ += ',';
      add_text(rows_, point.name);
      rows_ += ',' + text_of(point.value) + "\r\n";
    });
    if (rows_.size() >= kAppendBuffer) flush();
  }

  Replay go_back(std::int64_t /*step*/, double /*time*/) override {
    begin();
    return Replay::Yes;
  }

  void flush() override {
    append_all({fd_.get(), file_, kWritingCsv}, rows_);
    rows_.clear();
  }

  void finish(RunState /*state*/) override { flush(); }

 private:
  void begin() {
    fd_.reset(::open(file_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOCTTY, 0644));
    if (!fd_) raise_io({-1, file_, kWritingCsv}, errno);
    points_ = {};
    rows_ = "time,step,rank,name,value\r\n";
  }

  std::filesystem::path file_;
  sys::UniqueFd fd_;
  PointReader points_;
  std::string rows_;
};

using Clock = std::chrono::steady_clock;

constexpr auto kQuietAfterEnd = std::chrono::seconds(2);
constexpr int kKilledStatus = 128;  // this status or a higher one: ended by a signal

struct JobState {
  bool ended = false;
  RunState state = RunState::Running;
};

/// State of the job from the job.json beside the record; nullopt: there is none.
std::optional<JobState> job_state(const std::filesystem::path& record) {
  const auto text = sys::read_file((record.parent_path() / "job.json").string());
  if (!text) return std::nullopt;
  const auto job = parse_json_or_discard(text->text());
  if (!job.is_object()) return std::nullopt;
  JobState found;
  const auto status = job.find("exit_status");
  if (!job.contains("end") || status == job.end() || !status->is_number_integer()) return found;
  found.ended = true;
  const auto number = status->get<std::int64_t>();
  found.state = number == 0 ? RunState::Finished : number >= kKilledStatus ? RunState::Killed : RunState::Failed;
  return found;
}

class Export {
 public:
  explicit Export(const ExportRequest& request) : request_(request) {}

  ExportSummary run() {
    if (request_.wait) wait_for_record();
    if (request_.may_be_absent && !std::filesystem::exists(request_.record)) return summary_;
    follower_.emplace(request_.record);
    drain();
    if (request_.wait) follow();
    if (summary_.events == 0 && follower_->damaged() > 0) {
      raise(ErrorCode::Corrupt,
            "reading the run record failed -- {} -- none of its {} lines is an event -- is it a run record?",
            request_.record.string(), follower_->damaged());
    }
    summary_.damaged = follower_->damaged();
    summary_.state = state();
    request_.sink->finish(summary_.state);
    return summary_;
  }

 private:
  /// Waits for the record of a run that has just begun. If the run ends without one, the follower reports that.
  void wait_for_record() const {
    bool over = false;
    while (!over && !std::filesystem::exists(request_.record)) {
      const auto job = job_state(request_.record);
      over = request_.wait(request_.interval) || (job && job->ended);
    }
  }

  void follow() {
    Clock::time_point last_news = Clock::now();
    for (bool over = false; !over;) {
      over = request_.wait(request_.interval);
      // Gets the job's state before reading, since no line is written after the job has ended.
      const auto job = job_state(request_.record);
      if (drain()) last_news = Clock::now();
      over = over || (job ? job->ended : said_ && Clock::now() - last_news >= kQuietAfterEnd);
    }
  }

  /// Returns whether there were lines.
  bool drain() {
    bool any = false;
    // A writer may be faster than a sink, so lines written meanwhile are left for the next call, after a flush.
    std::error_code unknown;
    const std::uintmax_t end = std::filesystem::file_size(request_.record, unknown);
    while (follower_->offset() < end && follower_->next()) {
      any = true;
      const RecordLine& line = follower_->line();
      if (line.event == "resume" && !follower_->superseded() && goes_back(line)) {
        summary_ = {};
        last_step_ = std::numeric_limits<std::int64_t>::min();
        follower_.emplace(request_.record);
        continue;
      }
      ++summary_.events;
      if (!is_known_event(line.event)) ++summary_.unknown[line.event];
      summary_.superseded += follower_->superseded() ? 1 : 0;
      if (!follower_->superseded()) last_step_ = std::max(last_step_, line.integer("step").value_or(last_step_));
      if (line.event == "start" || line.event == "resume") said_.reset();
      if (line.event == "end") said_ = RunState::Finished;
      if (line.event == "preempted") said_ = RunState::Killed;
      request_.sink->take({line, follower_->superseded(), follower_->offset()});
    }
    if (any)
      request_.sink->flush();
    else
      request_.sink->idle();
    return any;
  }

  bool goes_back(const RecordLine& resume) {
    const std::int64_t step = resume.integer("step").value_or(0);
    if (step >= last_step_) return false;
    last_step_ = step;
    return request_.sink->go_back(step, resume.time.value_or(0)) == Sink::Replay::Yes;
  }

  RunState state() {
    if (said_) return *said_;
    if (const auto job = job_state(request_.record)) return job->state;
    // An export that stops following the run does not know how the run ends.
    summary_.without_end = !request_.wait;
    return summary_.without_end ? RunState::Killed : RunState::Running;
  }

  const ExportRequest& request_;
  std::optional<RecordFollower> follower_;
  ExportSummary summary_;
  std::optional<RunState> said_;  // state by the record's last lines
  std::int64_t last_step_ = std::numeric_limits<std::int64_t>::min();
};

std::unique_ptr<Sink> make_prometheus(const std::string& where, const SinkOptions& options) {
  const std::filesystem::path warnings = options.record.empty() ? "" : options.record.parent_path() / "warnings.jsonl";
  const auto at = port_of(where);
  if (!at) {
    auto file = std::make_unique<PrometheusFile>(
        where, options.openmetrics ? PrometheusFormat::OpenMetrics : PrometheusFormat::Text);
    file->count_warnings_of(warnings);
    return file;
  }
  auto port = std::make_unique<PrometheusPort>(
      *at, options.token_file.empty() ? std::string() : net::read_token_file(options.token_file));
  port->count_warnings_of(warnings);
  if (options.say) options.say(fmt::format("metrics are served at http://{}/metrics", net::to_string(port->address())));
  return port;
}

}  // namespace

std::unique_ptr<Sink> make_sink(const std::string& destination, const SinkOptions& options) {
  const auto [kind, where] = parts_of(destination);
  if (kind == "csv") return std::make_unique<CsvSink>(where);
  if (kind == "prometheus") return make_prometheus(where, options);
  if (kind == "kubeflow") return std::make_unique<KubeflowSink>(kubeflow_place({}), options.say);
  ClientSinkOptions client{Client::TensorBoard, {{"folder", where}}, options.record, options.patience};
  if (kind == "mlflow") {
    client.client = Client::Mlflow;
    client.place = mlflow_place(where, {});
  } else if (kind == "wandb") {
    client.client = Client::Wandb;
    client.place = wandb_place(where);
  }
  return std::make_unique<ClientSink>(client);
}

ExportSummary export_record(const ExportRequest& request) { return Export(request).run(); }

}  // namespace cohort::track
