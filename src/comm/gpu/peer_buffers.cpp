#include "comm/gpu/peer_buffers.h"

#include "comm/gpu/exact_sums.h"
#include "comm/gpu/fold_launcher.h"
#include "comm/gpu/nccl_thread.h"

#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <random>
#include <string_view>
#include <utility>

namespace cohort::comm::cuda {
namespace {

constexpr std::size_t kPattern = 4096;  // elements of 4 bytes
constexpr auto kNever = std::chrono::steady_clock::time_point::max();

/// Returns an ID of this process that differs from all others', including its forked children's.
std::array<std::uint32_t, 5> this_process() {
  static const auto random = [] {
    std::random_device source;
    return std::array<std::uint32_t, 4>{source(), source(), source(), source()};
  }();
  return {random[0], random[1], random[2], random[3], static_cast<std::uint32_t>(::getpid())};
}

std::vector<std::uint32_t> pattern_of(std::uint32_t seed, std::size_t half) {
  std::vector<std::uint32_t> pattern(kPattern);
  for (std::uint32_t i = 0; i < kPattern; ++i)
    pattern[i] = (i + 1) * 2654435761u ^ (seed + static_cast<std::uint32_t>(half));
  return pattern;
}

}  // namespace

struct PeerBuffers::Offer {
  std::array<std::uint32_t, 5> process{};
  std::uint32_t seed = 0;
  std::int32_t gpu = -1;
  void* memory = nullptr;
  IpcHandle handle;
  char why[200] = {};  // the reason if there is no buffer
};

bool PeerBuffers::fit(std::span<const DeviceRequest> requests) noexcept {
  std::size_t bytes = 0;
  for (const DeviceRequest& request : requests) {
    if (request.device.type != DeviceType::CUDA) return false;
    if (request.kind != Kind::AllReduce && request.kind != Kind::Reduce) return false;
    if (!ExactSums::has(request) || request.input_bytes() > kBytes) return false;
    bytes += room_of(request.input_bytes());
  }
  return bytes <= kBytes;
}

std::byte* PeerBuffers::next() noexcept {
  half_ = 1 - half_;
  return bases_[own_] + half_ * kBytes;
}
const std::byte* PeerBuffers::of(int rank) const noexcept {
  return bases_[static_cast<std::size_t>(rank)] + half_ * kBytes;
}

PeerBuffers::~PeerBuffers() {
  for (void* const memory : opened_) gpu_.close_shared(memory);
  if (bases_[own_] != nullptr) gpu_.free(bases_[own_]);
}

PeerBuffers::Offer PeerBuffers::offer() {
  Offer own;
  own.process = this_process();
  own.seed = std::random_device()();
  own.gpu = gpu_.index();
  FoldLauncher::on(gpu_);
  own.memory = bases_[own_] = static_cast<std::byte*>(gpu_.reserve(2 * kBytes + kPattern * sizeof(std::uint32_t)));
  own.handle = gpu_.share(own.memory);
  return own;
}

void PeerBuffers::open(std::span<const Offer> offers) {
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    const Offer& offer = offers[rank];
    if (rank == own_) continue;
    if (offer.process == offers[own_].process && offer.gpu == gpu_.index()) {
      bases_[rank] = static_cast<std::byte*>(offer.memory);
    } else {
      opened_.push_back(gpu_.open_shared(offer.handle));
      bases_[rank] = static_cast<std::byte*>(opened_.back());
    }
  }
}

void PeerBuffers::write_pattern(const Offer& own) {
  std::byte* const to = next();
  const std::vector<std::uint32_t> pattern = pattern_of(own.seed, half_);
  const Stream stream = gpu_.make_stream();
  const MarkPtr begun = gpu_.mark(stream);
  gpu_.end_stream(stream);
  gpu_.wait(*gpu_.copy_to_device(to, pattern.data(), kPattern * sizeof(std::uint32_t), *begun), kNever);
}

