#include "bench/picture.h"

#include "track/figure.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

namespace cohort::app::bench {
namespace {

std::vector<std::string> different(const std::vector<Row>& rows, const std::function<std::string(const Row&)>& part) {
  std::vector<std::string> values;
  for (const Row& row : rows) {
    if (std::find(values.begin(), values.end(), part(row)) == values.end()) values.push_back(part(row));
  }
  return values;
}

/// What tells a row's curve apart from the others of its panel.
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
