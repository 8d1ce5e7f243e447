#include "export/mlflow.h"

#include "base/files.h"
#include "base/json.h"
#include "base/result.h"
#include "plot/curves.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <utility>

namespace cohort::track {
namespace {

using Json = nlohmann::ordered_json;
using Pairs = std::vector<std::pair<std::string, std::string>>;

// MLflow's limits for one request.
constexpr std::size_t kMostPoints = 1000, kMostPairs = 100, kLongestParameter = 6000, kLongestTag = 5000;
constexpr std::string_view kIntent = "cohort.export";
constexpr std::string_view kParameters = "parameters/";
constexpr auto kNever = std::chrono::steady_clock::time_point::min();

std::int64_t milliseconds_of(double seconds) { return static_cast<std::int64_t>(std::llround(seconds * 1000)); }

std::string url_encoded(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || std::string_view("-_.~/").find(c) != std::string_view::npos)
      out += c;
    else
      fmt::format_to(std::back_inserter(out), "%{:02X}", byte);
  }
  return out;
}

std::string found_text(const nlohmann::json& json, std::initializer_list<const char*> path) {
  const nlohmann::json* at = &json;
  for (const char* name : path) {
    const auto next = at->is_object() ? at->find(name) : at->end();
    if (!at->is_object() || next == at->end()) return {};
    at = &*next;
  }
  return at->is_string() ? at->get<std::string>() : "";
}

Json key_values(const Pairs& pairs, std::size_t begin) {
  Json out = Json::array();
  for (std::size_t i = begin; i < std::min(begin + kMostPairs, pairs.size()); ++i)
    out.push_back({{"key", pairs[i].first}, {"value", pairs[i].second}});
  return out;
}

std::string purpose(const MlflowPlace& place) {
  return fmt::format("{}?experiment={}&experiment_id={}&run={}&name={}", place.shown(), place.experiment,
                     place.experiment_id, place.run, place.run_name);
}

}  // namespace

MlflowSink::MlflowSink(MlflowSinkOptions options)
    : options_(std::move(options)), server_(options_.server), own_run_(options_.server.place.run.empty()) {
  if (own_run_) {
    experiment_ = find_experiment();
    return;
  }
  const std::string& run = options_.server.place.run;
  const auto answer = server_.get("mlflow/runs/get?run_id=" + url_encoded(run));
  if (!answer.good()) server_.refused(fmt::format("finding the run {} of MLflow", run), answer);
  experiment_ = found_text(body_of(answer), {"run", "info", "experiment_id"});
}

std::string MlflowSink::find_experiment() {
  const MlflowPlace& place = options_.server.place;
  if (!place.experiment_id.empty()) {
    const auto answer = server_.get("mlflow/experiments/get?experiment_id=" + url_encoded(place.experiment_id));
    if (!answer.good())
      server_.refused(fmt::format("finding the experiment {} of MLflow", place.experiment_id), answer);
    return place.experiment_id;
  }
  const std::string what = fmt::format("finding the experiment '{}' of MLflow", place.experiment);
  for (int tries = 0;; ++tries) {
    const auto found = server_.get("mlflow/experiments/get-by-name?experiment_name=" + url_encoded(place.experiment));
    const auto body = body_of(found);
    if (found.good()) {
      if (found_text(body, {"experiment", "lifecycle_stage"}) == "deleted") {
        raise(ErrorCode::Unavailable,
              "{} failed -- {} -- it was deleted -- restore it (mlflow experiments restore -x {}), "
              "or give another one",
              what, place.shown(), found_text(body, {"experiment", "experiment_id"}));
      }
      return found_text(body, {"experiment", "experiment_id"});
    }
    if (found.status != 404 && found.code != "RESOURCE_DOES_NOT_EXIST") server_.refused(what, found);
    const auto made = server_.post("mlflow/experiments/create", json_text(Json{{"name", place.experiment}}));
    if (made.good()) {
      if (std::string id = found_text(body_of(made), {"experiment_id"}); !id.empty()) return id;
    }
    // Another client has created the experiment meanwhile.
    if (!made.good() && (made.code != "RESOURCE_ALREADY_EXISTS" || tries > 0)) server_.refused(what, made);
  }
}

