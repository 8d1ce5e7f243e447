#include "base/env.h"
#include "base/log.h"
#include "base/thread.h"
#include "comm/gpu/nccl_plane.h"

#include <algorithm>
#include <bit>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::comm::cuda {
namespace {

/// Returns NCCL's switch NCCL_MULTI_RANK_GPU_ENABLE, which NCCL reads as a number.
bool shares_gpus() {
  const char* const text = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return text != nullptr && std::atoi(text) != 0;
}

template <std::size_t N>
std::string text_in(const char (&from)[N]) {
  return std::string(from, ::strnlen(from, N));
}

std::string named(std::size_t rank, const Card& card) { return fmt::format("rank {} ({})", rank, text_in(card.host)); }

/// Returns this rank's card. Rank 0 creates the id.
Card card_of(const Gpu& gpu, const rendezvous::Placement& placement) {
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

}  // namespace

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

namespace {

// Creates and destroys the NCCL communicator.

using namespace std::chrono_literals;

constexpr auto kMostToStart = 60s;     // time for NCCL to connect the ranks; if exceeded, operations are staged
constexpr auto kEnding = 2s;           // time for NCCL to free its resources
constexpr auto kEndingBroken = 200ms;  // the same if the world has ended, since the caller waits for the error
constexpr auto kReturning = 50ms;      // time for a call to return before its communicator is destroyed
constexpr std::size_t kLeastScratch = std::size_t{1} << 20;
constexpr std::int32_t kNoMemory = -1;  // reported by a rank that has kernels, but too little memory
constexpr auto kTelling = 100ms;        // time for other hosts to learn of the end, before kernels finish without data

/// Runs a function that may hang on a thread of its own, and abandons the thread if it does.
template <class Body>
bool within(std::chrono::milliseconds limit, Body body) noexcept {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  try {
    const auto shared = std::make_shared<Shared>();
    sys::start_without_signals([shared, body] {
      body();
      const std::lock_guard lock(shared->mutex);
      shared->done = true;
      shared->changed.notify_all();
    }).detach();
    std::unique_lock lock(shared->mutex);
    return shared->changed.wait_for(lock, limit, [&] { return shared->done; });
  } catch (const std::exception&) {  // the thread could not be started
    return false;
  }
}

}  // namespace

NcclPlane::~NcclPlane() {
  if (::getpid() != home_) {  // in a forked child, everything belongs to the parent
    static_cast<void>(thread_.release());
    return;
  }
  end_comm(state_.load(std::memory_order_relaxed) != State::Broken);
  if (stream_ != nullptr) gpu_->end_stream(stream_);
}

bool NcclPlane::form(Gpu& gpu, Turn& turn) {
  if (state_.load(std::memory_order_relaxed) != State::Unknown) return false;
  std::vector<Card> cards(static_cast<std::size_t>(placement_.size));
  const Card own = card_of(gpu, placement_);
  turn.exchange(&own, cards.data(), sizeof own);
  auto why = obstacle(cards);
  if (!why) {
    gpu_ = &gpu;
    nccl_ = &*Nccl::find();
    const Start made = start(cards.front().id, turn);
    std::vector<Start> starts(cards.size());
    turn.exchange(&made, starts.data(), sizeof made);
    why = obstacle(starts, cards);
  }
  if (why) {
    end_comm(false);
    const auto text = fmt::format("GPU memory is staged through host memory, without NCCL -- {}", *why);
    if (placement_.rank == 0 && env::text(env::kNccl) == "off") {
      log::info("comm", "{}", text);
    } else if (placement_.rank == 0) {
      log::warn("comm", "{}", text);
    }
    state_.store(State::Staging, std::memory_order_release);
    return false;
  }
  stream_ = gpu.make_stream();
  if (placement_.rank == 0) {
    log::info("comm", "NCCL {} carries out what {} ranks do with memory of GPUs ({})", Nccl::text_of(nccl_->version),
              placement_.size, nccl_->path);
  }
  state_.store(State::Nccl, std::memory_order_release);
  return true;
}

Start NcclPlane::start(const NcclId& id, Turn& turn) {
  /// Shared by the call and the thread that waits for it; the last of the two destroys an unneeded communicator.
  struct Making {
    NcclComm comm = nullptr;
    std::atomic<bool> left{false};
  };
  Start made;
  const auto making = std::make_shared<Making>();
  const Nccl& nccl = *nccl_;
  thread_ = std::make_unique<NcclThread>(*gpu_);
  thread_->make([making, &nccl, id, size = placement_.size, rank = placement_.rank] {
    NcclConfig config;
    const NcclResult result = nccl.call.ncclCommInitRankConfig(&making->comm, size, id, rank, &config);
    if (making->left.exchange(true) && making->comm != nullptr) nccl.call.ncclCommAbort(making->comm);
    return result;
  });
  // Ranks that fail wait for the others in the following exchange, so the others have to reach it within the
  // operation's time.
  const auto now = Clock::now();
  const auto limit = now + std::min<Clock::duration>(kMostToStart, (turn.deadline() - now) / 2);
  for (Pauses pauses; !thread_->over() && Clock::now() < limit; pauses.take()) {
    try {
      turn.attend();
    } catch (...) {
      if (making->left.exchange(true)) comm_ = making->comm;
      throw;
    }
  }
  if (!making->left.exchange(true)) {
    put_text(made.why, "the ranks did not connect in time; NCCL_DEBUG=INFO tells which networks it tries");
    return made;
  }
  for (Pauses pauses; !thread_->over();) pauses.take();  // the call is about to return
  comm_ = making->comm;
  const NcclResult result = thread_->result();
  made.made = result == NcclResult::Success ? 1 : 0;
  if (made.made == 0) put_text(made.why, nccl_->said(result, comm_));
  return made;
}

bool NcclPlane::can_fold(std::span<const Request> sums, Turn& turn) {
  if (folding_ == Folding::None || placement_.size > static_cast<int>(FoldLauncher::kMostInputs)) return false;
  if (order_over(static_cast<std::int64_t>(world_.on.size())) != FoldOrder::Ascending)
    return false;  // Cohort's kernels have only the ascending order
  const std::size_t wanted = ExactSums::scratch_of(sums, world_);
  if (wanted <= agreed_scratch_ && folding_ == Folding::Known) return true;
  // A driver that compiles or allocates may wait for all work under way on the GPU. That work can finish, because all
  // ranks have queued it on their GPUs, or are about to.
  const std::size_t bytes = std::bit_ceil(std::max(wanted, kLeastScratch));
  Scratch outgrown;
  Start own;
  try {
    folds_ = &FoldLauncher::on(*gpu_);
    folding_ = Folding::Known;
    if (scratch_.bytes < bytes) outgrown = std::exchange(scratch_, reserve(bytes));
    own.made = 1;
  } catch (const Error& error) {
    put_text(own.why, error.what());
    if (folding_ == Folding::Known) own.made = kNoMemory;
  }
  if (outgrown.memory != nullptr) {
    gpu_->wait(*gpu_->mark(stream_), turn.deadline(), [&] { turn.attend(); });  // kernels use the old memory until then
    reserved_.erase(std::find(reserved_.begin(), reserved_.end(), outgrown.memory));
    gpu_->free(outgrown.memory);
  }
  std::vector<Start> all(static_cast<std::size_t>(placement_.size));
  turn.exchange(&own, all.data(), sizeof own);
  const auto failed = std::find_if(all.begin(), all.end(), [](const Start& one) { return one.made != 1; });
  if (failed == all.end()) {
    agreed_scratch_ = bytes;
    return true;
  }
  if (std::any_of(all.begin(), all.end(), [](const Start& one) { return one.made == 0; })) folding_ = Folding::None;
  if (placement_.rank == 0 && (folding_ == Folding::None || !told_of_memory_)) {
    told_of_memory_ = true;
    log::warn("comm", "{} are staged through host memory -- rank {} cannot fold on its GPU: {}",
              folding_ == Folding::None ? "sums that are not NCCL's" : "some sums", failed - all.begin(), failed->why);
  }
  return false;
}

NcclPlane::Scratch NcclPlane::reserve(std::size_t bytes) {
  reserved_.push_back(gpu_->reserve(bytes));
  return {reserved_.back(), bytes};
}

void NcclPlane::end_comm(bool healthy) noexcept {
  NcclComm comm = nullptr;
  {
    const std::lock_guard lock(calls_);
    comm = std::exchange(comm_, nullptr);
    if (shares_ && !healthy) shares_->forget();
    shares_.reset();
  }
  if (comm == nullptr) return;
  // Work that may hang may still use the memory.
  const auto reserved = healthy ? std::exchange(reserved_, {}) : std::vector<void*>();
  const auto end = healthy ? nccl_->call.ncclCommDestroy : nccl_->call.ncclCommAbort;
  const bool several_hosts = placement_.local_size < placement_.size;
  const auto before = healthy || !several_hosts ? 0ms : kTelling;
  const bool ended =
      within(healthy ? kEnding : kEndingBroken, [end, comm, before, gpu = gpu_, reserved, calling = calling_] {
        try {
          std::this_thread::sleep_for(before);
          const auto limit = std::chrono::steady_clock::now() + kReturning;
          for (Pauses pauses; *calling && std::chrono::steady_clock::now() < limit;) pauses.take();
          const InGpu here(*gpu);
          end(comm);
          for (void* const memory : reserved) gpu->free(memory);
        } catch (const Error&) {  // the GPU has failed, so nothing can be freed
        }
      });
  if (!ended) log::info("comm", "cuda:{} still ends what a communicator has there", gpu_->index());
}

}  // namespace cohort::comm::cuda
