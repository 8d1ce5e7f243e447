#include "observe/export/prometheus.h"

#include "base/files.h"
#include "base/parse.h"
#include "base/result.h"
#include "net/http.h"
#include "telemetry/record.h"

#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <mutex>
#include <string_view>
#include <utility>

namespace cohort::track {
namespace {

constexpr std::string_view kOperations = "operations/";

std::string number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

/// Escapes a label's value: both formats have these three escapes.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out;
}

/// Writes family by family, each with its samples. The formats differ in the names with _total, and in the last line.
class Text {
 public:
  Text(PrometheusFormat format, std::string labels) : format_(format), labels_(std::move(labels)) {}

  void gauge(std::string_view name, std::string_view help, std::optional<double> value) {
    if (!value) return;
    family(name, "gauge", help);
    sample(name, "", *value);
  }
  void counter(std::string_view name, std::string_view help, double value) {
    counter_family(name, help);
    sample(fmt::format("{}_total", name), "", value);
  }
  void family(std::string_view name, std::string_view type, std::string_view help) {
    fmt::format_to(std::back_inserter(out_), "# HELP {0} {1}\n# TYPE {0} {2}\n", name, help, type);
  }
  void counter_family(std::string_view name, std::string_view help) {
    family(format_ == PrometheusFormat::Text ? fmt::format("{}_total", name) : std::string(name), "counter", help);
  }
  /// `label`: ",op=\"all_reduce\"", or empty.
  void sample(std::string_view name, std::string_view label, double value) {
    fmt::format_to(std::back_inserter(out_), "{}{{{}{}}} {}\n", name, labels_, label, number(value));
  }
  std::string text() && {
    if (format_ == PrometheusFormat::OpenMetrics) out_ += "# EOF\n";
    return std::move(out_);
  }

 private:
  PrometheusFormat format_;
  std::string labels_, out_;
};

}  // namespace

void PrometheusSink::take(const SinkLine& taken) {
  const RecordLine& line = taken.line;
  // Communication counts again when a step is repeated, since its cost was paid twice.
  if (line.event == "communication") add_communication(line);
  if (line.event == "start") {
    if (started_) ++totals_.restarts;
    started_ = true;
    state_ = RunState::Running;
    program_ = line.text("program");
    job_ = line.text("job");
    host_ = line.text("host");
    world_size_ = line.number("world_size");
  }
  if (taken.superseded) return;
  if (const auto step = line.number("step")) step_ = step;
  if (const auto epoch = line.number("epoch")) epoch_ = epoch;
  if (line.event != "resume" && line.event != "end" && !line.text("checkpoint").empty()) {
    checkpoint_step_ = line.number("step");
    checkpoint_time_ = line.time;
  }
  if (line.event == "communication") return;
  points_.read(line, [this](const MetricPoint& point) {
    if (point.name != "epoch") values_[{std::string(point.name), point.rank}] = point.value;
  });
}

void PrometheusSink::add_communication(const RecordLine& line) {
  const auto value = [&line](std::string_view name) {
    const double number = line.number(name).value_or(0);
    return number > 0 && std::isfinite(number) ? number : 0;  // a counter never falls
  };
  totals_.samples += value("samples");
  totals_.steps += value("steps");
  totals_.step_seconds += value("step_seconds");
  totals_.exposed_seconds += value("exposed_seconds");
  for (const RecordLine::Field& field : line.fields) {
    std::string_view name = field.name;
    if (!name.starts_with(kOperations)) continue;
    name.remove_prefix(kOperations.size());
    const std::size_t slash = name.rfind('/');
    if (slash == std::string_view::npos) continue;
    Operation& operation = totals_.operations[std::string(name.substr(0, slash))];
    const std::string_view what = name.substr(slash + 1);
    const double number = value(field.name);
    if (what == "count") operation.count += number;
    if (what == "bytes") operation.bytes += number;
    if (what == "seconds") operation.seconds += number;
    if (what == "waited_seconds") operation.waited += number;
    if (what == "failed") operation.failed += number;
  }
}

