// `cohort watch` in a terminal, or as lines of text where there is none. Belongs to one thread, and has the terminal
// until it returns: whatever ends it, a signal or an exception, the terminal is as it was.
#pragma once

#include "watch/screen.h"
#include "watch/source.h"

#include <chrono>

namespace cohort::watch {

struct WatchOptions {
  bool ascii = false;
  bool once = false;                                             ///< what is now, as text, and no more
  std::chrono::milliseconds interval = std::chrono::seconds(5);  ///< between two lines where there is no terminal
};

/// Until the reader leaves, or, where there is no terminal, the run has ended. 128 + the signal that ended it, else 0.
int watch(Source& source, const WatchOptions& options);

}  // namespace cohort::watch
