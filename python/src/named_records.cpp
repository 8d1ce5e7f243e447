#include "named_records.h"
#include "named.h"

#include <pybind11/stl.h>

#include <atomic>
#include <cstddef>
#include <iterator>
#include <mutex>
#include <tuple>
#include <utility>

namespace cohort::python {
namespace {

using Clock = NamedRecords::Clock;
/// Kind, name, when it was asked for, agreed on and done (seconds of time.monotonic()), the text of its error or "".
using Record = std::tuple<std::string, std::string, double, double, double, std::string>;

std::atomic<bool> keeping{false};

struct Kept {
  std::mutex mutex;
  std::vector<Record> records;
};

Kept& all_kept() {
  static auto* const all = new Kept();
  return *all;
}

double seconds(Clock::time_point at) { return std::chrono::duration<double>(at.time_since_epoch()).count(); }

const char* word_of(named::Kind kind) noexcept {
  constexpr const char* kNames[] = {"ALLREDUCE", "ALLGATHER", "BROADCAST", "REDUCESCATTER", "ALLTOALL", "BARRIER"};
  const auto number = static_cast<std::size_t>(kind);
  return number < std::size(kNames) ? kNames[number] : "OTHER";
}

void keep_records(bool on) {
  Kept& all = all_kept();
  const std::lock_guard lock(all.mutex);
  all.records.clear();
  keeping.store(on, std::memory_order_relaxed);
}

std::vector<Record> take() {
  Kept& all = all_kept();
  const std::lock_guard lock(all.mutex);
  return std::exchange(all.records, {});
}

}  // namespace

bool NamedRecords::on() noexcept { return keeping.load(std::memory_order_relaxed); }

void NamedRecords::Call::end(const std::vector<named::Handle>& handles) const {
  const Clock::time_point now = Clock::now();
  Kept& all = all_kept();
  const std::lock_guard lock(all.mutex);
  if (!on()) return;
  for (std::size_t i = 0; i < asked_.size(); ++i) {
    Clock::time_point agreed = now;
    Clock::time_point ended = now;
    std::string failure;
    if (i < handles.size()) {
      ended = handles[i].ended_at();
      agreed = handles[i].agreed_at() == Clock::time_point() ? ended : handles[i].agreed_at();
      if (const Error* const error = handles[i].failure()) failure = error->what();
    }
    all.records.emplace_back(word_of(asked_[i].first), asked_[i].second, seconds(began_), seconds(agreed),
                             seconds(ended), std::move(failure));
  }
}

void bind_named_records(py::module_& module) {
  module.def("named_records_keep", &keep_records, py::arg("on"),
             "Whether what becomes of operations of compiled programs is kept from now on; drops what was.");
  module.def("named_records_take", &take,
             "Operations of compiled programs that are done, and drops them: tuples of the kind, the name, when it was "
             "asked for, agreed on and done in seconds of time.monotonic(), and the error's text or ''.");
}

}  // namespace cohort::python
