// Shows the output to the reader of `cohort run`: Display takes the ranks' bytes, splits them into lines, writes these,
// and tells the sender when they are written. Knows neither agents nor the job. Belongs to the supervisor and its
// thread; the Console writes on a thread of its own.
#pragma once

#include "base/unique_fd.h"
#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/output/text.h"
#include "launch/plan/job_spec.h"
#include "launch/plan/plan.h"
#include "launch/processes.h"

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::launch {

// OutputView formats the output of all ranks for people: whole lines, each with its rank in front. Pure: takes pieces
// and the time, returns text for descriptor 1 or 2. One thread.

/// Equal lines of several ranks that come within this time can be shown as one.
inline constexpr std::chrono::milliseconds kCollapseWindow{200};

struct ViewOptions {
  PrefixStyle style = PrefixStyle::Rank;
  std::vector<std::string> hosts;                 ///< host of each process
  Roles roles;                                    ///< roles of the processes
  std::array<bool, 2> terminal = {false, false};  ///< is stdout, is stderr one? There, bars overwrite themselves
  std::array<bool, 2> colour = {false, false};
  std::size_t speakers = 0;                       ///< number of ranks that are shown; 0: all
  std::array<bool, 2> collapse = {false, false};  ///< "[0-3] | text" for a line that ranks 0 to 3 have printed
  int (*columns)() = [] { return 80; };           ///< current width of the terminal
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
  /// Adds ranks behind the existing ones; `hosts`: the hosts of all ranks.
  void grow(std::vector<std::string> hosts);
  /// Completes the unfinished lines of all streams, when nothing more comes.
  std::vector<Text> finish();
  /// On a terminal, `show_partial` shows unfinished lines that have waited a moment, e.g. a question without a line
  /// end. Call it regularly; `has_partial` returns true if a line waits.
  bool has_partial() const;
  std::vector<Text> show_partial();
  /// Returns when the first line has waited long enough for equal lines of other ranks; then call `release`.
  std::optional<Clock::time_point> next_release() const;
  std::vector<Text> release(Clock::time_point now);

 private:
  struct Source {
    LineSplitter lines;
    std::string progress;  ///< the last overwritten line, if it was not shown
    Clock::time_point progress_shown{};
    bool cut = false;  ///< the next line continues the last one
    bool partial_shown = true;
    std::string rest;  ///< without prefixes: the text that has no line end yet
  };
  /// A line that waits for equal lines of other ranks. Held lines are shown in the order in which they came. A rank
  /// joins only lines that came after the last one that it has printed, so that each rank's lines keep their order.
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
  std::uint64_t shown_held_ = 0;  ///< number of lines that have left `held_`
  std::size_t held_bytes_ = 0;
  std::vector<std::uint64_t> last_held_;  ///< by rank: 1 + number of the last held line that it is in
};

/// Writes to stdout and stderr on a thread of its own, so that a reader who does not read (a pager, a stopped terminal)
/// never stops the supervisor. The caller bounds the memory: `written` says how much has been written. Methods belong
/// to one thread, except where noted.
class Console {
 public:
  Console();
  /// Drops bytes that are not written yet; to keep them, wait until `idle`. Never waits for a reader.
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  /// `weight` is added to `written()` when the bytes have been written (or dropped, if the reader is gone).
  void write(int fd, std::string bytes, std::uint64_t weight = 0);
  /// Descriptor that becomes readable when anything has changed; read it with `acknowledge`.
  int event_fd() const noexcept { return event_.get(); }
  void acknowledge() const;
  std::uint64_t written() const noexcept { return written_.load(std::memory_order_acquire); }
  bool idle() const;
  /// Returns the number of bytes that the readers have taken. Any thread.
  std::uint64_t taken() const noexcept { return taken_.load(std::memory_order_relaxed); }
  /// Drops bytes that are not written yet; also those being written, as soon as the blocked write returns. Later bytes
  /// are written.
  void drop();
  /// Returns true if the reader of stdout (1) or stderr (2) is gone.
  bool reader_gone(int fd) const noexcept { return gone_[fd == 2].load(std::memory_order_relaxed); }
  /// Returns the errno with which bytes were dropped because they did not fit into the file; 0 if all could be written.
  /// Each piece is tried, so output that comes once there is space again is written.
  int no_room(int fd) const noexcept { return no_room_[fd == 2].load(std::memory_order_relaxed); }

 private:
  struct Item {
    int fd;
    std::string bytes;
    std::uint64_t weight;
  };
  void run();
  void put(const Item& item, std::uint64_t generation);
  bool dropped(std::uint64_t generation) const;
  void interrupt();

  sys::UniqueFd event_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  bool writing_ = false;
  bool closing_ = false;
  bool ended_ = false;
  std::uint64_t generation_ = 0;  ///< number of calls of `drop`
  std::atomic<std::uint64_t> written_{0};
  std::atomic<std::uint64_t> taken_{0};
  std::array<std::atomic<bool>, 2> gone_{};
  std::array<std::atomic<int>, 2> no_room_{};
  std::array<bool, 2> gap_{};       ///< bytes were dropped in the middle of a line; used by the thread
  std::array<bool, 2> mid_line_{};  ///< the last written byte does not end a line; used by the thread
  std::thread thread_;
};

class Display {
 public:
  /// Events since the last query.
  struct News {
    /// Bytes by source that were written, or dropped because the reader is gone.
    std::vector<std::pair<std::size_t, std::uint64_t>> taken;
    bool reader_gone = false;  ///< nobody reads stdout any more; set after each write
    /// Descriptors (1 or 2) that go to a file without space, each reported once, with the errno.
    std::vector<std::pair<int, int>> no_room;
  };
  explicit Display(Loop& loop);

  News take() { return std::exchange(news_, {}); }
  /// To be called before the first `feed`. `ranks`: those that are shown; empty: all, and the other roles. Finds out by
  /// itself where stdout and stderr go.
  void set_up(const JobSpec& spec, const Plan& plan, const std::vector<int>& ranks);
  /// Takes a plan with more ranks; they are shown if all ranks are.
  void grow(const Plan& plan);
  void feed(std::size_t source, const Output& output);
  /// Writes a line of the launcher's own to stderr.
  void say(const std::string& text);
  void write(int fd, std::string text);
  /// Sets the line below all others; empty: none. It is not shown if there is no terminal, or while a rank's unfinished
  /// line or progress bar is there.
  void set_status(std::string text);
  bool reader_gone() const { return console_.reader_gone(1); }
  /// Completes the unfinished lines, when no more output comes.
  void end_lines();

  /// Waits until everything is written, or until the reader has taken no byte for `limit`: then the rest is dropped,
  /// and `complaint` is written to stderr if that is read.
  void drain(std::chrono::milliseconds limit, std::string complaint);
  bool drained() const noexcept { return draining_ == Draining::Done; }

 private:
  void find_terminal();
  std::string status_line() const;
  void on_console();
  /// Returns true if everything is written and all output that did not fit has been reported.
  bool all_out();
  void show(const std::vector<Text>& texts);
  void wait_for_release();
  void wait_for_reader();
  void look_at_reader();
  void give_up();
  void done();

  Loop& loop_;
  News news_;
  Console console_;
  Watch watch_;
  std::optional<OutputView> view_;
  std::deque<std::pair<std::size_t, std::uint64_t>> shown_;  ///< weights that the console has not written yet
  std::uint64_t credited_ = 0;
  std::array<bool, 2> no_room_told_{};
  Timer partial_;
  Timer release_;
  std::vector<bool> hidden_;     ///< by rank
  bool some_hidden_ = false;     ///< --ranks names the ranks that are shown
  int status_fd_ = -1;           ///< the terminal for the status; -1: none
  std::array<bool, 2> on_it_{};  ///< whether stdout and stderr go to that terminal
  std::string status_;
  bool status_shown_ = false;
  bool mid_line_ = false;  ///< the terminal's last line is unfinished

  enum class Draining { No, Begun, Done } draining_ = Draining::No;
  std::chrono::milliseconds limit_{};
  std::string complaint_;
  std::uint64_t seen_ = 0;  ///< bytes that the reader had taken at the last look
  int idle_looks_ = 0;
  Timer look_;
};

}  // namespace cohort::launch
