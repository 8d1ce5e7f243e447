// Operations that the ranks agree on here, and that are carried out elsewhere: by NCCL, which is given them one after
// the other, or else by staging.
#include "comm/control/queue.h"

#include <utility>

namespace cohort::comm {

/// What an operation that is carried out elsewhere needs of the plane.
class Queue::PeerPoller final : public DeviceOp::Ranks {
 public:
  PeerPoller(Queue& queue, const QueuedWork& work) : queue_(queue), work_(work) {}
  void attend() override { queue_.attend(); }
  Clock::time_point deadline() const override { return queue_.waiters_.deadline.when(); }
  void exchange(const void* own, void* all, std::size_t bytes) override {
    Request request;
    request.kind = Kind::AllGather;
    request.dtype = DType::Int8;
    request.input = own;
    request.input_count = static_cast<std::int64_t>(bytes);
    request.output = all;
    request.output_count = request.input_count * queue_.ranks();
    request.timeout = work_.requests_.front().timeout;
    bool announced = false;
    queue_.run_one(request, work_.called_, announced, Clock::time_point::max(), nullptr);
  }

 private:
  Queue& queue_;
  const QueuedWork& work_;
};

// Not finished: ranks have not come by `limit`, or it is in flight.
std::optional<Error> Queue::run_direct(QueuedWork& work, Clock::time_point limit, bool& finished,
                                       InFlight& given) noexcept {
  const std::span<const Request> requests = work.requests_;
  DeviceOp& direct = *requests.front().direct;
  std::vector<Request> staged;
  auto failed = guarded(requests.front(), work.called_, [&](CollectiveEvent* event) {
    Round round;
    PeerPoller others(*this, work);
    const auto agree = [&](Clock::time_point until) {
      Request agreed = requests.front();
      agreed.round = &round;
      const bool come = run_one(agreed, work.called_, work.announced_, until, event);
      if (come) work.announced_ = false;
      return come;
    };
    if (direct.open() && !agree(limit)) {
      finished = false;
      return false;
    }
    try {
      // What the plane tells is of its last round.
      if (round.everyone && direct.form(others)) agree(Clock::time_point::max());
      if (round.everyone) {
        await_room(kMostInFlight, work);
        watch_from_now_on();
        given = direct.run(requests, round, others);
      }
      if (given) {
        if (event != nullptr) work.event_ = *event;
        finished = false;
        return false;
      }
      await_room(1, work);
      for (const Request& request : requests) staged.push_back(request.direct->staged(request));
    } catch (const Error& error) {
      abort(error.what());
      throw;
    }
    return false;
  });
  if (failed && failed->code() != ErrorCode::Mismatch) direct.give_up();
  if (failed || !finished) return failed;
  if (staged.size() > 1) return run_group(staged, work);
  return run_single(staged.front(), work, Clock::time_point::max(), finished);
}

}  // namespace cohort::comm
