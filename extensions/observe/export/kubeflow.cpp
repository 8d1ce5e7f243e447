#include "observe/export/kubeflow.h"

#include "base/files.h"
#include "base/json.h"
#include "base/result.h"
#include "net/http.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <httplib.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <ctime>
#include <utility>

namespace cohort::track {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kControllerTime = std::chrono::seconds(3);

}  // namespace

std::string kubeflow_status(const RunProgress& progress, double now) {
  nlohmann::ordered_json status = nlohmann::ordered_json::object();
  if (const auto done = progress.done()) status["progressPercentage"] = static_cast<int>(std::floor(*done * 100));
  if (const auto left = progress.remaining_seconds(); left && *left < 1e9)
    status["estimatedRemainingSeconds"] = static_cast<std::int64_t>(std::ceil(*left));
  auto metrics = nlohmann::ordered_json::array();
  for (const auto& [name, value] : progress.values()) metrics.push_back({{"name", name}, {"value", text_of(value)}});
  status["metrics"] = std::move(metrics);
  status["lastUpdatedTime"] = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(static_cast<std::time_t>(now)));
  return json_text(nlohmann::ordered_json{{"trainerStatus", std::move(status)}});
}

struct KubeflowSink::Client {
  explicit Client(KubeflowPlace at) : place(std::move(at)), http(place.server) {
    http.set_connection_timeout(kControllerTime);
    http.set_read_timeout(kControllerTime);
    http.set_write_timeout(kControllerTime);
    if (!place.certificates.empty()) http.set_ca_cert_path(place.certificates);
  }

  /// Posts `body`; returns the error, or an empty text.
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
