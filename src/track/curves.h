// From runs to a figure of their curves, and to a table of their end values. Pure: any thread may call.
#pragma once

#include "sys/terminal.h"
#include "track/figure.h"
#include "track/series.h"

#include <optional>
#include <string>
#include <vector>

namespace cohort::track {

/// Losses and accuracies, and a panel for each other name that was logged; by default over epochs, or over steps where
/// the record has no epochs.
Figure figure_of(const RunSeries& run, std::optional<Over> over = {});

struct NamedRun {
  std::string name;
  RunSeries run;
};

/// Likewise of several runs: a panel for each name, in it a curve for each run.
Figure compare(const std::vector<NamedRun>& runs, std::optional<Over> over = {});

/// A line for each name and run: what it ended with, how far that is from the first run's, and its course in small.
std::string end_values(const std::vector<NamedRun>& runs, const sys::TextStyle& style, std::optional<Over> over = {});

/// Each character stands for a part of the values, by their mean: lowest to highest. What is not finite is left out.
std::string sparkline(const std::vector<double>& values, std::size_t width, bool unicode);

}  // namespace cohort::track
