#include "bench/row.h"

#include <algorithm>
#include <cmath>

namespace cohort::app::bench {
namespace {

nlohmann::json json_of(const Side& side) {
  return {{"time_us", side.time},
          {"in_a_row", side.in_a_row},
          {"p50_us", side.p50},
          {"p90_us", side.p90},
          {"p99_us", side.p99},
          {"p99.9_us", side.p99_9},
          {"max_us", side.max},
          {"calls", side.calls},
          {"wrong", side.wrong},
          {"algbw_GBps", side.algbw},
          {"busbw_GBps", side.busbw},
          {"bound_us", side.bound},
          {"of_bound", side.time > 0 ? side.bound / side.time : 0}};
}

Side side_from(const nlohmann::json& json) {
  Side side;
  side.time = json.at("time_us");
  side.in_a_row = json.at("in_a_row");
  side.p50 = json.at("p50_us");
  side.p90 = json.at("p90_us");
  side.p99 = json.at("p99_us");
  side.p99_9 = json.at("p99.9_us");
  side.max = json.at("max_us");
  side.calls = json.at("calls");
  side.wrong = json.at("wrong");
  side.algbw = json.at("algbw_GBps");
  side.busbw = json.at("busbw_GBps");
  side.bound = json.at("bound_us");
  return side;
}

}  // namespace

const Side& main_side(const Row& row) { return row.in_place ? *row.in_place : *row.out_of_place; }

nlohmann::json to_json(const Row& row) {
  nlohmann::json json = {{"event", "row"},
                         {"collective", row.collective},
                         {"ranks", row.ranks},
                         {"memory", row.memory},
                         {"state", row.state},
                         {"bytes", row.bytes},
                         {"count", row.count},
                         {"type", row.type},
                         {"op", row.op},
                         {"root", row.root},
                         {"memory_rate_GBps", row.memory_rate}};
  if (row.out_of_place) json["out_of_place"] = json_of(*row.out_of_place);
  if (row.in_place) json["in_place"] = json_of(*row.in_place);
  return json;
}

Row row_from(const nlohmann::json& event) {
  Row row;
  row.collective = event.at("collective");
  row.ranks = event.at("ranks");
  row.memory = event.at("memory");
  row.state = event.at("state");
  row.bytes = event.at("bytes");
  row.count = event.at("count");
  row.type = event.at("type");
  row.op = event.at("op");
  row.root = event.at("root");
  row.memory_rate = event.at("memory_rate_GBps");
  if (event.contains("out_of_place")) row.out_of_place = side_from(event.at("out_of_place"));
  if (event.contains("in_place")) row.in_place = side_from(event.at("in_place"));
  return row;
}

double percentile(const std::vector<double>& sorted, double share) {
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<std::size_t>(rank, 1, sorted.size()) - 1];
}

}  // namespace cohort::app::bench
