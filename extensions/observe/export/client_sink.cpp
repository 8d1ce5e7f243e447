#include "observe/export/client_sink.h"

#include "base/json.h"
#include "base/result.h"
#include "net/http.h"
#include "observe/export/client_run.py.h"
#include "observe/plot/curves.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <iterator>
#include <string_view>
#include <utility>
#include <variant>

namespace cohort::track {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr auto kClientTime = std::chrono::hours(24);  // for the rest to be sent; an impatient user ends this process
constexpr std::size_t kLongestError = 2000;
constexpr std::string_view kFailed = "failed: ";

struct Name {
  std::string_view kind, shown, remedy;
};
constexpr std::array<Name, 3> kNames = {{
    {"mlflow", "MLflow", "pip install mlflow; where there is a server, mlflow-skinny is enough"},
    {"tensorboard", "TensorBoard", "pip install tensorboard, or tensorboardX"},
    {"wandb", "wandb", "pip install wandb; WANDB_API_KEY, or WANDB_MODE=offline and `wandb sync` later"},
}};

const Name& name_of(Client client) { return kNames[static_cast<std::size_t>(client)]; }

OrderedJson fields_of(const RecordLine& line) {
  OrderedJson fields = OrderedJson::object();
  for (const RecordLine::Field& field : line.fields)
    std::visit([&](const auto& value) { fields[field.name] = value; }, field.value);
  return fields;
}

/// The record's curves as an SVG picture; empty for a record without curves.
std::string curves_of(const std::filesystem::path& record) {
  try {
    return render_svg(figure_of(series_of(read_run(record))));
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

ClientSink::ClientSink(const ClientSinkOptions& options)
    : client_(options.client),
      record_(options.record),
      limit_(options.patience + kClientTime),
      child_(kClientRunProgram) {
  OrderedJson to = options.place;
  to["client"] = name_of(client_).kind;
  to["record"] = std::filesystem::absolute(record_).string();
  to["patience"] = std::chrono::duration<double>(options.patience).count();
  chunk_ = json_text(to);
  ask();
}

void ClientSink::take(const SinkLine& line) {
  std::string values;
  MetricPoint last;
  points_.read(line.line, [&](const MetricPoint& point) {
    if (line.superseded) return;
    // (Python reads NaN, Infinity and -Infinity.)
    fmt::format_to(std::back_inserter(values), "{}{}:{}", values.empty() ? "" : ",", json_text(OrderedJson(point.name)),
                   text_of(point.value));
    last = point;
  });
  fmt::format_to(std::back_inserter(chunk_), "{{\"end\":{}", line.end);
  if (!values.empty()) {
    fmt::format_to(std::back_inserter(chunk_), ",\"time\":{},\"step\":{},\"values\":{{{}}}", last.time, last.step,
                   values);
    if (last.rank) fmt::format_to(std::back_inserter(chunk_), ",\"rank\":{}", *last.rank);
  } else if (line.line.time) {
    fmt::format_to(std::back_inserter(chunk_), ",\"time\":{}", *line.line.time);
  }
  if (line.line.event == "start") chunk_ += ",\"start\":" + json_text(fields_of(line.line));
  chunk_ += "}\n";
  if (chunk_.size() >= kAppendBuffer) ask();
}

Sink::Replay ClientSink::go_back(std::int64_t step, double time) {
  chunk_ += json_text(OrderedJson{{"back", step}, {"time", time}}) + "\n";
  return Replay::No;
}

void ClientSink::flush() {
  if (more_ || !chunk_.empty()) ask();
}

void ClientSink::finish(RunState state) {
  static constexpr std::array<std::string_view, 4> kStates = {"RUNNING", "FINISHED", "FAILED", "KILLED"};
  const bool wants_curves = client_ == Client::Mlflow && state != RunState::Running;
  chunk_ += json_text(OrderedJson{{"finish", kStates[static_cast<std::size_t>(state)]},
                                  {"curves", wants_curves ? curves_of(record_) : std::string()}}) +
            "\n";
  ask();
}

void ClientSink::ask() {
  chunk_ += '\n';
  const bool is_sent = child_.say(std::exchange(chunk_, {}));
  const std::string said =
      child_.line(is_sent ? limit_ : std::chrono::seconds(1));  // the last line says why it has ended
  more_ = said == "more";
  if (more_ || said == "ok") return;
  if (said.starts_with(kFailed))
    raise(ErrorCode::Unavailable, "{}", net::as_line(said.substr(kFailed.size()), kLongestError));
  const Name& name = name_of(client_);
  raise(ErrorCode::Unavailable, "writing to {0} failed -- {1} -- the {0} of python3 in PATH is used ({2})", name.shown,
        said.empty() ? "python3 has ended" : net::as_line(said, kLongestError), name.remedy);
}

}  // namespace cohort::track
