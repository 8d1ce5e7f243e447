// Rendering of a run in a terminal: lines of text for a view, a size and the reader's choices. Pure; one thread.
// `cohort watch` in a terminal, or as lines of text without one. Belongs to one thread, and has the terminal until it
// returns: then, even after a signal or an exception, the terminal is as it was.
#pragma once

#include "watch/source.h"
#include "watch/view.h"

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
  int rows = 24;  ///< 0: as many as there are lines
  bool unicode = true;
  bool colour = true;
  Rows shown = Rows::Ranks;
  std::optional<std::size_t> host = {};  ///< the ranks of this one alone
  Sort sort = Sort::Rank;
  std::size_t selected = 0;  ///< the line of the table
  bool frozen = false;
  bool keys = true;              ///< the last line says which there are
  const LogTail* log = nullptr;  ///< instead of the table
  std::string trouble = {};      ///< why nothing new comes
  double now = 0;                ///< seconds since 1970
};

/// The number of each row of the table, sorted: of a rank among `view.run.ranks`, or a host.
std::vector<std::size_t> order_of(const View& view, const Look& look);
/// At most look.rows lines, each at most look.columns wide.
std::vector<std::string> draw(const View& view, const Look& look);
/// One line that says how the run is: for pipes, and below the output of `cohort run`.
std::string line_of(const View& view, double now);

/// `text` cut to so many characters, invalid bytes replaced; without control characters.
std::string fitted(std::string_view text, int columns, bool unicode = true);

struct WatchOptions {
  bool ascii = false;
  bool once = false;                                             ///< what is now, as text, and no more
  std::chrono::milliseconds interval = std::chrono::seconds(5);  ///< between two lines where there is no terminal
};

/// Until the reader leaves, or, where there is no terminal, the run has ended. 128 + the signal that ended it, else 0.
int watch(Source& source, const WatchOptions& options);

}  // namespace cohort::watch
