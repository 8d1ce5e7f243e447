// How the output of all ranks looks to a person: whole lines, each with its rank in front. Pure: takes pieces and the
// time, gives text for descriptor 1 or 2. One thread.
#pragma once

#include "launch/lines.h"
#include "launch/messages.h"

#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

enum class PrefixStyle {
  None,  ///< bytes pass as they are
  Rank,  ///< "host:3 | text"
  Full,  ///< "12:04:31.250 host:3 err | text"
};

struct ViewOptions {
  PrefixStyle style = PrefixStyle::Rank;
  std::vector<std::string> hosts;                 ///< by rank
  std::array<bool, 2> terminal = {false, false};  ///< stdout, stderr: progress bars overwrite themselves
  std::array<bool, 2> colour = {false, false};
  std::function<int()> columns = [] { return 80; };
};

struct Text {
  int fd = 1;
  std::string bytes;
};

class OutputView {
 public:
  using Clock = std::chrono::steady_clock;
  explicit OutputView(ViewOptions options);

  std::vector<Text> feed(int rank, Stream stream, std::string_view bytes, Clock::time_point now);
  /// The unfinished lines of all streams, finished: nothing more comes.
  std::vector<Text> finish();
  /// On a terminal: shows unfinished lines that have waited a moment, e.g. a question without a line end. Call it every
  /// now and then; true if there is something that waits.
  bool has_partial() const;
  std::vector<Text> show_partial();

 private:
  struct Source {
    LineSplitter lines;
    std::string progress;  ///< the last overwritten line, where it was not shown
    Clock::time_point progress_shown{};
    bool cut = false;  ///< the next line continues the last one
    bool partial_shown = true;
  };
  Source& source(int rank, Stream stream) {
    return sources_[static_cast<std::size_t>(rank) * 2 + (stream == Stream::Stderr)];
  }
  std::string prefix(int rank, Stream stream, bool continued) const;
  void complete(std::string& out, int rank, Stream stream, std::string_view text);
  void transient(std::string& out, int rank, Stream stream, std::string_view text);

  ViewOptions options_;
  std::size_t label_width_ = 0;
  std::vector<Source> sources_;
  bool transient_shown_ = false;
};

}  // namespace cohort::launch
