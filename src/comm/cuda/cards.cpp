#include "comm/cuda/cards.h"

#include "base/env.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace cohort::comm::cuda {
namespace {

/// NCCL's own switch, which it reads as a number.
bool shares_gpus() {
  const char* const text = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return text != nullptr && std::atoi(text) != 0;
}

template <std::size_t N>
std::string text_in(const char (&from)[N]) {
  return std::string(from, ::strnlen(from, N));
}

std::string named(std::size_t rank, const Card& card) { return fmt::format("rank {} ({})", rank, text_in(card.host)); }

}  // namespace

Card card_of(const Gpu& gpu, const cluster::Placement& placement) {
  Card card;
  card.gpu = gpu.index();
  put_text(card.host, placement.host);
  const Result<Nccl>& nccl = Nccl::find();
  if (!nccl) {
    put_text(card.why, nccl.error().what());
    return card;
  }
  card.version = nccl->version;
  card.shares = shares_gpus() ? 1 : 0;
  const bool several_hosts = placement.local_size < placement.size;
  card.encrypts = several_hosts && env::flag(env::kEncrypt).value_or(false) ? 1 : 0;
  try {
    card.uuid = gpu.uuid();
    const InGpu here(gpu);
    if (placement.rank == 0) {
      const NcclResult result = nccl->call.ncclGetUniqueId(&card.id);
      if (result != NcclResult::Success) {
        put_text(card.why, "ncclGetUniqueId: " + nccl->said(result, nullptr));
        return card;
      }
    }
  } catch (const Error& error) {
    put_text(card.why, error.what());
    return card;
  }
  card.usable = 1;
  return card;
}

std::optional<std::string> obstacle(std::span<const Card> cards) {
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    if (cards[rank].usable == 0) return fmt::format("{}: {}", named(rank, cards[rank]), text_in(cards[rank].why));
  }
  for (std::size_t rank = 1; rank < cards.size(); ++rank) {
    if (cards[rank].version == cards[0].version) continue;
    return fmt::format("{} has NCCL {} and {} has {} -- install the same on all hosts", named(0, cards[0]),
                       Nccl::text_of(cards[0].version), named(rank, cards[rank]), Nccl::text_of(cards[rank].version));
  }
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    if (cards[rank].encrypts == 0) continue;
    return fmt::format("{} is to encrypt what it sends to other hosts (COHORT_ENCRYPT=1), which NCCL does not",
                       named(rank, cards[rank]));
  }
  std::map<std::array<unsigned char, 16>, std::size_t> known;
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    const Card& card = cards[rank];
    const auto [found, fresh] = known.emplace(card.uuid, rank);
    if (fresh) continue;
    const Card& other = cards[found->second];
    const bool new_enough = card.version >= Nccl::kSharesGpus;
    if (new_enough && card.shares != 0 && other.shares != 0) continue;
    return fmt::format(
        "{} and {} share one GPU (cuda:{} and cuda:{} there), which NCCL {} refuses -- give each rank a GPU of its own "
        "(cuda:LOCAL_RANK){}",
        named(found->second, other), named(rank, card), other.gpu, card.gpu, Nccl::text_of(card.version),
        new_enough ? ", or set NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks" : "");
  }
  return std::nullopt;
}

std::optional<std::string> obstacle(std::span<const Start> starts, std::span<const Card> cards) {
  for (std::size_t rank = 0; rank < starts.size(); ++rank) {
    if (starts[rank].made == 0)
      return fmt::format("{}: NCCL does not start: {}", named(rank, cards[rank]), text_in(starts[rank].why));
  }
  return std::nullopt;
}

}  // namespace cohort::comm::cuda
