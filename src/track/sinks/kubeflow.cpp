#include "track/sinks/kubeflow.h"

#include "base/result.h"
#include "net/http.h"
#include "sys/files.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <httplib.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <initializer_list>
#include <utility>

namespace cohort::track {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kAnswerTime = std::chrono::seconds(3);
constexpr std::size_t kMostValues = 64;

std::optional<double> parameter(const RecordLine& line, std::initializer_list<const char*> names) {
  for (const char* const name : names) {
    const auto value = line.number(fmt::format("parameters/{}", name));
    if (value && *value > 0 && std::isfinite(*value)) return value;
  }
  return std::nullopt;
}

std::optional<double> share(std::optional<double> part, std::optional<double> whole) {
  if (!part || !whole || !std::isfinite(*part)) return std::nullopt;
  return std::clamp(*part / *whole, 0.0, 1.0);
}

std::string text_of(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return fmt::format("{}", value);
}

}  // namespace

void RunProgress::take(const RecordLine& line) {
  time_ = line.time.value_or(time_);
  if (line.event == "start") {
    epochs_ = parameter(line, {"epochs", "num_epochs", "max_epochs"});
    steps_ = parameter(line, {"steps", "max_steps", "total_steps", "num_steps"});
    first_done_.reset();
    ended_ = false;
  }
  if (line.event == "end") ended_ = true;
  if (const auto step = line.number("step")) step_ = step;
  if (const auto epoch = line.number("epoch")) epoch_ = epoch;
  if (const auto epoch = line.number("values/epoch")) epoch_ = epoch;
  points_.read(line, [this](const MetricPoint& point) {
    if (point.rank || point.name == "epoch" || point.name.starts_with("communication/")) return;
    const auto known = values_.find(point.name);
    if (known != values_.end()) {
      known->second = point.value;
    } else if (values_.size() < kMostValues) {
      values_.emplace(point.name, point.value);
    }
  });
  const auto now = done();
  if (now && !first_done_ && line.event != "start") {
    first_done_ = now;
    first_time_ = time_;
  }
}

std::optional<double> RunProgress::done() const {
  if (ended_) return 1;
  if (const auto by_epoch = share(epoch_, epochs_)) return by_epoch;
  return share(step_, steps_);
}

std::optional<double> RunProgress::remaining_seconds() const {
  const auto now = done();
  if (!now) return std::nullopt;
  if (*now >= 1) return 0;
  if (!first_done_ || *now <= *first_done_ || time_ <= first_time_) return std::nullopt;
  return (1 - *now) * (time_ - first_time_) / (*now - *first_done_);
}

std::string kubeflow_status(const RunProgress& progress, double now) {
  nlohmann::ordered_json status = nlohmann::ordered_json::object();
  if (const auto done = progress.done()) status["progressPercentage"] = static_cast<int>(std::floor(*done * 100));
  if (const auto left = progress.remaining_seconds(); left && *left < 1e9)
    status["estimatedRemainingSeconds"] = static_cast<std::int64_t>(std::ceil(*left));
  auto metrics = nlohmann::ordered_json::array();
  for (const auto& [name, value] : progress.values()) metrics.push_back({{"name", name}, {"value", text_of(value)}});
  status["metrics"] = std::move(metrics);
  status["lastUpdatedTime"] = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(static_cast<std::time_t>(now)));
  return nlohmann::ordered_json{{"trainerStatus", std::move(status)}}.dump(
      -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

KubeflowPlace kubeflow_place(const env::Source& variables) {
  const std::string address = env::text(env::kKubeflowServer, variables);
  const std::size_t scheme = address.find("://");
  const std::size_t slash = scheme == std::string::npos ? scheme : address.find('/', scheme + 3);
  if (slash == std::string::npos || (!address.starts_with("https://") && !address.starts_with("http://"))) {
    raise(ErrorCode::InvalidArgument,
          "telling Kubeflow of the run failed -- {} is '{}' -- the address that its trainer sets (2.2, with the gate "
          "TrainJobStatus) is wanted: https://HOST:PORT/PATH",
          env::kKubeflowServer, address);
  }
  return {.server = address.substr(0, slash),
          .path = address.substr(slash),
          .certificates = env::text(env::kKubeflowCertificates, variables),
          .token_file = env::text(env::kKubeflowToken, variables)};
}

struct KubeflowSink::Client {
  explicit Client(KubeflowPlace at) : place(std::move(at)), http(place.server) {
    http.set_connection_timeout(kAnswerTime);
    http.set_read_timeout(kAnswerTime);
    http.set_write_timeout(kAnswerTime);
    if (!place.certificates.empty()) http.set_ca_cert_path(place.certificates);
  }

  /// Empty, or what is wrong.
  std::string post(const std::string& body) {
    httplib::Headers headers;
    if (!place.token_file.empty()) {
      const auto file = sys::read_file(place.token_file);
      if (!file) return file.error().what();
      std::string_view token = file->text();
      while (!token.empty() && (token.back() == '\n' || token.back() == '\r')) token.remove_suffix(1);
      headers.emplace("Authorization", fmt::format("Bearer {}", token));
    }
    const httplib::Result result = http.Post(place.path, headers, body, "application/json");
    if (!result) return httplib::to_string(result.error());
    if (result->status >= 200 && result->status < 300) return {};
    return fmt::format("it answers {}: {}", result->status, net::as_line(result->body));
  }

  KubeflowPlace place;
  httplib::Client http;
};

KubeflowSink::KubeflowSink(KubeflowPlace place, std::function<void(const std::string&)> say,
                           std::chrono::milliseconds interval)
    : say_(std::move(say)), interval_(interval), client_(std::make_unique<Client>(std::move(place))) {}

KubeflowSink::~KubeflowSink() = default;

void KubeflowSink::take(const SinkLine& taken) {
  if (taken.superseded) return;
  progress_.take(taken.line);
  news_ = true;
}

Sink::Replay KubeflowSink::go_back(std::int64_t /*step*/, double /*time*/) { return Replay::No; }

void KubeflowSink::flush() {
  if (news_ && Clock::now() >= next_) post();
}

void KubeflowSink::post() {
  news_ = false;
  next_ = Clock::now() + interval_;
  const auto now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const std::string wrong = client_->post(kubeflow_status(progress_, now));
  if (wrong.empty()) {
    if (std::exchange(complained_, false) && say_) say_("Kubeflow's server takes the run's progress again");
  } else if (!std::exchange(complained_, true) && say_) {
    say_(fmt::format("Kubeflow is not told of the run's progress: {}: {} -- the run goes on", client_->place.server,
                     wrong));
  }
}

void KubeflowSink::finish(RunState) {
  if (news_) post();
}

}  // namespace cohort::track
