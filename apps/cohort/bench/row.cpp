#include "bench/row.h"

#include <algorithm>
#include <cmath>

namespace cohort::app::bench {
namespace {

/// Each field once, for both directions.
template <class S, class F>
void visit(S& side, F&& field) {
  field("time_us", side.time), field("in_a_row", side.in_a_row), field("p50_us", side.p50), field("p90_us", side.p90);
  field("p99_us", side.p99), field("p99.9_us", side.p99_9), field("max_us", side.max), field("calls", side.calls);
  field("wrong", side.wrong), field("algbw_GBps", side.algbw), field("busbw_GBps", side.busbw);
  field("bound_us", side.bound);
}
template <class R, class F>
void visit_row(R& row, F&& field) {
  field("collective", row.collective), field("ranks", row.ranks), field("memory", row.memory);
  field("state", row.state), field("bytes", row.bytes), field("count", row.count), field("type", row.type);
  field("op", row.op), field("root", row.root), field("memory_rate_GBps", row.memory_rate);
}

auto writing_to(nlohmann::json& json) {
  return [&json](const char* name, const auto& value) { json[name] = value; };
}
auto reading_from(const nlohmann::json& json) {
  return [&json](const char* name, auto& value) { json.at(name).get_to(value); };
}

nlohmann::json json_of(const Side& side) {
  nlohmann::json json = {{"of_bound", side.time > 0 ? side.bound / side.time : 0}};
  visit(side, writing_to(json));
  return json;
}

Side side_from(const nlohmann::json& json) {
  Side side;
  visit(side, reading_from(json));
  return side;
}

}  // namespace

const Side& main_side(const Row& row) { return row.in_place ? *row.in_place : *row.out_of_place; }

nlohmann::json to_json(const Row& row) {
  nlohmann::json json = {{"event", "row"}};
  visit_row(row, writing_to(json));
  if (row.out_of_place) json["out_of_place"] = json_of(*row.out_of_place);
  if (row.in_place) json["in_place"] = json_of(*row.in_place);
  return json;
}

Row row_from(const nlohmann::json& event) {
  Row row;
  visit_row(row, reading_from(event));
  if (event.contains("out_of_place")) row.out_of_place = side_from(event.at("out_of_place"));
  if (event.contains("in_place")) row.in_place = side_from(event.at("in_place"));
  return row;
}

double percentile(const std::vector<double>& sorted, double share) {
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<std::size_t>(rank, 1, sorted.size()) - 1];
}

}  // namespace cohort::app::bench
