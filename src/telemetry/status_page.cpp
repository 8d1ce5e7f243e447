#include "telemetry/status_page.h"

#include "base/env.h"
#include "telemetry/timeline.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <mutex>
#include <new>

namespace cohort::status {
namespace {

// Claims the page for this process. Only the first process writes it. (A wrapper's second program has a page that
// nobody reads.) Programs that a rank starts inherit the variable, but mostly not the descriptor, so its number may
// belong to another file.
bool claim(StatusLayout& layout) noexcept {
  std::int32_t nobody = 0;
  return layout.magic == StatusLayout::kMagic &&
         layout.pid.compare_exchange_strong(nobody, static_cast<std::int32_t>(::getpid()));
}

template <std::size_t Bytes>
void copy_text(char (&to)[Bytes], std::string_view text) noexcept {
  const std::size_t length = std::min(text.size(), Bytes - 1);
  std::memcpy(to, text.data(), length);
  std::memset(to + length, 0, Bytes - length);
}

template <std::size_t Words>
void store_text(std::array<std::atomic<std::uint64_t>, Words>& to, std::string_view text) noexcept {
  for (auto& word : to) {
    std::uint64_t letters = 0;
    const std::size_t length = std::min(text.size(), sizeof letters);
    std::memcpy(&letters, text.data(), length);
    word.store(letters, std::memory_order_relaxed);
    text.remove_prefix(length);
  }
}

}  // namespace

Result<sys::SharedSegment> create_status_page() {
  auto segment = sys::create_shared_segment("cohort-status", kStatusBytes);
  if (!segment) return segment;
  (new (segment->mapping.data()) StatusLayout{})->magic = StatusLayout::kMagic;
  (void)::lseek(segment->fd.get(), kStatusStacksBegin, SEEK_SET);  // for stacks that another process asks for
  return segment;
}

StatusPage& StatusPage::own() noexcept {
  static StatusPage* const page = new StatusPage();  // never destroyed: it is also used while the process ends
  return *page;
}

StatusPage::StatusPage() noexcept {
  if (const auto fd = env::number(env::kStatusFd)) {
    if (auto mapped = sys::map_shared_segment(*fd, kStatusBytes)) {
      auto* const layout = static_cast<StatusLayout*>(mapped->data());
      if (claim(*layout)) {
        mapping_ = *std::move(mapped);
        layout_ = layout;
        fd_ = *fd;
        ::fcntl(fd_, F_SETFD, FD_CLOEXEC);  // processes that this one starts do not need it
        return;
      }
    }
  }
  static StatusLayout nobodys{};
  nobodys.pid.store(static_cast<std::int32_t>(::getpid()));
  layout_ = &nobodys;
}

// A forked child shares the page, and must not write to it.
bool StatusPage::mine() const noexcept { return layout_->pid.load(std::memory_order_relaxed) == ::getpid(); }

GroupStatus& StatusPage::open(std::uint64_t id, int rank, int size, bool background) noexcept {
  if (id == 0 || !mine()) return spare_;
  for (GroupStatus& group : layout_->groups) {
    std::uint64_t free = 0;
    if (!group.id.compare_exchange_strong(free, id)) continue;
    for (LaneStatus* const lane : {&group.collectives, &group.messages}) {
      lane->begun = lane->ended = lane->what = lane->waited_ns = lane->longest_ns = lane->longest_number = 0;
      lane->count = 0;
      lane->waiting = 0;
      lane->peer = -1;
    }
    group.background.store(background ? 1 : 0);
    group.size.store(size);
    group.rank.store(rank);
    std::uint32_t noted = CauseStatus::OfWorld;
    layout_->cause.state.compare_exchange_strong(noted, CauseStatus::None);
    return group;
  }
  return spare_;
}

void StatusPage::close(GroupStatus& group) noexcept {
  if (&group != &spare_ && mine()) group.id.store(0);
}

void StatusPage::name_kind(std::uint8_t kind, std::string_view name) noexcept {
  if (kind >= StatusLayout::kKinds || !mine()) return;
  const std::size_t length = std::min(name.size(), StatusLayout::kNameBytes - 1);
  std::memcpy(layout_->kinds[kind], name.data(), length);
}

void StatusPage::begin_init(int size) noexcept {
  if (mine()) layout_->forming.store(size);
}

void StatusPage::end_init(bool formed, std::int64_t epoch) noexcept {
  if (!mine()) return;
  if (formed && epoch >= 0) layout_->formed_epoch.store(epoch);  // before `worlds` is increased
  if (formed) layout_->worlds.fetch_add(1);
  layout_->forming.store(0);
}

void StatusPage::note_state() noexcept {
  if (mine()) layout_->has_state.store(1);
}

void StatusPage::count_step(std::int64_t samples) noexcept {
  layout_->samples.fetch_add(samples, std::memory_order_relaxed);
  const std::int64_t steps = layout_->step.fetch_add(1, std::memory_order_relaxed) + 1;
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const auto copy_to = [&](TimesStatus& copy) {
    const TimesStatus& times = layout_->times;
    copy.operations.store(times.operations.load(std::memory_order_relaxed));
    copy.bytes.store(times.bytes.load(std::memory_order_relaxed));
    copy.busy_ns.store(times.busy_ns.load(std::memory_order_relaxed));
    copy.waited_ns.store(times.waited_ns.load(std::memory_order_relaxed));
    copy.wire_ns.store(times.wire_ns.load(std::memory_order_relaxed));
    copy.wire_bytes.store(times.wire_bytes.load(std::memory_order_relaxed));
    copy.exposed_ns.store(times.exposed_ns.load(std::memory_order_relaxed));
    copy.at_ns.store(std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec);
    copy.step.store(steps);
  };
  if (steps <= StatusLayout::kWarmSteps) copy_to(layout_->warm);
  copy_to(layout_->last);
  timeline::add_step(steps);
}

void StatusPage::note_losses(std::uint64_t segments, std::uint64_t timeouts, std::uint64_t timeouts_ms,
                             std::string_view host) noexcept {
  if (!mine()) return;
  static std::mutex mutex;  // each world's transport has a thread
  const std::lock_guard lock(mutex);
  LossStatus& losses = layout_->losses;
  losses.segments.fetch_add(segments, std::memory_order_relaxed);
  losses.timeouts.fetch_add(timeouts, std::memory_order_relaxed);
  losses.timeouts_ms.fetch_add(timeouts_ms, std::memory_order_relaxed);
  // Name of the majority's host (Boyer and Moore), which changes when other hosts have lost more since.
  std::array<std::atomic<std::uint64_t>, LossStatus::kWords> name{};
  store_text(name, host);
  const bool same =
      std::ranges::equal(name, losses.host, [](const auto& a, const auto& b) { return a.load() == b.load(); });
  const std::uint64_t most = losses.most.load(std::memory_order_relaxed);
  if (same || segments <= most) return losses.most.store(same ? most + segments : most - segments);
  losses.most.store(segments - most);
  store_text(losses.host, host);
}

void StatusPage::announce_saving() noexcept {
  if (saving_.fetch_add(1) == 0 && mine()) layout_->abilities.fetch_or(StatusLayout::kSavesWhenAsked);
}

void StatusPage::withdraw_saving() noexcept {
  if (saving_.fetch_sub(1) == 1 && mine()) layout_->abilities.fetch_and(~StatusLayout::kSavesWhenAsked);
}

void StatusPage::begin_wait(std::string_view name) noexcept {
  layout_->names.waiting.fetch_add(1, std::memory_order_relaxed);
  store_text(layout_->names.name, name);
}

void StatusPage::begin_call(std::string_view name) noexcept {
  layout_->call.depth.fetch_add(1, std::memory_order_relaxed);
  store_text(layout_->call.name, name);
}

void StatusPage::note_cause(const Error& error, CauseStatus::State kind) noexcept {
  if (!mine()) return;
  CauseStatus& cause = layout_->cause;
  std::uint32_t before = CauseStatus::None;
  while (!cause.state.compare_exchange_strong(before, CauseStatus::Writing)) {
    if (before == CauseStatus::Writing || kind == CauseStatus::OfWorld) return;
  }
  const ErrorContext& context = error.context();
  cause.code = static_cast<std::int32_t>(error.code());
  cause.rank = context.rank;
  cause.peer = context.peer;
  cause.sequence = context.sequence;
  copy_text(cause.host, context.host);
  copy_text(cause.operation, context.operation);
  cause.state.store(kind, std::memory_order_release);
}

void StatusPage::note_not_finite(std::string_view what, std::int64_t step) noexcept {
  NotFiniteStatus& noted = layout_->not_finite;
  std::uint32_t before = NotFiniteStatus::None;
  if (!mine() || !noted.state.compare_exchange_strong(before, NotFiniteStatus::Writing)) return;
  noted.step = step;
  copy_text(noted.what, what);
  noted.state.store(NotFiniteStatus::Written, std::memory_order_release);
}

bool StatusPage::say_last_words(std::string_view words) noexcept {
  if (!mine() || spoken_.exchange(true)) return false;
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  layout_->words_ns = std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  add_last_words(words);
  return true;
}

void StatusPage::add_last_words(std::string_view words) noexcept {
  if (!mine()) return;
  const std::size_t had = layout_->words_length.load(std::memory_order_relaxed);
  const std::size_t length =
      std::min(words.size(), StatusLayout::kWordsBytes - std::min(had, StatusLayout::kWordsBytes));
  std::memcpy(layout_->words + had, words.data(), length);
  layout_->words_length.store(static_cast<std::uint32_t>(had + length), std::memory_order_release);
  layout_->words_ready.store(1, std::memory_order_release);
}

}  // namespace cohort::status
