// draw: renders a run as lines of text, from a view, a size and the reader's choices. Pure; one thread. watch: `cohort
// watch` in a terminal, or as lines of text without one. One thread; `watch` uses the terminal until it returns, and
// restores it even after a signal or an exception.
#pragma once

#include "observe/watch/source.h"
#include "observe/watch/view.h"

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace cohort::watch {

enum class Sort { Rank, Late, Exposed, Speed, Memory, State };
Sort next(Sort sort) noexcept;

struct Look {
  int columns = 80;
  int rows = 24;  ///< 0: no limit
  bool unicode = true;
  bool colour = true;
  Rows shown = Rows::Ranks;
  std::optional<std::size_t> host = {};  ///< shows only the ranks of this host
  Sort sort = Sort::Rank;
  std::size_t selected = 0;  ///< selected line of the table
  bool frozen = false;
  bool keys = true;              ///< the last line lists the keys
  const LogTail* log = nullptr;  ///< shown instead of the table
  std::string trouble = {};      ///< reason why there is no new data
  double now = 0;                ///< seconds since 1970
};

/// For each row of the table, in the order shown: the index of its rank in `view.run.ranks`, or of its host.
std::vector<std::size_t> order_of(const View& view, const Look& look);
/// Returns at most look.rows lines, each at most look.columns wide.
std::vector<std::string> draw(const View& view, const Look& look);
/// One line about the state of the run: for pipes, and below the output of `cohort run`.
std::string line_of(const View& view, double now);

/// `text` cut to `columns` characters, with invalid bytes replaced, and without control characters.
std::string fitted(std::string_view text, int columns, bool unicode = true);

struct WatchOptions {
  bool ascii = false;
  bool once = false;                                             ///< prints the present state as text, and returns
  std::chrono::milliseconds interval = std::chrono::seconds(5);  ///< time between two lines, without a terminal
};

/// Shows the run until the reader quits, or, without a terminal, until the run has ended. Returns 128 + the number of
/// the signal that ended it, else 0.
int watch(Source& source, const WatchOptions& options);

}  // namespace cohort::watch