void MlflowSink::open_run(const RecordLine& line) {
  state_.emplace(options_.record, purpose(options_.server.place));
  MlflowProgress& progress = state_->progress;
  if (!own_run_) progress.run = options_.server.place.run;
  progress.experiment = experiment_;
  const bool is_known = !progress.run.empty();
  // An earlier export that created a run, and was killed before the answer, has left its tag on the run.
  if (progress.run.empty() && (progress.intent.empty() || !find_made_run())) make_run(line);
  state_->save();
  if (is_known && own_run_) {
    const auto answer = server_.get("mlflow/runs/get?run_id=" + url_encoded(progress.run));
    if (!answer.good()) {
      server_.refused(
          fmt::format("finding the run {} of MLflow, which {} names (without that file the record goes into "
                      "a new run)",
                      progress.run, state_->file().string()),
          answer);
    }
  }
  tell_where();
}

bool MlflowSink::find_made_run() {
  MlflowProgress& progress = state_->progress;
  const std::string filter = fmt::format("tags.`{}` = '{}'", kIntent, progress.intent);
  const auto answer = server_.post(
      "mlflow/runs/search", json_text(Json{{"experiment_ids", {experiment_}}, {"filter", filter}, {"max_results", 1}}));
  if (!answer.good()) server_.refused("searching the runs of MLflow", answer);
  const auto body = body_of(answer);
  if (!body.contains("runs") || !body["runs"].is_array() || body["runs"].empty()) return false;
  progress.run = found_text(body["runs"][0], {"info", "run_id"});
  return !progress.run.empty();
}

void MlflowSink::make_run(const RecordLine& line) {
  const MlflowPlace& place = options_.server.place;
  MlflowProgress& progress = state_->progress;
  if (progress.intent.empty()) {
    progress.intent = sys::random_hex(12);
    state_->save();
  }
  std::string name = place.run_name.empty() ? std::string(line.text("job")) : place.run_name;
  if (name.empty()) name = std::filesystem::absolute(options_.record).parent_path().filename();
  Pairs tags = {{std::string(kIntent), progress.intent}, {"mlflow.runName", name}};
  if (const char* user = std::getenv("USER"); user != nullptr && *user != '\0') tags.emplace_back("mlflow.user", user);
  const Json request = {{"experiment_id", experiment_},
                        {"run_name", name},
                        {"start_time", milliseconds_of(line.time.value_or(0))},
                        {"tags", key_values(tags, 0)}};
  // A lost answer must not lead to two runs.
  const auto answer = server_.post("mlflow/runs/create", json_text(request), [this] { return find_made_run(); });
  if (!answer.good()) server_.refused("making a run of MLflow", answer);
  if (progress.run.empty()) progress.run = found_text(body_of(answer), {"run", "info", "run_id"});
  if (progress.run.empty()) server_.refused("making a run of MLflow", answer);
}

void MlflowSink::set_status(std::string_view status, std::optional<std::int64_t> end) {
  Json request = {{"run_id", state_->progress.run}, {"status", status}};
  if (end) request["end_time"] = *end;
  const auto answer = server_.post("mlflow/runs/update", json_text(request));
  if (!answer.good()) server_.refused("setting the state of a run of MLflow", answer);
}

void MlflowSink::take(const SinkLine& given) {
  const RecordLine& line = given.line;
  if (!state_) {
    open_run(line);
    batch_end_ = state_->progress.offset;
  }
  const bool is_new = given.end > state_->progress.offset;
  if (line.time) last_time_ = milliseconds_of(*line.time);
  if (is_new && state_->progress.ended) {
    // The run goes on: it was resumed, or had not ended at the last export.
    if (own_run_) set_status("RUNNING", {});
    state_->progress.ended = false;
    state_->save();
  }
  if (line.event == "start") take_start(line, is_new);
  points_.read(line, [&](const MetricPoint& point) {
    if (is_new && !given.superseded) add(point);
  });
  if (is_new) batch_end_ = given.end;
}

