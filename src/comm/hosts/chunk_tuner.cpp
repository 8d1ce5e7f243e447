#include "comm/hosts/chunk_tuner.h"

#include <algorithm>

namespace cohort::comm::hosts {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kPieceOfOne = 32 * kKiB;
constexpr std::size_t kPieceOfMany = 64 * kKiB;  // where hosts have several ranks
constexpr std::size_t kMostPiece = 1024 * kKiB;
constexpr std::size_t kMostFrame = 64 * kKiB;  // the transport keeps those that come early
constexpr std::size_t kTells = 1024 * kKiB;    // shorter sums take longer than the wire does,
constexpr std::size_t kHints = 128 * kKiB;     // but may show that it is faster than was known
constexpr std::size_t kLeastBlock = 32 * kKiB;
constexpr std::size_t kBlocks = 8;  // a sum has about as many, so that the wire starts early
constexpr std::int64_t kLeastAhead = 3;
constexpr std::chrono::duration<double> kOnTheWay = 1ms;  // so much a rank by itself is ahead,
constexpr double kPiecesOnTheWay = 8;                     // in so many pieces
constexpr std::chrono::duration<double> kBlock = 600us;   // so long a block of several ranks may take

}  // namespace

ChunkTuner::ChunkTuner(const Layout& layout) noexcept
    : hosts_(layout.hosts),
      columns_(layout.stripes),
      alone_(layout.size == layout.hosts),
      least_bytes_(alone_ ? kPieceOfOne : kPieceOfMany) {
  const auto frames = static_cast<std::size_t>(columns_ * (hosts_ > 2 ? hosts_ : 1));  // of a piece
  while (piece_bytes(most_ + 1) <= std::min(kMostPiece, kMostFrame * frames)) ++most_;
}

/// Pieces take the wire's time, not a number of bytes: on a fast one what each costs counts, on a slow one stripes that
/// run apart. With more than two hosts a piece is cut once more.
void ChunkTuner::learn(std::size_t bytes, Duration took) noexcept {
  const std::size_t all = bytes * static_cast<std::size_t>(columns_);
  if (all < kHints || took <= Duration::zero()) return;
  const double rate = static_cast<double>(bytes) / std::chrono::duration<double>(took).count();
  if (all < kTells && rate <= rate_) return;
  rate_ = rate_ == 0 ? rate : (rate_ + rate) / 2;
  const int frames = hosts_ > 2 ? hosts_ : 1;
  const double wanted =
      alone_ ? rate_ * frames * kOnTheWay.count() / kPiecesOnTheWay : rate_ * columns_ * kBlock.count();
  doublings_ = 0;
  while (doublings_ < most_ && static_cast<double>(piece_bytes(doublings_ + 1)) <= wanted) ++doublings_;
}

std::size_t ChunkTuner::block_bytes(std::size_t sum_bytes, int doublings) const noexcept {
  if (alone_) return piece_bytes(doublings);
  return std::clamp(sum_bytes / kBlocks / kLeastBlock * kLeastBlock, kLeastBlock, piece_bytes(doublings));
}

std::int64_t ChunkTuner::ahead(int doublings) const noexcept {
  if (!alone_) return kLeastAhead;
  const double ahead = rate_ * kOnTheWay.count() / static_cast<double>(piece_bytes(doublings));
  return std::clamp(static_cast<std::int64_t>(ahead), kLeastAhead, kMostAhead);
}

}  // namespace cohort::comm::hosts
