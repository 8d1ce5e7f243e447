#include "export/wandb.h"

#include "base/json.h"
#include "base/parse.h"
#include "base/result.h"
#include "export/wandb_run.py.h"
#include "net/http.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <fstream>
#include <map>
#include <string>
#include <utility>

namespace cohort::track {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr auto kWandbStartTime = std::chrono::minutes(5);  // the client imports wandb, and waits for its server
constexpr auto kWandbEndTime = std::chrono::hours(24);     // the client sends the rest; an impatient user ends this
                                                           // process
constexpr std::string_view kWandbParameters = "parameters/";

/// The id depends on the record's contents, not on its path.
std::string wandb_id(const std::filesystem::path& record) {
  std::ifstream file(record);
  std::string first;
  std::getline(file, first);
  return fmt::format("cohort-{:016x}", fnv1a(first));
}

OrderedJson wandb_config(const RecordLine& line) {
  OrderedJson config = OrderedJson::object();
  for (const RecordLine::Field& field : line.fields) {
    std::string name = field.name;
    if (name.starts_with(kWandbParameters))
      name.erase(0, kWandbParameters.size());
    else if (name != "program" && name != "world_size" && name != "host" && name != "job")
      continue;
    std::visit([&](const auto& value) { config[name] = value; }, field.value);
  }
  return config;
}

}  // namespace

void WandbSink::fail_with(const std::string& said) const {
  raise(ErrorCode::Unavailable,
        "writing to wandb failed -- {} -- the wandb of python3 in PATH is used (pip install wandb; WANDB_API_KEY, or "
        "WANDB_MODE=offline and `wandb sync` later)",
        said.empty() ? "python3 has ended" : net::as_line(said));
}

void WandbSink::open_run(const RecordLine& line) {
  OrderedJson init = {{"id", place_.run.empty() ? wandb_id(record_) : place_.run}, {"config", wandb_config(line)}};
  init["name"] = place_.name.empty() ? std::string(line.text("job")) : place_.name;
  for (const auto& [name, value] : {std::pair("project", &place_.project), std::pair("entity", &place_.entity),
                                    std::pair("group", &place_.group)}) {
    if (!value->empty()) init[name] = *value;
  }
  init["dir"] = std::filesystem::absolute(record_).parent_path().string();
  client_.emplace(kWandbRunProgram);
  (void)client_->say(json_text(init) + "\n");
  const std::string said = client_->line(kWandbStartTime);
  if (!said.starts_with("run ")) fail_with(said);
  if (say_) say_(fmt::format("wandb has the run at {}", said.substr(4)));
}

void WandbSink::take(const SinkLine& line) {
  if (!client_)
    open_run(line.line);
  else if (line.line.event == "start")
    lines_ += json_text(OrderedJson{{"config", wandb_config(line.line)}}) + "\n";
  if (line.superseded) return;
  std::string values;
  std::int64_t step = 0;
  points_.read(line.line, [&](const MetricPoint& point) {
    const std::string name = std::string(point.name) + (point.rank ? fmt::format("/rank{}", *point.rank) : "");
    // (Python reads NaN, Infinity and -Infinity.)
    values += fmt::format("{}{}: {}", values.empty() ? "" : ", ", json_text(OrderedJson(name)), text_of(point.value));
    step = point.step;
  });
  if (!values.empty()) lines_ += fmt::format("{{\"step\": {}, \"values\": {{{}}}}}\n", step, values);
  if (lines_.size() >= kAppendBuffer) flush();
}

void WandbSink::flush() {
  if (lines_.empty() || !client_) return;
  if (!client_->say(std::exchange(lines_, {}))) fail_with(client_->line(std::chrono::seconds(1)));
}

void WandbSink::finish(RunState state) {
  if (!client_) return;
  flush();
  // A run that is to continue, or was killed, is "preempting" in wandb's terms.
  const bool over = state == RunState::Finished || state == RunState::Failed;
  (void)client_->say(json_text(OrderedJson{{"end", state == RunState::Finished ? 0 : 1}, {"preempting", !over}}) +
                     "\n");
  const std::string said = client_->line(kWandbEndTime);
  if (said != "done" && !said.starts_with("done, ")) fail_with(said);
  if (said != "done" && say_)
    say_(fmt::format("wandb is {}; it takes no step before its last one", net::as_line(said)));
}

}  // namespace cohort::track