std::string PrometheusSink::text(PrometheusFormat format) const {
  std::string labels = fmt::format("job=\"{}\"", escaped(job_.empty() ? program_ : job_));
  if (!host_.empty()) labels += fmt::format(",host=\"{}\"", escaped(host_));
  Text page(format, labels);
  page.gauge("cohort_up", "Whether the run goes on.", started_ && state_ == RunState::Running ? 1 : 0);
  page.gauge("cohort_world_size", "Ranks of the run.", world_size_);
  page.counter("cohort_restarts", "How often the program was started again.", totals_.restarts);
  page.gauge("cohort_step", "Optimizer steps done.", step_);
  page.gauge("cohort_epoch", "Epochs done.", epoch_);
  page.gauge("cohort_last_checkpoint_step", "Step of the last checkpoint.", checkpoint_step_);
  page.gauge("cohort_last_checkpoint_timestamp_seconds", "When it was made, seconds since 1970.", checkpoint_time_);
  page.counter("cohort_samples", "Samples that all ranks have trained on.", totals_.samples);
  page.family("cohort_step_seconds", "summary", "Time of a step on rank 0.");
  page.sample("cohort_step_seconds_count", "", totals_.steps);
  page.sample("cohort_step_seconds_sum", "", totals_.step_seconds);
  page.counter("cohort_exposed_communication_seconds", "Waiting for gradients after backward had ended, on rank 0.",
               totals_.exposed_seconds);

  const auto of_operations = [&page, this](std::string_view name, std::string_view help, double Operation::*what) {
    if (totals_.operations.empty()) return;
    page.counter_family(name, help);
    for (const auto& [operation, values] : totals_.operations) {
      page.sample(fmt::format("{}_total", name), fmt::format(",op=\"{}\"", escaped(operation)), values.*what);
    }
  };
  of_operations("cohort_operations", "Collectives of rank 0.", &Operation::count);
  of_operations("cohort_failed_operations", "Collectives of rank 0 that failed.", &Operation::failed);
  of_operations("cohort_bytes", "Bytes of rank 0's collectives.", &Operation::bytes);
  of_operations("cohort_operation_seconds", "From call to end, on rank 0.", &Operation::seconds);
  of_operations("cohort_waited_seconds", "Of these: for other ranks to come.", &Operation::waited);

  if (!warnings_.empty()) page.counter_family("cohort_warnings", "What the launcher has warned of.");
  for (const auto& [kind, number] : warnings_) {
    page.sample("cohort_warnings_total", fmt::format(",kind=\"{}\"", escaped(kind)), number);
  }
  if (!values_.empty()) page.family("cohort_metric", "gauge", "The latest value of what the run has logged.");
  for (const auto& [key, value] : values_) {
    std::string label = fmt::format(",name=\"{}\"", escaped(key.first));
    if (key.second) label += fmt::format(",rank=\"{}\"", *key.second);
    page.sample("cohort_metric", label, value);
  }
  const auto alias = [&page, this](std::string_view family, std::string_view help,
                                   std::initializer_list<const char*> names) {
    for (const char* const name : names) {
      const auto found = values_.find({name, std::nullopt});
      if (found == values_.end()) continue;
      page.gauge(family, help, found->second);
      return;
    }
  };
  alias("cohort_loss", "The latest training loss.", {"train_loss", "loss"});
  alias("cohort_learning_rate", "The latest learning rate.", {"lr", "learning_rate"});
  return std::move(page).text();
}

bool PrometheusSink::count_warnings() {
  if (warnings_file_.empty()) return false;
  const auto content = sys::read_file(warnings_file_.string());
  if (!content) return false;  // most runs have no warnings
  std::map<std::string, double> counted;
  for (const RecordLine& line : parse_record(content->text()).events) {
    if (line.event == "warning") ++counted[std::string(line.text("kind"))];
  }
  return std::exchange(warnings_, counted) != counted;
}

void PrometheusSink::flush() {
  count_warnings();
  publish();
}

void PrometheusSink::idle() {
  if (count_warnings()) publish();
}

void PrometheusSink::finish(RunState state) {
  state_ = state;
  flush();
}

PrometheusFile::PrometheusFile(std::filesystem::path file, PrometheusFormat format)
    : file_(std::move(file)), format_(format) {
  if (file_.has_parent_path()) value_or_throw(sys::make_folders(file_.parent_path().string()));
}

void PrometheusFile::publish() { value_or_throw(sys::write_file_atomically(file_.string(), text(format_))); }

struct PrometheusPort::Page {
  std::mutex mutex;
  std::string plain, open;
  std::optional<net::HttpServer> server;  // its thread reads the members above

  net::HttpResponse answer(const net::HttpRequest& request) {
    if (request.path != "/metrics") return {.status = 404, .body = "/metrics is here\n"};
    const bool wants_open = net::preferred_type(request.accept, "text/plain", "application/openmetrics-text") == 1;
    const std::scoped_lock lock(mutex);
    return {.type = wants_open ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
                               : "text/plain; version=0.0.4; charset=utf-8",
            .body = wants_open ? open : plain};
  }
};

PrometheusPort::PrometheusPort(const net::Address& at, std::string token) : page_(std::make_unique<Page>()) {
  publish();  // so that no request gets an empty answer
  page_->server.emplace(net::HttpServerOptions{
      .at = at, .token = std::move(token), .handler = [page = page_.get()](const net::HttpRequest& request) {
        return page->answer(request);
      }});
}

PrometheusPort::~PrometheusPort() = default;

void PrometheusPort::publish() {
  std::string plain = text(PrometheusFormat::Text), open = text(PrometheusFormat::OpenMetrics);
  const std::scoped_lock lock(page_->mutex);
  page_->plain = std::move(plain);
  page_->open = std::move(open);
}

const net::Address& PrometheusPort::address() const noexcept { return page_->server->address(); }

}  // namespace cohort::track
