// How long the pieces of large sums are and how many of them are on the way, as the wire turns out to be. Each rank
// learns for itself; as all have to cut alike, each says how often it would like pieces doubled, and the least counts.
// Belongs to an engine and its thread.
#pragma once

#include "comm/hosts/layout.h"

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace cohort::comm::hosts {

class ChunkTuner {
 public:
  using Duration = std::chrono::steady_clock::duration;
  explicit ChunkTuner(const Layout& layout) noexcept;

  /// Of this rank's stripe, an operation has moved so many bytes each way in this time.
  void learn(std::size_t bytes, Duration took) noexcept;
  /// How often this rank would like pieces doubled, up to `most`.
  int doublings() const noexcept { return doublings_; }
  int most() const noexcept { return most_; }

  /// Bytes of a piece, on a host with several ranks of all its stripes together.
  std::size_t piece_bytes(int doublings = 0) const noexcept { return least_bytes_ << doublings; }
  /// Of a sum of so many bytes, what the ranks of a host reduce at once; of a rank that has nobody to meet there, a
  /// piece.
  std::size_t block_bytes(std::size_t sum_bytes, int doublings) const noexcept;
  /// How many pieces a rank may be ahead of what it has received, up to `kMostAhead`. What is sent further ahead than
  /// the wire needs waits in queues, and acknowledgements of the other direction wait behind it: the two directions of
  /// a link end up taking turns. With less than it needs the wire runs dry.
  std::int64_t ahead(int doublings) const noexcept;
  static constexpr std::int64_t kMostAhead = 24;

 private:
  const int hosts_;
  const int columns_;
  const bool alone_;  // one rank on each host
  const std::size_t least_bytes_;
  int most_ = 0;
  double rate_ = 0;  // bytes per second of this rank, of late
  int doublings_ = 0;
};

}  // namespace cohort::comm::hosts
