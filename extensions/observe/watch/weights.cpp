#include "observe/watch/weights.h"

#include "base/json.h"
#include "base/result.h"
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
    if (lines.line().event != "weights" || lines.superseded()) continue;
    if (const auto step = lines.line().integer("step")) take(*step, lines.line());
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

/// Names of tensors that differ, or that one of the two lacks.
std::vector<std::string> differing(const Tensors& one, const Tensors& other, std::size_t& of) {
  std::vector<std::string> names;
  of = one.size();
  for (const auto& tensor : one) {
    if (std::ranges::find(other, tensor) == other.end()) names.push_back(tensor.first);
  }
  for (const auto& tensor : other) {
    const auto has_name = [&tensor](const auto& its) { return its.first == tensor.first; };
    if (std::ranges::any_of(one, has_name)) continue;
    names.push_back(tensor.first);
    ++of;
  }
  return names;
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
  if (comparison.differ) {
    comparison.names = differing(tensors_at(records[0], *comparison.differ), tensors_at(records[1], *comparison.differ),
                                 comparison.tensors);
  }
  return comparison;
}

std::string to_text(const WeightsComparison& comparison) {
  if (!comparison.differ) {
    return fmt::format("the weights are equal to the bit at all {} steps that both runs have ({} to {})\n",
                       comparison.steps, comparison.first, comparison.last);
  }
  const std::span<const std::string> shown(comparison.names.data(), std::min(kShown, comparison.names.size()));
  const std::size_t more = comparison.names.size() - shown.size();
  return fmt::format("the weights {}{}: {} of {} tensors differ, {}{}\n",
                     comparison.equal_until
                         ? fmt::format("are equal to the bit until step {}, not at ", *comparison.equal_until)
                         : "differ from the first step that both runs have, ",
                     *comparison.differ, comparison.names.size(), comparison.tensors, fmt::join(shown, ", "),
                     more == 0 ? "" : fmt::format(" and {} more", more));
}

std::string to_json(const WeightsComparison& comparison) {
  nlohmann::ordered_json all = {{"equal", !comparison.differ.has_value()},
                                {"steps", comparison.steps},
                                {"first", comparison.first},
                                {"last", comparison.last}};
  if (comparison.equal_until) all["equal_until"] = *comparison.equal_until;
  if (comparison.differ) all["differ"] = *comparison.differ;
  all["names"] = comparison.names;
  return json_text(all, 2) + "\n";
}

}  // namespace cohort::watch