void MlflowSink::take_start(const RecordLine& line, bool is_new) {
  Pairs parameters, changed;
  for (const RecordLine::Field& field : line.fields) {
    if (!field.name.starts_with(kParameters)) continue;
    parameters.emplace_back(mlflow_key(std::string_view(field.name).substr(kParameters.size())),
                            shortened(track::text_of(field), kLongestParameter));
  }
  if (starts_++ == 0) {
    parameters_.insert(parameters.begin(), parameters.end());
    if (!is_new) return;
    Pairs tags;
    for (const char* name : {"program", "host", "job"}) {
      if (const auto text = line.text(name); !text.empty()) tags.emplace_back(fmt::format("cohort.{}", name), text);
    }
    if (const auto size = line.integer("world_size")) tags.emplace_back("cohort.world_size", std::to_string(*size));
    set_tags(tags);
    return set_parameters(parameters);
  }
  // A parameter of MLflow never changes.
  for (auto& [name, value] : parameters) {
    const auto before = parameters_.find(name);
    if (before == parameters_.end() || before->second != value)
      changed.emplace_back(fmt::format("resume.{}.{}", starts_ - 1, name), value);
  }
  if (is_new) set_tags(changed);
}

void MlflowSink::set_parameters(const Pairs& parameters) {
  for (std::size_t begin = 0; begin < parameters.size(); begin += kMostPairs) {
    const auto set = [this](const Json& some) {
      return server_.post("mlflow/runs/log-batch", json_text(Json{{"run_id", state_->progress.run}, {"params", some}}));
    };
    const Json some = key_values(parameters, begin);
    auto answer = set(some);
    if (answer.good()) continue;
    if (answer.code != "INVALID_PARAMETER_VALUE") server_.refused("setting parameters of a run of MLflow", answer);
    // Another client has set some of these parameters to other values in this run: those stay, and ours become tags.
    for (const Json& one : some) {
      answer = set(Json::array({one}));
      if (!answer.good()) set_tags({{fmt::format("cohort.parameter.{}", one["key"].get<std::string>()), one["value"]}});
    }
  }
}

void MlflowSink::set_tags(const Pairs& tags) {
  for (std::size_t begin = 0; begin < tags.size(); begin += kMostPairs) {
    Json some = key_values(tags, begin);
    for (Json& one : some) {
      one["key"] = shortened(one["key"], 250);
      one["value"] = shortened(one["value"], kLongestTag);
    }
    const auto answer =
        server_.post("mlflow/runs/log-batch", json_text(Json{{"run_id", state_->progress.run}, {"tags", some}}));
    if (!answer.good()) server_.refused("setting tags of a run of MLflow", answer);
  }
}

const std::string& MlflowSink::key_of(const MetricPoint& point) {
  auto [found, is_new] = keys_.try_emplace({std::string(point.name), point.rank});
  if (is_new) {
    std::string name(point.name);
    if (point.rank) fmt::format_to(std::back_inserter(name), "/rank{}", *point.rank);
    found->second = json_text(Json(mlflow_key(name)));
  }
  return found->second;
}

void MlflowSink::add(const MetricPoint& point) {
  if (in_batch_ == kMostPoints) send();
  const char* const quote = std::isfinite(point.value) ? "" : "\"";
  fmt::format_to(std::back_inserter(batch_), R"({}{{"key":{},"timestamp":{},"step":{},"value":{}{}{}}})",
                 in_batch_ == 0 ? "" : ",", key_of(point), milliseconds_of(point.time), point.step, quote,
                 text_of(point.value), quote);
  ++in_batch_;
}

