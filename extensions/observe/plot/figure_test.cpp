#include "observe/plot/figure.h"
#include "observe/plot/curves.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace cohort::track {
namespace {

std::size_t count(const std::string& text, std::string_view part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

std::vector<std::string> labels(const Axis& axis) {
  std::vector<std::string> out;
  for (const Tick& tick : axis.ticks()) out.push_back(tick.label);
  return out;
}

// No tag may be left open, and no number may be "nan" or "inf".
void expect_sound(const std::string& svg) {
  EXPECT_TRUE(svg.starts_with("<svg "));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  EXPECT_EQ(count(svg, "<text "), count(svg, "</text>"));
  EXPECT_EQ(count(svg, "\"") % 2, 0U);
  for (const char* bad : {"nan", "inf,", "inf\"", "-inf"}) EXPECT_EQ(count(svg, bad), 0U) << bad;
}

Figure one_panel(std::vector<Point> points) {
  Curve curve{.name = "a", .colour = "#123456", .latest = {}, .points = std::move(points)};
  return {.title = "t", .subtitle = "s", .x_label = "epoch", .panels = {{"Loss", false, {std::move(curve)}, ""}}};
}

TEST(Axis, TicksAreNiceNumbers) {
  EXPECT_EQ(labels(Axis::around(0, 1, Scale::Linear, 5)),
            (std::vector<std::string>{"0", "0.2", "0.4", "0.6", "0.8", "1.0"}));
  EXPECT_EQ(labels(Axis::exactly(0, 12, 6)), (std::vector<std::string>{"0", "2", "4", "6", "8", "10", "12"}));
  EXPECT_EQ(labels(Axis::exactly(0, 4000, 4)), (std::vector<std::string>{"0", "1,000", "2,000", "3,000", "4,000"}));
  EXPECT_EQ(labels(Axis::around(0.001, 1, Scale::Log, 5)), (std::vector<std::string>{"0.001", "0.01", "0.1", "1"}));
  EXPECT_EQ(labels(Axis::around(0.015, 2.5, Scale::Log, 5)),
            (std::vector<std::string>{"0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"}));
}

TEST(Axis, CoversItsDataWhateverTheyAre) {
  constexpr double kHuge = 1e300;
  const double cases[][2] = {{0, 0}, {5, 5}, {-1, 1}, {0.97, 0.9701}, {1e-12, 2e-12}, {1e9, 1e9 + 1}, {-kHuge, kHuge}};
  for (const auto& range : cases) {
    const Axis axis = Axis::around(range[0], range[1], Scale::Linear, 5);
    EXPECT_GE(axis.position(range[0]), -1e-9);
    EXPECT_LE(axis.position(range[1]), 1 + 1e-9);
    EXPECT_GE(axis.ticks().size(), 2U) << range[0] << " " << range[1];
    EXPECT_LE(axis.ticks().size(), 20U) << range[0] << " " << range[1];
    EXPECT_NEAR(axis.position(axis.low()), 0, 1e-9);
    EXPECT_NEAR(axis.position(axis.high()), 1, 1e-9);
  }
}

TEST(Figure, EmptySaysSo) {
  const std::string svg = render_svg(figure_of(series_of({})));
  expect_sound(svg);
  EXPECT_EQ(count(svg, "no values yet"), 2U);
}

TEST(Figure, OnePointIsADot) {
  const std::string svg = render_svg(one_panel({{3, 0.5}}));
  expect_sound(svg);
  EXPECT_EQ(count(svg, "<circle"), 1U);
}

TEST(Figure, LeavesOutWhatIsNotFiniteAndSaysSo) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const std::string svg = render_svg(one_panel({{1, 1}, {2, nan}, {3, inf}, {4, 2}}));
  expect_sound(svg);
  EXPECT_EQ(count(svg, "2 values that are not finite are left out"), 1U);
  const std::string all_bad = render_svg(one_panel({{1, nan}}));
  expect_sound(all_bad);
  EXPECT_EQ(count(all_bad, "no values yet"), 1U);
}

TEST(Figure, ManyPointsMakeASmallPicture) {
  std::vector<Point> points;
  for (int i = 0; i < 500'000; ++i) points.push_back({i * 1.0, 1 + std::sin(i * 0.001)});
  Figure figure = one_panel(std::move(points));
  figure.panels[0].curves[0].smooth = true;
  const std::string svg = render_svg(figure);
  expect_sound(svg);
  EXPECT_LT(svg.size(), 100'000U);
}

TEST(Figure, EscapesText) {
  Figure figure = one_panel({{1, 1}, {2, 2}});
  figure.title = "</text><script>alert(1)</script>&\"'\x01";
  figure.panels[0].curves[0].name = "<b>";
  figure.panels[0].curves[0].colour = "\"/><script>";
  const std::string svg = render_svg(figure);
  EXPECT_EQ(count(svg, "<script"), 0U);
  EXPECT_EQ(count(svg, "<b>"), 0U);
  EXPECT_EQ(count(svg, "\x01"), 0U);
  EXPECT_NE(svg.find("&lt;/text&gt;&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#39;\xEF\xBF\xBD"),
            std::string::npos);
}

TEST(Curves, WhatAResumedRunDidAgainCountsOnce) {
  const RecordLines record = parse_record(
      "{\"event\":\"start\",\"program\":\"p\",\"world_size\":2}\n"
      "{\"event\":\"step\",\"step\":1,\"epoch\":0.5,\"train_loss\":3}\n"
      "{\"event\":\"step\",\"step\":2,\"epoch\":1.0,\"train_loss\":2}\n"
      "{\"event\":\"epoch\",\"step\":2,\"epoch\":1,\"test_loss\":2.5,\"test_accuracy\":0.5}\n"
      "{\"event\":\"step\",\"step\":3,\"epoch\":1.5,\"train_loss\":9}\n"
      "{\"event\":\"start\",\"program\":\"p\",\"world_size\":3}\n"
      "{\"event\":\"resume\",\"step\":2,\"epoch\":1}\n"
      "{\"event\":\"step\",\"step\":3,\"epoch\":1.5,\"train_loss\":1}\n");
  const Figure figure = figure_of(series_of(record));
  EXPECT_EQ(figure.x_label, "epoch");
  ASSERT_EQ(figure.panels.size(), 2U);
  const auto& points = figure.panels[0].curves[0].points;
  ASSERT_EQ(points.size(), 3U);
  EXPECT_EQ(points[2].x, 1.5);
  EXPECT_EQ(points[2].y, 1);
  ASSERT_EQ(figure.panels[0].curves.size(), 2U);
  EXPECT_EQ(figure.panels[0].curves[1].points.size(), 1U);
  EXPECT_EQ(figure.subtitle, "2, then 3 processes; dashed: where it was resumed");
  ASSERT_EQ(figure.marks.size(), 1U);
  EXPECT_EQ(figure.marks[0].x, 1);
  expect_sound(render_svg(figure));
  EXPECT_EQ(count(render_svg(figure), "<line class=\"mark\""), 2U) << "one in each panel";
}

TEST(Curves, OverStepsWhereThereAreNoEpochs) {
  const Figure figure = figure_of(series_of(parse_record("{\"event\":\"step\",\"step\":10,\"train_loss\":3}\n")));
  EXPECT_EQ(figure.x_label, "step");
  ASSERT_EQ(figure.panels[0].curves[0].points.size(), 1U);
  EXPECT_EQ(figure.panels[0].curves[0].points[0].x, 10);
}

TEST(Curves, WhatWasLoggedHasPanels) {
  const Figure figure =
      figure_of(series_of(parse_record("{\"event\":\"metric\",\"step\":1,\"values\":{\"loss\":3,\"lr\":0.1}}\n"
                                       "{\"event\":\"metric\",\"step\":2,\"values\":{\"loss\":2,\"lr\":0.2}}\n"
                                       "{\"event\":\"metric\",\"step\":2,\"rank\":0,\"values\":{\"<ms>\":5}}\n"
                                       "{\"event\":\"metric\",\"step\":2,\"rank\":1,\"values\":{\"<ms>\":7}}\n"
                                       "{\"event\":\"resume\",\"step\":1}\n"
                                       "{\"event\":\"metric\",\"step\":2,\"rank\":1,\"values\":{\"<ms>\":9}}\n")));
  EXPECT_EQ(figure.x_label, "step");
  ASSERT_EQ(figure.panels.size(), 3U) << "no accuracy: there is none";
  EXPECT_EQ(figure.panels[0].title, "Loss");
  ASSERT_EQ(figure.panels[0].curves[0].points.size(), 1U);
  EXPECT_EQ(figure.panels[1].title, "<ms>");
  ASSERT_EQ(figure.panels[1].curves.size(), 2U);
  EXPECT_EQ(figure.panels[1].curves[1].name, "rank 1");
  ASSERT_EQ(figure.panels[1].curves[1].points.size(), 1U);
  EXPECT_EQ(figure.panels[1].curves[1].points[0].y, 9);
  EXPECT_EQ(figure.panels[2].title, "lr");
  EXPECT_TRUE(figure.panels[2].from_zero);
  expect_sound(render_svg(figure));
}

TEST(Curves, LossesShareAPanelWhoseScaleIsNamed) {
  const Figure figure = figure_of(
      series_of(parse_record("{\"event\":\"metric\",\"step\":1,\"values\":{\"loss\":300,\"valid_loss\":400}}\n"
                             "{\"event\":\"metric\",\"step\":2,\"values\":{\"loss\":1,\"valid_loss\":2}}\n")));
  EXPECT_EQ(figure.title, "run");
  ASSERT_EQ(figure.panels.size(), 1U);
  ASSERT_EQ(figure.panels[0].curves.size(), 2U);
  EXPECT_EQ(figure.panels[0].curves[1].name, "valid");
  EXPECT_EQ(count(render_svg(figure), ">log scale<"), 1U);
}

TEST(Curves, WarningsAreMarks) {
  const RunSeries run =
      series_of(parse_record("{\"event\":\"step\",\"time\":10,\"step\":1,\"epoch\":0.5,\"train_loss\":3}\n"
                             "{\"event\":\"warning\",\"time\":15,\"kind\":\"no_step\",\"text\":\"<no> step\"}\n"
                             "{\"event\":\"step\",\"time\":20,\"step\":2,\"epoch\":1,\"train_loss\":2}\n"));
  ASSERT_EQ(run.happened.size(), 1U);
  EXPECT_EQ(run.happened[0].at.epoch, 0.5);
  EXPECT_EQ(run.happened[0].at.seconds, 5);
  const RunSeries lost = series_of(
      parse_record("{\"event\":\"step\",\"time\":10,\"step\":1,\"epoch\":1,\"train_loss\":3}\n"
                   "{\"event\":\"step\",\"time\":11,\"step\":2,\"epoch\":2,\"train_loss\":\"NaN\"}\n"
                   "{\"event\":\"warning\",\"time\":12,\"kind\":\"not_finite\",\"text\":\"lost\",\"step\":2}\n"));
  EXPECT_EQ(count(render_svg(figure_of(lost)), "<title>lost</title>"), 1U) << "behind the last value that is drawn";
  const Figure figure = figure_of(run);
  EXPECT_TRUE(figure.subtitle.ends_with("; dashed red: warnings")) << figure.subtitle;
  ASSERT_EQ(figure.marks.size(), 1U);
  const std::string svg = render_svg(figure);
  expect_sound(svg);
  EXPECT_EQ(count(svg, "<title>&lt;no&gt; step</title>"), 1U);
}

NamedRun named(std::string name, std::string_view record) { return {std::move(name), series_of(parse_record(record))}; }

std::vector<NamedRun> two_runs() {
  return {named("a",
                "{\"event\":\"start\",\"time\":100,\"program\":\"p\",\"world_size\":1}\n"
                "{\"event\":\"step\",\"time\":110,\"step\":1,\"epoch\":0.5,\"train_loss\":4}\n"
                "{\"event\":\"step\",\"time\":120,\"step\":2,\"epoch\":1,\"train_loss\":2}\n"
                "{\"event\":\"epoch\",\"time\":120,\"step\":2,\"epoch\":1,\"test_accuracy\":0.5,\"samples_per_second\":"
                "10}\n"),
          named("<b>",
                "{\"event\":\"start\",\"time\":500,\"program\":\"p\",\"world_size\":4}\n"
                "{\"event\":\"step\",\"time\":505,\"step\":1,\"epoch\":1,\"train_loss\":1}\n"
                "{\"event\":\"start\",\"time\":905,\"program\":\"p\",\"world_size\":4}\n"
                "{\"event\":\"step\",\"time\":910,\"step\":2,\"epoch\":2,\"train_loss\":0.5}\n"
                "{\"event\":\"metric\",\"time\":910,\"step\":2,\"rank\":0,\"values\":{\"ms\":5,\"epoch\":2}}\n"
                "{\"event\":\"metric\",\"time\":910,\"step\":2,\"rank\":1,\"values\":{\"ms\":7,\"epoch\":2}}\n"
                "{\"event\":\"epoch\",\"time\":911,\"step\":2,\"epoch\":2,\"test_accuracy\":0.75,\"samples_per_"
                "second\":30}\n")};
}

TEST(Compare, RunsShareThePanelsOfTheirNames) {
  const Figure figure = compare(two_runs());
  EXPECT_EQ(figure.x_label, "epoch");
  ASSERT_EQ(figure.panels.size(), 4U);
  EXPECT_EQ(figure.panels[0].title, "train_loss");
  ASSERT_EQ(figure.panels[0].curves.size(), 2U);
  EXPECT_NE(figure.panels[0].curves[0].colour, figure.panels[0].curves[1].colour);
  EXPECT_EQ(figure.panels[1].title, "test_accuracy");
  EXPECT_TRUE(figure.panels[1].percent);
  EXPECT_EQ(figure.panels[2].title, "samples_per_second");
  EXPECT_EQ(figure.panels[3].title, "ms") << "both ranks of one run, in its colour";
  ASSERT_EQ(figure.panels[3].curves.size(), 2U);
  EXPECT_EQ(figure.panels[3].curves[0].colour, figure.panels[0].curves[1].colour);
  const std::string svg = render_svg(figure);
  expect_sound(svg);
  EXPECT_EQ(count(svg, "&lt;b&gt; (4 processes)"), 1U) << "the legend stands once";
  EXPECT_EQ(count(svg, "<b>"), 0U);
}

TEST(Compare, TimeIsThatOfTheRunWithoutItsPauses) {
  const Figure figure = compare(two_runs(), Over::Time);
  EXPECT_EQ(figure.x_label, "seconds");
  const auto& points = figure.panels[0].curves[1].points;
  ASSERT_EQ(points.size(), 2U);
  EXPECT_EQ(points[0].x, 5);
  EXPECT_EQ(points[1].x, 10) << "400 s passed between its end and its being resumed";
}

TEST(Compare, TableHasEndValuesAndDifferences) {
  const std::string table = end_values(two_runs(), {});
  EXPECT_EQ(table,
            "name                run      epoch   end value          difference  course\n"
            "train_loss          a            1           2                      #_\n"
            "                    <b>          2         0.5        -50.0 % at 1  #_\n"
            "test_accuracy       a            1     50.00 %                      _\n"
            "                    <b>          2     75.00 %                   -  _\n"
            "samples_per_second  a            1          10                      _\n"
            "                    <b>          2          30                   -  _\n"
            "ms                  <b>          2           6                      \n");
  EXPECT_NE(end_values(two_runs(), {.unicode = true}).find("█▁"), std::string::npos);
}

TEST(Compare, SparklinesHoldAnything) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(sparkline({}, 8, false), "");
  EXPECT_EQ(sparkline({nan, inf}, 8, false), "");
  EXPECT_EQ(sparkline({3}, 8, false), "_");
  EXPECT_EQ(sparkline({0, nan, 1, 2, 3, 4, 5, 6, 7}, 8, false), "_.:-=+*#");
  EXPECT_EQ(sparkline(std::vector<double>(1000, 1e299), 8, false), "________");
}

TEST(Figure, ColumnsAreDividedAndHoldAnything) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Figure figure{.title = "t",
                      .subtitle = "s",
                      .x_label = "x",
                      .panels = {{.title = "p",
                                  .curves = {},
                                  .note = {},
                                  .columns = {{.label = "1", .text = "1.0", .parts = {0.5, 0.5}, .aim = 1},
                                              {.label = "<2>", .text = "1.5", .parts = {1, 0.25, 0.25}, .aim = 2},
                                              {.label = "3", .text = "?", .parts = {nan, -1}, .aim = 1e308},
                                              {.label = "4", .text = "", .parts = {1e308, 1e308}}},
                                  .parts = {{"compute", "#111111"}, {"wire", "#222222"}}}}};
  const std::string svg = render_svg(figure);
  expect_sound(svg);
  EXPECT_EQ(count(svg, "fill=\"#111111\"/>"), 2U);
  EXPECT_EQ(count(svg, "fill=\"#222222\"/>"), 2U) << "a part more than there are names for is not drawn";
  EXPECT_EQ(count(svg, "class=\"aim\""), 2U);
  EXPECT_EQ(count(svg, ">&lt;2&gt;<"), 1U);
}

}  // namespace
}  // namespace cohort::track