void PeerBuffers::check_sum_of_patterns(std::span<const Offer> offers) {
  std::vector<std::uint32_t> wanted(kPattern), found(kPattern);
  ExactFold sum;
  sum.job.dtype = DType::UInt32;
  sum.job.count = kPattern;
  sum.output = bases_[own_] + 2 * kBytes;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    const std::vector<std::uint32_t> pattern = pattern_of(offers[rank].seed, half_);
    std::transform(wanted.begin(), wanted.end(), pattern.begin(), wanted.begin(), std::plus<>());
    sum.inputs.push_back(of(static_cast<int>(rank)));
  }
  const Stream stream = gpu_.make_stream();
  FoldLauncher::on(gpu_).fold(sum.bound(), stream);
  const MarkPtr folded = gpu_.mark(stream);
  gpu_.end_stream(stream);
  gpu_.wait(*gpu_.copy_to_host(found.data(), sum.output, kPattern * sizeof(std::uint32_t), *folded), kNever);
  if (found != wanted) raise(ErrorCode::Unavailable, "cuda:{} does not read what other ranks write", gpu_.index());
}

std::shared_ptr<PeerBuffers> PeerBuffers::make(Gpu& gpu, const rendezvous::Placement& placement, Turn& turn,
                                               std::string& why) {
  using Clock = std::chrono::steady_clock;
  const auto limit = Clock::now() + (turn.deadline() - Clock::now()) / 2;
  auto made = std::shared_ptr<PeerBuffers>(new PeerBuffers(gpu, placement));
  Offer own;
  std::vector<Offer> offers(made->bases_.size());
  // A driver that compiles, allocates or frees may wait for a stream that hangs, so a separate thread makes these
  // calls; if it hangs, it is abandoned together with the buffers.
  NcclThread thread(gpu);
  const auto on_thread = [&thread](std::shared_ptr<PeerBuffers> self, std::function<void(PeerBuffers&)> body) {
    thread.make([self = std::move(self), body = std::move(body)] {
      if (body) body(*self);
      return NcclResult::Success;
    });
  };
  const std::shared_ptr<void> at_the_end(nullptr, [&](void*) {
    if (made && thread.over()) on_thread(std::move(made), {});
  });
  // Errors on this rank are reported to all ranks, which take part in every exchange.
  const auto attempt = [&](std::function<void(PeerBuffers&)> body) {
    if (own.why[0] != '\0') return;
    on_thread(made, std::move(body));
    for (Pauses pauses; !thread.over() && Clock::now() < limit; pauses.take()) turn.attend();
    const auto failed = [&](std::string_view text) { own.why[text.copy(own.why, sizeof own.why - 1)] = '\0'; };
    if (!thread.over()) return failed("its driver has not set them up in time");
    try {
      thread.result();
    } catch (const Error& error) {
      failed(error.what());
    }
  };
  const auto all_could = [&] {
    turn.exchange(&own, offers.data(), sizeof own);
    const auto failed = std::find_if(offers.begin(), offers.end(), [](const Offer& one) { return one.why[0] != '\0'; });
    if (failed != offers.end()) why = fmt::format("rank {}: {}", failed - offers.begin(), failed->why);
    return failed == offers.end();
  };
  const auto offered = std::make_shared<Offer>();
  attempt([offered](PeerBuffers& self) { *offered = self.offer(); });
  if (own.why[0] == '\0') own = *offered;
  if (!all_could()) return nullptr;
  attempt([offers](PeerBuffers& self) { self.open(offers); });
  for (int half = 0; half < 2; ++half) {
    attempt([offered](PeerBuffers& self) { self.write_pattern(*offered); });
    if (!all_could()) return nullptr;
    attempt([offers](PeerBuffers& self) { self.check_sum_of_patterns(offers); });
  }
  return all_could() ? std::exchange(made, nullptr) : nullptr;
}

}  // namespace cohort::comm::cuda