void MlflowSink::send_if_due() {
  const Clock::time_point now = Clock::now();
  if (state_ && batch_end_ > state_->progress.offset && (sent_ == kNever || now - sent_ >= options_.interval)) send();
}

void MlflowSink::send() {
  if (in_batch_ > 0) {
    const auto answer =
        server_.post("mlflow/runs/log-batch",
                     fmt::format(R"({{"run_id":{},"metrics":[{}]}})", json_text(Json(state_->progress.run)), batch_));
    if (!answer.good()) server_.refused("sending metrics to MLflow", answer);
  }
  batch_.clear();
  in_batch_ = 0;
  state_->progress.offset = std::max(state_->progress.offset, batch_end_);
  state_->save();
  sent_ = Clock::now();
}

void MlflowSink::finish(RunState state) {
  if (!state_) return;
  if (batch_end_ > state_->progress.offset) send();
  if (state == RunState::Running) return;
  MlflowProgress& progress = state_->progress;
  if (!progress.ended) {
    if (own_run_) {
      set_status(state == RunState::Finished ? "FINISHED"
                 : state == RunState::Failed ? "FAILED"
                                             : "KILLED",
                 last_time_);
    }
    progress.ended = true;
    progress.artifacts = false;
    state_->save();
  }
  if (progress.artifacts || !send_artifacts()) return;  // another export sends the files refused now
  progress.artifacts = true;
  state_->save();
}

bool MlflowSink::send_artifacts() {
  const auto answer = server_.get("mlflow/runs/get?run_id=" + url_encoded(state_->progress.run));
  if (!answer.good()) server_.refused("finding a run of MLflow", answer);
  std::string where = found_text(body_of(answer), {"run", "info", "artifact_uri"});
  constexpr std::string_view kThroughServer = "mlflow-artifacts:";
  if (!options_.server.place.store.empty()) where = fmt::format("{}/{}", kThroughServer, state_->progress.run);
  if (!where.starts_with(kThroughServer)) {
    options_.server.say(fmt::format(
        "the record is not among the artifacts of MLflow's run: they are at {}, and not the server's to take",
        where.substr(0, where.find('?'))));
    return true;
  }
  // "mlflow-artifacts:/1/RUN/artifacts", or with the server before it.
  std::string path = where.substr(kThroughServer.size());
  if (path.starts_with("//")) path.erase(0, std::min(path.find('/', 2), path.size()));
  path.erase(0, path.find_first_not_of('/'));
  const auto put = [&](const std::filesystem::path& file, std::string_view name) {
    const std::string to = fmt::format("mlflow-artifacts/artifacts/{}/{}", url_encoded(path), name);
    std::string reason;
    try {
      const auto done = server_.put_file(to, file);
      if (done.good()) return true;
      reason = fmt::format("{} {}", done.status, done.message);
    } catch (const Error& error) {
      reason = error.what();
    }
    options_.server.say(fmt::format(
        "MLflow does not take {} as an artifact of the run, whose values and state it has: {}", name, reason));
    return false;
  };
  if (!put(options_.record, "run.jsonl")) return false;
  const std::filesystem::path curves =
      std::filesystem::temp_directory_path() / fmt::format("cohort-curves-{}-{}.svg", ::getpid(), sys::random_hex(12));
  bool taken = true;
  try {
    plot(options_.record, curves);
    taken = put(curves, "curves.svg");
  } catch (const Error&) {  // a record without curves
  }
  std::error_code error;
  std::filesystem::remove(curves, error);
  return taken;
}

std::string MlflowSink::shown_run() const {
  const MlflowPlace& place = options_.server.place;
  if (!place.store.empty()) {
    return fmt::format("run {} of experiment {} in {}", state_->progress.run, experiment_, place.store);
  }
  return fmt::format("{}/{}experiments/{}/runs/{}", place.shown(), place.databricks ? "ml/" : "#/", experiment_,
                     state_->progress.run);
}

void MlflowSink::tell_where() const { options_.server.say("MLflow: " + shown_run()); }

}  // namespace cohort::track
