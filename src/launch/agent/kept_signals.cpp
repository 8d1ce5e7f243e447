#include "launch/agent/kept_signals.h"

#include "base/parse.h"
#include "sys/signals.h"

#include <fmt/format.h>

#include <algorithm>

namespace cohort::launch {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLookAgainAfter = std::chrono::milliseconds(100);
/// A program that has only begun will soon have its handler; who has none by then may never have one.
constexpr auto kTellAfter = std::chrono::seconds(3);

}  // namespace

KeptSignals::KeptSignals(Loop& loop, const std::vector<std::unique_ptr<Worker>>& workers,
                         std::function<void(std::string)> tell)
    : loop_(loop), workers_(workers), tell_(std::move(tell)) {}

void KeptSignals::pass_on(int signal) {
  for (const auto& worker : workers_) {
    if (!worker->alive() || worker->offer(signal)) continue;
    if (worker->role() == Role::Worker) kept_.emplace(signal, worker->rank());  // it is for them
  }
  if (kept_.empty() || again_) return;
  since_ = Clock::now();
  told_ = false;
  again_ = Timer(loop_, kLookAgainAfter, [this] { look_again(); });
}

void KeptSignals::look_again() {
  again_ = Timer();
  for (const auto& worker : workers_) {
    for (auto next = kept_.begin(); next != kept_.end();) {
      const auto [signal, rank] = *next;
      const bool over = rank == worker->rank() && (!worker->alive() || worker->offer(signal));
      next = over ? kept_.erase(next) : std::next(next);
    }
  }
  if (kept_.empty()) return;
  if (!told_ && Clock::now() - since_ >= kTellAfter) {
    told_ = true;
    std::vector<int> ranks;
    for (const auto& [signal, rank] : kept_) ranks.push_back(rank);
    const bool one = kept_.size() == 1;
    tell_(
        fmt::format("rank{} {} {} no handler for {}, which would end {}; it is kept until {} one -- cohort::Preemption "
                    "has one, and "
                    "lets the program save and end",
                    one ? "" : "s", to_ranges(ranks), one ? "has" : "have", sys::signal_name(kept_.begin()->first),
                    one ? "it" : "them", one ? "it has" : "they have"));
  }
  again_ = Timer(loop_, kLookAgainAfter, [this] { look_again(); });
}

}  // namespace cohort::launch
