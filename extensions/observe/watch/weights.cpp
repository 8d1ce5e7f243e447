#include "observe/watch/weights.h"

#include "base/json.h"
#include "base/result.h"
#include "launch/output/text.h"
#include "telemetry/record.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <span>
#include <utility>

namespace cohort::watch {
namespace {

namespace fs = std::filesystem;
using Tensors = std::vector<std::pair<std::string, std::string>>;  // name and digest, in the record's order

constexpr std::string_view kTensors = "tensors/";
constexpr std::size_t kShown = 5;

void each_weights(const fs::path& record, const std::function<void(std::int64_t, const track::RecordLine&)>& take) {
  track::RecordFollower lines(record);
  while (lines.next()) {
    const track::RecordLine& line = lines.line();
    if (line.event != "weights" || lines.superseded() || line.text("digest").empty()) continue;
    if (const auto step = line.integer("step")) take(*step, line);
  }
}

std::map<std::int64_t, std::string> digests_of(const fs::path& record) {
  std::map<std::int64_t, std::string> digests;
  each_weights(record, [&](std::int64_t step, const track::RecordLine& line) { digests[step] = line.text("digest"); });
  if (digests.empty()) {
    raise(ErrorCode::Unavailable, "{} has no digests of weights -- RunRecord::write_weights writes them at each step",
          record.string());
  }
  return digests;
}

Tensors tensors_at(const fs::path& record, std::int64_t step) {
  Tensors tensors;
  each_weights(record, [&](std::int64_t its_step, const track::RecordLine& line) {
    if (its_step != step) return;
    tensors.clear();
    for (const track::RecordLine::Field& field : line.fields) {
      const auto* const digest = std::get_if<std::string>(&field.value);
      if (digest != nullptr && field.name.starts_with(kTensors))
        tensors.emplace_back(field.name.substr(kTensors.size()), *digest);
    }
  });
  return tensors;
}

/// Fills in what differs at a step.
void compare_tensors(const Tensors& one, const Tensors& other, WeightsComparison& comparison) {
  const std::map<std::string, std::string> mine(one.begin(), one.end()), theirs(other.begin(), other.end());
  for (const auto& [name, digest] : one) {
    const auto found = theirs.find(name);
    if (found == theirs.end()) {
      comparison.missing.push_back(name);
    } else {
      ++comparison.tensors;
      if (found->second != digest) comparison.names.push_back(name);
    }
  }
  for (const auto& [name, digest] : other) {
    if (!mine.contains(name)) comparison.missing.push_back(name);
  }
}

/// Returns the first names, without characters that a terminal obeys.
std::string listed(const std::vector<std::string>& names) {
  const std::size_t more = names.size() - std::min(kShown, names.size());
  const std::string shown = fmt::format("{}", fmt::join(std::span(names).first(names.size() - more), ", "));
  return launch::plain(shown) + (more == 0 ? "" : fmt::format(" and {} more", more));
}

}  // namespace

WeightsComparison compare_weights(const fs::path& one, const fs::path& other) {
  const fs::path records[] = {track::record_of(one), track::record_of(other)};
  const auto mine = digests_of(records[0]), theirs = digests_of(records[1]);
  WeightsComparison comparison;
  for (const auto& [step, digest] : mine) {
    const auto found = theirs.find(step);
    if (found == theirs.end()) continue;
    if (comparison.steps++ == 0) comparison.first = step;
    comparison.last = step;
    if (comparison.differ) continue;
    (found->second == digest ? comparison.equal_until : comparison.differ) = step;
  }
  if (comparison.steps == 0) {
    raise(ErrorCode::InvalidArgument,
          "the runs have digests of no step in common -- {} of steps {} to {}, {} of {} to {}", records[0].string(),
          mine.begin()->first, mine.rbegin()->first, records[1].string(), theirs.begin()->first,
          theirs.rbegin()->first);
  }
  if (!comparison.differ) return comparison;
  compare_tensors(tensors_at(records[0], *comparison.differ), tensors_at(records[1], *comparison.differ), comparison);
  if (comparison.tensors == 0) {
    raise(ErrorCode::InvalidArgument,
          "the runs have no tensor in common at step {}, but {} -- give both the names of the same module (a wrapper's "
          "begin with \"module.\")",
          *comparison.differ, listed(comparison.missing));
  }
  return comparison;
}

std::string to_text(const WeightsComparison& comparison) {
  if (!comparison.differ) {
    return fmt::format("the weights are equal to the bit at every step that both runs have ({} of them, {} to {})\n",
                       comparison.steps, comparison.first, comparison.last);
  }
  std::string text = fmt::format(
      "the weights {}{}: {} of {} tensors differ",
      comparison.equal_until ? fmt::format("are equal to the bit until step {}, not at ", *comparison.equal_until)
                             : "differ from the first step that both runs have, ",
      *comparison.differ, comparison.names.size(), comparison.tensors);
  if (!comparison.names.empty()) text += ", " + listed(comparison.names);
  if (!comparison.missing.empty()) text += "; one run alone has " + listed(comparison.missing);
  return text + "\n";
}

std::string to_json(const WeightsComparison& comparison) {
  nlohmann::ordered_json all = {{"equal", !comparison.differ.has_value()},
                                {"steps", comparison.steps},
                                {"first", comparison.first},
                                {"last", comparison.last}};
  if (comparison.equal_until) all["equal_until"] = *comparison.equal_until;
  if (comparison.differ) all["differ"] = *comparison.differ;
  all["names"] = comparison.names;
  all["missing"] = comparison.missing;
  return json_text(all, 2) + "\n";
}

}  // namespace cohort::watch
