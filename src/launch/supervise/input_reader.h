// Reads this process's stdin for rank 0, no faster than rank 0 reads, where that cannot have it itself: a terminal, and
// a rank on another host. One thread.
#pragma once

#include "launch/loop.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace cohort::launch {

class InputReader {
 public:
  /// Hands over what comes in; empty: the end, once.
  using OnInput = std::function<void(std::string)>;
  InputReader(Loop& loop, int fd, OnInput on_input);

  /// So many bytes have gone on to the rank.
  void taken(std::uint64_t bytes);
  /// A terminal is read only from the foreground, since reading from the background stops a process; ask again after
  /// SIGCONT.
  void look_again();

  /// False for a closed descriptor and for /dev/null.
  static bool worth_reading(int fd);
  /// True for what a rank on this host can have itself: then nothing is taken from the caller that no rank reads. A
  /// terminal it cannot, since it would read that in the background, too.
  static bool may_be_given(int fd);

 private:
  void read_some();
  void update();

  int fd_;
  OnInput on_input_;
  Watch watch_;
  std::uint64_t under_way_ = 0;
  bool ended_ = false;
};

}  // namespace cohort::launch
