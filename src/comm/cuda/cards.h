// What the ranks of a world tell each other of their GPUs and their NCCL, and whether NCCL serves them: the same answer
// on all of them. Plain values of one layout, which travel between the ranks of one build; pure, any thread.
#pragma once

#include "cluster/identity.h"
#include "comm/cuda/driver.h"
#include "comm/cuda/nccl.h"

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace cohort::comm::cuda {

struct Card {
  std::int32_t usable = 0;  ///< it has NCCL and a GPU
  std::int32_t version = 0;
  std::int32_t gpu = -1;
  std::int32_t shares = 0;    ///< NCCL_MULTI_RANK_GPU_ENABLE
  std::int32_t encrypts = 0;  ///< what it sends to other hosts, and there are any
  std::array<unsigned char, 16> uuid{};
  NcclId id{};         ///< rank 0's
  char host[64] = {};  ///< its name for messages, cut; two hosts may have one
  char why[256] = {};  ///< where it is not usable
};

/// This rank's. Rank 0 makes the id.
Card card_of(const Gpu& gpu, const cluster::Placement& placement);
/// Why NCCL does not serve these ranks; nullopt if it does.
std::optional<std::string> obstacle(std::span<const Card> cards);

/// How it went, on each rank, to make its communicator.
struct Start {
  std::int32_t made = 0;
  char why[252] = {};
};
std::optional<std::string> obstacle(std::span<const Start> starts, std::span<const Card> cards);

/// Copies as much of it as there is room for.
template <std::size_t N>
void put_text(char (&to)[N], std::string_view text) noexcept {
  to[text.copy(to, N - 1)] = '\0';
}

}  // namespace cohort::comm::cuda
