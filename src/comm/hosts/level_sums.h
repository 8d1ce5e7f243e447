// A sum over many hosts by levels (levels.h): a range of elements is divided at each level into parts, each slot folds
// its part of what its group's members bring, and results return the same way. Belongs to the thread that runs
// operations; frames use memory of this object, so it is kept until the world has ended or all stages are over.
#pragma once

#include "comm/api/request.h"
#include "comm/transport/transport.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cohort::comm::hosts {

class Context;

class LevelSum {
 public:
  struct Options {
    const Request* request = nullptr;
    const std::byte* partial = nullptr;  ///< this host's sum of the range
    std::byte* result = nullptr;         ///< may be the same memory
    std::int64_t count = 0;              ///< elements
    std::int64_t index = 0;              ///< position of the first element in the whole sum
    std::int64_t number = 0;             ///< distinguishes ranges that are in transit together; the same on all hosts
    std::int64_t divisor = 1;
    std::size_t unit = 64;  ///< bytes that are not divided
    int local = 0;          ///< the stripe
    /// Hosts' sums travel encoded, as the request says, and so do results. Sums of several hosts travel in float32.
    bool coded = false;
    const std::vector<bool>* brings = nullptr;  ///< by host, whether it has a sum; null: all have
  };
  /// Most ranges that may be in transit together.
  static constexpr std::int64_t kMostRanges = 32;

  /// Begins the first stage. Each level has two: in one, parts are folded; in the other, results return.
  void begin(Context& context, const Options& options);
  /// Completes the stage that is under way, and begins the next, or completes the result.
  void advance(Context& context);

 private:
  static std::uint32_t tag_of(std::int64_t number, int stage, int level, int slot, int source) noexcept;
  Slice range(const Context& context, int level, int slot) const noexcept;
  std::size_t on_wire(std::int64_t elements, bool coded) const noexcept;
  bool has(const Context& context, int level, int member) const noexcept;
  void send(Context& context, int host, int level, int slot, int source, const std::byte* data, std::size_t bytes);
  void receive(Context& context, int host, int level, int slot, int source, std::byte* to, std::size_t bytes);
  void begin_up(Context& context, int level);
  void fold_up(Context& context, int level);
  void fold_slot(Context& context, int level, int slot, const std::byte* raw, std::byte* to);
  void begin_down(Context& context, int level);

  Options options_;
  std::size_t element_ = 0;
  int stage_ = 0;
  std::vector<const std::byte*> sums_;  // by held slot of the level
  std::vector<std::byte> memory_[2];    // for the sums of one level, and of the next
  std::vector<std::byte> raw_;          // received at a level: by held slot of the next level, by member
  std::vector<std::byte> coded_;        // the range as it is sent in a wire format; later its results
  std::vector<float> wide_;             // inputs of one slot, decoded
  std::vector<const void*> inputs_;
  std::vector<transport::Outgoing> out_;
  std::vector<transport::Incoming> in_;
  std::size_t sent_ = 0, received_ = 0;  // frames of the stage
};

}  // namespace cohort::comm::hosts
