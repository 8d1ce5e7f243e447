// How the output of all ranks looks to a person: whole lines, each with its rank in front. Pure: takes pieces and the
// time, gives text for descriptor 1 or 2. One thread.
#pragma once

#include "launch/messages.h"
#include "launch/output/text.h"
#include "launch/plan/job_spec.h"
#include "launch/processes.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

/// Lines of several ranks that come within this time of each other can be one.
inline constexpr std::chrono::milliseconds kCollapseWindow{200};

struct ViewOptions {
  PrefixStyle style = PrefixStyle::Rank;
  std::vector<std::string> hosts;                 ///< by process
  Roles roles;                                    ///< of these
  std::array<bool, 2> terminal = {false, false};  ///< stdout, stderr: progress bars overwrite themselves
  std::array<bool, 2> colour = {false, false};
  std::size_t speakers = 0;                       ///< ranks that are fed at all; 0: every one
  std::array<bool, 2> collapse = {false, false};  ///< "[0-3] | text" for a line that ranks 0 to 3 have printed
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
  /// Lines wait for the same line of other ranks: until when the first of them does. Then call `release`.
  std::optional<Clock::time_point> next_release() const;
  std::vector<Text> release(Clock::time_point now);

 private:
  struct Source {
    LineSplitter lines;
    std::string progress;  ///< the last overwritten line, where it was not shown
    Clock::time_point progress_shown{};
    bool cut = false;  ///< the next line continues the last one
    bool partial_shown = true;
    std::string rest;  ///< without prefixes: what has no line end yet
  };
  /// A line that waits. They are shown in the order in which they came; a rank joins only such as came after the last
  /// one that it has printed, so that each rank's lines keep their order.
  struct Held {
    Stream stream;
    std::string text;
    std::vector<int> ranks;  ///< ascending
    Clock::time_point since;
    std::string time;
  };
  Source& source(int rank, Stream stream) {
    return sources_[static_cast<std::size_t>(rank) * 2 + (stream == Stream::Stderr)];
  }
  std::string label(const std::vector<int>& ranks) const;
  std::string prefix(const std::vector<int>& ranks, Stream stream, std::string_view mark, std::string time) const;
  std::string now_text() const;
  void put_line(std::vector<Text>& out, const Held& line, bool continued);
  void complete(std::vector<Text>& out, int rank, Stream stream, std::string text, Clock::time_point now, bool whole);
  void transient(std::vector<Text>& out, int rank, Stream stream, std::string_view text);
  void hold(int rank, Stream stream, std::string text, Clock::time_point now);
  void put_first(std::vector<Text>& out);
  void put_due(std::vector<Text>& out, Clock::time_point now);
  void put_held_of(std::vector<Text>& out, int rank);
  std::vector<Text> feed_plain(int rank, Stream stream, std::string_view bytes);

  ViewOptions options_;
  std::size_t label_width_ = 0;
  std::vector<Source> sources_;
  bool transient_shown_ = false;
  std::deque<Held> held_;
  std::uint64_t shown_held_ = 0;  ///< how many have left `held_`
  std::size_t held_bytes_ = 0;
  std::vector<std::uint64_t> last_held_;  ///< by rank: one more than the number of the last one that it is in
};

}  // namespace cohort::launch
