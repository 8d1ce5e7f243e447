#include "train/gradients/reductions.h"

#include <algorithm>
#include <span>
#include <utility>

namespace cohort::gradients {

void Reductions::await_room(std::size_t bytes, std::size_t limit) {
  for (const Started& started : works_) bytes += started.held;
  for (Started& started : works_) {
    if (bytes <= limit) return;
    if (started.held == 0) continue;
    started.work->wait();
    started.work.reset();  // frees the gradient
    bytes -= std::exchange(started.held, 0);
  }
}

void Reductions::wait(Autograd& autograd, bool by_host) {
  for (const auto& [work, device, held] : works_) {
    if (work == nullptr) continue;  // already waited for
    if (device.type == DeviceType::CPU || by_host) {
      work->wait();
    } else {
      work->synchronize({device.type, device.index, autograd.stream_of(device)});
    }
  }
}

bool Reductions::are_finite() const {
  return std::all_of(works_.begin(), works_.end(), [](const Started& started) {
    return started.work == nullptr || started.work->finite().value_or(true);
  });
}

void TotalWeight::start(step::Ranks& ranks, double own) {
  total_ = std::make_shared<std::vector<double>>(1, own);
  started_ = ranks.start(
      "all_reduce", [&](Communicator& comm) { return comm.all_reduce(std::span<double>(*total_)); }, total_);
}

double TotalWeight::wait() {
  if (started_) std::exchange(started_, nullptr)->wait();
  return total_->front();
}

}  // namespace cohort::gradients
