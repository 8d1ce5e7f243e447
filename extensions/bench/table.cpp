#include "bench/measure.h"

#include "bench/collective.h"
#include "observe/plot/figure.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>

namespace cohort::app::bench {
namespace {

// Formats microseconds and GB/s with their significant digits.
std::string number(double value) {
  if (value >= 10000) return fmt::format("{:.0f}", value);
  if (value >= 100) return fmt::format("{:.1f}", value);
  return fmt::format("{:.2f}", value);
}

std::string side_text(const std::optional<Side>& side) {
  if (!side) return fmt::format("{:>9} {:>7} {:>7} {:>6}", "-", "-", "-", "-");
  const std::string time = number(side->time) + (side->in_a_row ? "*" : " ");
  return fmt::format("{:>9} {:>7} {:>7} {:>6}", time, number(side->algbw), number(side->busbw),
                     side->wrong < 0 ? "N/A" : fmt::format("{}", side->wrong));
}

}  // namespace

void Table::header(const nlohmann::json& machine) {
  fmt::print(stream_, "# cohort bench {} ({}, {}) on {}, {}\n", machine.at("version").get<std::string>(),
             machine.at("compiler").get<std::string>(), machine.at("build").get<std::string>(),
             machine.at("host").get<std::string>(), machine.at("time").get<std::string>());
  fmt::print(stream_, "# {}, {} usable cores, load {:.2f}, {:.2f} cores busy before the start\n",
             machine.at("processor").get<std::string>(), machine.at("cores").get<int>(),
             machine.at("load").get<double>(), machine.at("busy_cores_before").get<double>());
  std::fflush(stream_);
}

void Table::world(const nlohmann::json& world, const std::string& kind, int cores) {
  const int ranks = world.at("ranks");
  std::string trips = "no shared memory between them";
  if (world.contains("flag_round_trip_near_ns")) {
    trips = fmt::format("flag round trip {:.0f} ns (nearest) to {:.0f} ns (farthest)",
                        world.at("flag_round_trip_near_ns").get<double>(),
                        world.at("flag_round_trip_far_ns").get<double>());
  } else if (ranks == 1) {
    trips = "alone";
  }
  fmt::print(stream_, "#\n# {} {}, {}\n", ranks, kind, trips);
  if (world.at("local_ranks").get<int>() > cores) {
    fmt::print(stream_, "# more ranks than cores ({}): they take turns, and times are those of the scheduler too\n",
               cores);
  }
  if (world.contains("gpus")) {
    const int gpus = world.at("gpus");
    fmt::print(stream_, "# {}; sums: {}\n", world.at("cuda").get<std::string>(),
               world.at("gpu_sums").get<std::string>());
    if (gpus < ranks)
      fmt::print(stream_, "# {} ranks share {} GPU{}: times are not those of a GPU for each\n", ranks, gpus,
                 gpus == 1 ? "" : "s");
  }
  heading_.clear();
  std::fflush(stream_);
}

void Table::heading(const Row& row) {
  fmt::print(stream_, "#\n# {}, {} {}, {} memory, {}\n", row.collective, row.ranks, row.ranks == 1 ? "rank" : "ranks",
             row.memory, row.state);
  fmt::print(stream_, "#{:>11} {:>11} {:>10} {:>8} {:>4} | {:^32} | {:^32} | {:>8} {:>8} {:>8} {:>8} {:>8} | {:>6}\n",
             "size", "count", "type", "redop", "root", "out-of-place", "in-place", "p50", "p90", "p99", "p99.9", "max",
             "of");
  const std::string columns = fmt::format("{:>9} {:>7} {:>7} {:>6}", "time", "algbw", "busbw", "#wrong");
  const std::string units = fmt::format("{:>9} {:>7} {:>7} {:>6}", "(us)", "(GB/s)", "(GB/s)", "");
  fmt::print(stream_, "#{:>11} {:>11} {:>10} {:>8} {:>4} | {} | {} | {:>8} {:>8} {:>8} {:>8} {:>8} | {:>6}\n", "(B)",
             "(elements)", "", "", "", columns, columns, "(us)", "(us)", "(us)", "(us)", "(us)", "bound");
  fmt::print(stream_, "#{:>49} | {} | {} |{:>46}|\n", "", units, units, "");
}

void Table::row(const Row& row) {
  const std::string heading_now = fmt::format("{} {} {} {}", row.collective, row.ranks, row.memory, row.state);
  if (heading_now != heading_) {
    heading(row);
    heading_ = heading_now;
  }
  const Side& main = main_side(row);
  // No bound is measured for GPUs.
  const std::string of_bound = row.memory == to_string(MemoryKind::Cuda)
                                   ? "-"
                                   : fmt::format("{:.0f}%", main.time > 0 ? 100 * main.bound / main.time : 0);
  fmt::print(stream_, " {:>11} {:>11} {:>10} {:>8} {:>4} | {} | {} | {:>8} {:>8} {:>8} {:>8} {:>8} | {:>6}\n",
             row.bytes, row.count, row.type, row.op, row.root, side_text(row.out_of_place), side_text(row.in_place),
             number(main.p50), number(main.p90), number(main.p99), number(main.p99_9), number(main.max), of_bound);
  for (const auto* side : {&row.out_of_place, &row.in_place}) {
    if (*side && (*side)->wrong > 0) wrong_ += (*side)->wrong;
  }
  std::fflush(stream_);
}

void Table::footer(double others, double stolen) {
  fmt::print(stream_, "#\n# * calls in a row over their number. {} wrong elements. Meanwhile others used {:.2f} cores",
             wrong_, others);
  fmt::print(stream_, ", {:.2f} were stolen.\n", stolen);
  std::fflush(stream_);
}

namespace {

std::vector<std::string> different(const std::vector<Row>& rows, const std::function<std::string(const Row&)>& part) {
  std::vector<std::string> values;
  for (const Row& row : rows) {
    if (std::find(values.begin(), values.end(), part(row)) == values.end()) values.push_back(part(row));
  }
  return values;
}

/// Label that distinguishes a row's curve from the others in its panel.
std::string curve_name(const Row& row, bool types, bool ops) {
  std::string name = fmt::format("{} rank{}, {} memory", row.ranks, row.ranks == 1 ? "" : "s", row.memory);
  if (types) name += " " + row.type;
  if (ops && row.op != "none") name += " " + row.op;
  return name;
}

track::Panel panel_of(const std::vector<Row>& rows, const std::string& title, bool types, bool ops,
                      const std::function<double(const Side&)>& value) {
  track::Panel panel{.title = title, .percent = false, .curves = {}, .note = {}};
  for (const Row& row : rows) {
    const std::string name = curve_name(row, types, ops);
    auto curve = std::find_if(panel.curves.begin(), panel.curves.end(),
                              [&](const track::Curve& known) { return known.name == name; });
    if (curve == panel.curves.end()) {
      track::Curve fresh;
      fresh.name = name;
      fresh.colour = track::colour_of(panel.curves.size());
      fresh.markers = true;
      panel.curves.push_back(std::move(fresh));
      curve = panel.curves.end() - 1;
    }
    const double y = value(main_side(row));
    if (y > 0) curve->points.push_back({static_cast<double>(std::max<std::size_t>(row.bytes, 1)), y});
  }
  return panel;
}

}  // namespace

std::string draw(const std::vector<Row>& rows, const nlohmann::json& machine) {
  track::Figure figure;
  figure.title = "cohort bench";
  figure.subtitle = fmt::format("{}, {}, {} cores, {}", machine.at("host").get<std::string>(),
                                machine.at("processor").get<std::string>(), machine.at("cores").get<int>(),
                                machine.at("time").get<std::string>());
  figure.x_label = "size in bytes";
  figure.x_scale = track::Scale::Log;
  const bool types = different(rows, [](const Row& row) { return row.type; }).size() > 1;
  const bool ops = different(rows, [](const Row& row) { return row.op; }).size() > 1;
  const auto collectives = different(rows, [](const Row& row) { return row.collective; });
  for (const std::string& collective : collectives) {
    std::vector<Row> own;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(own),
                 [&](const Row& row) { return row.collective == collective; });
    figure.panels.push_back(
        panel_of(own, collective + ": time in us", types, ops, [](const Side& side) { return side.time; }));
    if (collectives.size() == 1 && collective != "barrier") {
      figure.panels.push_back(
          panel_of(own, "bus bandwidth in GB/s", types, ops, [](const Side& side) { return side.busbw; }));
    }
  }
  return track::render_svg(figure);
}

}  // namespace cohort::app::bench
