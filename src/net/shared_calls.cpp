#include "net/shared_calls.h"

#include "base/thread.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>

namespace cohort::net {

// Fields that the other end may write at any time are atomics, and each is read only once.
struct SharedCall {
  std::atomic<std::uint32_t> state;  // written by the server
  // Written by the client, before the call is queued.
  std::atomic<std::uint32_t> method;
  std::atomic<std::uint32_t> blocks;
  std::atomic<std::uint32_t> body;  // bytes
  // Written by the server, before it sets `state`: position of the answer in the call's blocks, and its length.
  std::atomic<std::uint32_t> answer_at;
  std::atomic<std::uint32_t> answer;
  std::array<std::uint32_t, 10> unused;
};
static_assert(sizeof(SharedCall) == 64);

struct SharedControl {
  static constexpr std::uint64_t kMagic = 0x31'4C'4C'41'43'48'4F'43;  // identifies this layout

  std::uint64_t magic;
  std::atomic<std::uint32_t> crowded;              // written by the server
  alignas(64) std::atomic<std::uint32_t> begun;    // written by the client: number of calls so far
  alignas(64) std::atomic<std::uint32_t> asleep;   // set by the server, cleared by the client
  alignas(64) std::atomic<std::uint32_t> answers;  // written by the server: number so far; clients sleep on it
  alignas(64) std::atomic<std::uint32_t> sleepers;
  alignas(64) std::array<std::atomic<std::uint32_t>, 64> queue;  // first blocks of calls; the n-th call is at n % 64
  std::array<SharedCall, kSharedBlocks> calls;
};
static_assert(sizeof(SharedControl) <= kSharedBlock);
static_assert(kSharedBlocks < 64 && std::atomic<std::uint32_t>::is_always_lock_free);

namespace {

constexpr std::uint32_t kUnderWay = 0, kAnswered = 1, kElsewhere = 2;
constexpr std::size_t kLine = 64;
constexpr std::size_t kLeastRoom = 512;  // space for answers without rows, mostly errors
constexpr auto kRelaxed = std::memory_order_relaxed;

constexpr std::size_t aligned(std::size_t bytes) noexcept { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

// ---- the server's end ----

Result<SharedCallsServer> SharedCallsServer::make() {
  auto segment = sys::create_shared_segment("cohort-calls", kSharedBytes);
  if (!segment) return tl::unexpected(segment.error());
  auto* const control = new (segment->mapping.data()) SharedControl{};
  control->magic = SharedControl::kMagic;
  return SharedCallsServer(*std::move(segment));
}

SharedCallsServer::SharedCallsServer(sys::SharedSegment segment) : segment_(std::move(segment)) {}

bool SharedCallsServer::any() const noexcept { return control().begun.load(std::memory_order_acquire) != taken_; }

Result<std::optional<SharedCallsServer::Call>> SharedCallsServer::next() {
  const std::uint32_t begun = control().begun.load(std::memory_order_acquire);
  if (begun == taken_) return std::nullopt;
  if (begun - taken_ > kSharedBlocks)
    return fail(ErrorCode::Corrupt, "{} calls at once in shared memory", begun - taken_);
  const std::uint32_t order = taken_++;
  const std::uint32_t number = control().queue[order % 64].load(kRelaxed);
  if (number >= kSharedBlocks) return fail(ErrorCode::Corrupt, "call {} in shared memory", number);
  SharedCall& call = control().calls[number];
  const std::uint32_t blocks = call.blocks.load(kRelaxed), size = call.body.load(kRelaxed);
  const std::uint32_t method = call.method.load(kRelaxed);
  if (blocks == 0 || blocks > kSharedBlocks - number || size > blocks * kSharedBlock || method > 0xFF)
    return fail(ErrorCode::Corrupt, "call {} in shared memory: {} bytes in {} blocks", number, size, blocks);
  for (std::uint32_t i = 0; i < kSharedBlocks; ++i) {
    if (under_way_[i].blocks > 0 && i < number + blocks && number < i + under_way_[i].blocks)
      return fail(ErrorCode::Corrupt, "calls {} and {} in shared memory overlap", i, number);
  }
  if (body_.size() < size) body_.resize(size);
  if (size > 0) std::memcpy(body_.data(), block(number), size);
  const SharedCallId id(order, number);
  under_way_[number] = {id.value(), blocks, size};
  return Call{id, static_cast<std::uint8_t>(method), {body_.data(), size}};
}

bool SharedCallsServer::under_way(SharedCallId id) const noexcept {
  return id.block() < kSharedBlocks && under_way_[id.block()].blocks > 0 && under_way_[id.block()].id == id.value();
}

void SharedCallsServer::tell(std::uint32_t number, std::uint32_t state) noexcept {
  under_way_[number] = {};
  control().calls[number].state.store(state, std::memory_order_release);
  control().answers.fetch_add(1);
  // A thread that increments `sleepers` after this check sees the new number of answers, and does not sleep.
  if (control().sleepers.load() != 0) sys::futex_wake_all(control().answers);
}

SharedCallsServer::Answered SharedCallsServer::answer(SharedCallId id, std::string_view head, std::size_t bytes,
                                                      const std::function<void(char*)>& fill) {
  if (!under_way(id)) return Answered::NoSuchCall;
  const std::uint32_t number = id.block(), blocks = under_way_[number].blocks, body = under_way_[number].body;
  // The payload behind the head begins at a cache line, so that rows are copied by whole lines.
  const std::size_t payload_at = aligned(aligned(body) + head.size());
  if (payload_at + bytes > blocks * kSharedBlock) return Answered::TooLong;
  const std::size_t at = payload_at - head.size();
  if (!head.empty()) std::memcpy(block(number) + at, head.data(), head.size());
  if (bytes > 0) fill(block(number) + payload_at);
  control().calls[number].answer_at.store(static_cast<std::uint32_t>(at), kRelaxed);
  control().calls[number].answer.store(static_cast<std::uint32_t>(head.size() + bytes), kRelaxed);
  tell(number, kAnswered);
  return Answered::Yes;
}

void SharedCallsServer::answer_elsewhere(SharedCallId id) {
  if (under_way(id)) tell(id.block(), kElsewhere);
}

bool SharedCallsServer::go_to_sleep() noexcept {
  control().asleep.store(1);
  // A client that begins a call after this check sees that the server sleeps.
  if (control().begun.load() == taken_) return true;
  control().asleep.store(0);
  return false;
}

void SharedCallsServer::wake_up() noexcept { control().asleep.store(0, kRelaxed); }

void SharedCallsServer::set_crowded(bool crowded) noexcept { control().crowded.store(crowded ? 1 : 0, kRelaxed); }

// ---- the client's end ----

Result<std::unique_ptr<SharedCallsClient>> SharedCallsClient::map(const sys::UniqueFd& descriptor) {
  if (!descriptor) return fail(ErrorCode::Unavailable, "no descriptor came -- raise the limit of open files");
  auto mapping = sys::map_shared_segment(descriptor.get(), kSharedBytes);
  if (!mapping) return tl::unexpected(mapping.error());
  sys::populate(*mapping);
  auto client = std::unique_ptr<SharedCallsClient>(new SharedCallsClient(*std::move(mapping)));
  if (client->control().magic != SharedControl::kMagic)
    return fail(ErrorCode::Mismatch, "its memory has another layout -- are both ends of the same version?");
  return client;
}

std::uint32_t SharedCallsClient::blocks_for(std::size_t body, std::size_t room) noexcept {
  if (body > kSharedBytes || room > kSharedBytes) return kSharedBlocks + 1;
  // Alignment may add space before and after the answer's head.
  const std::size_t bytes = aligned(body) + std::max(room, kLeastRoom) + kLine;
  return static_cast<std::uint32_t>((bytes + kSharedBlock - 1) / kSharedBlock);
}

std::optional<SharedCallId> SharedCallsClient::begin(std::uint8_t method, std::string_view body, std::size_t room) {
  // Use the lowest free blocks that suffice, so that recently used blocks, which are in caches, are reused.
  const std::uint32_t blocks = blocks_for(body.size(), room);
  const std::uint64_t run = (std::uint64_t{1} << blocks) - 1;
  std::uint32_t number = 0;
  while (number + blocks <= kSharedBlocks && (used_ & (run << number)) != 0) ++number;
  if (number + blocks > kSharedBlocks) return std::nullopt;
  used_ |= run << number;
  blocks_[number] = blocks;
  if (!body.empty()) std::memcpy(block(number), body.data(), body.size());
  SharedCall& call = control().calls[number];
  call.state.store(kUnderWay, kRelaxed);
  call.method.store(method, kRelaxed);
  call.blocks.store(blocks, kRelaxed);
  call.body.store(static_cast<std::uint32_t>(body.size()), kRelaxed);
  const SharedCallId id(begun_, number);
  control().queue[begun_ % 64].store(number, kRelaxed);
  control().begun.store(++begun_);
  return id;
}

bool SharedCallsClient::has_to_ring() noexcept {
  return control().asleep.load() != 0 && control().asleep.exchange(0) != 0;
}

SharedCallsClient::State SharedCallsClient::state(SharedCallId id) const noexcept {
  switch (control().calls[id.block()].state.load(std::memory_order_acquire)) {
    case kUnderWay: return State::UnderWay;
    case kAnswered: return State::Answered;
    default: return State::Elsewhere;
  }
}

Result<std::string_view> SharedCallsClient::answer(SharedCallId id) const {
  const std::uint32_t number = id.block();
  const std::size_t at = control().calls[number].answer_at.load(kRelaxed);
  const std::size_t size = control().calls[number].answer.load(kRelaxed);
  if (at + size > blocks_[number] * kSharedBlock)
    return fail(ErrorCode::Corrupt, "an answer of {} bytes at {} in {} blocks", size, at, blocks_[number]);
  return std::string_view(block(number) + at, size);
}

void SharedCallsClient::free(SharedCallId id) noexcept {
  const std::uint32_t number = id.block();
  const std::uint64_t run = (std::uint64_t{1} << std::exchange(blocks_[number], 0)) - 1;
  used_ &= ~(run << number);
}

std::uint32_t SharedCallsClient::answers() const noexcept { return control().answers.load(std::memory_order_acquire); }

bool SharedCallsClient::wait(std::uint32_t seen, std::chrono::nanoseconds limit) noexcept {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  if (control().crowded.load(kRelaxed) == 0) {
    const auto until = begin + spin_.now();
    while (answers() == seen && Clock::now() < until) {
      for (int i = 0; i < 32 && answers() == seen; ++i) sys::cpu_relax();
    }
  }
  if (answers() == seen) {
    control().sleepers.fetch_add(1);
    if (control().answers.load() == seen) sys::futex_wait(control().answers, seen, limit);
    control().sleepers.fetch_sub(1);
  }
  spin_.waited(Clock::now() - begin);
  return answers() != seen;
}

}  // namespace cohort::net
