#include "comm/control/queue.h"

namespace cohort::comm {

/// Pieces on their way to the plane: nobody but the event of the whole is told of them.
class Queue::PlaneOfPieces final : public Pieces::Plane {
 public:
  PlaneOfPieces(Queue& queue, const Request& whole, const QueuedWork& work, CollectiveEvent* event)
      : queue_(queue), whole_(whole), work_(work), event_(event) {}
  void carry_out(const Request& piece) override {
    Request own = piece;
    own.timeout = whole_.timeout;
    if (!queue_.lends()) own.borrowed = nullptr;
    CollectiveEvent part;
    if (event_ != nullptr) part.begun = Clock::now();
    run(own, event_ != nullptr ? &part : nullptr);
    if (event_ == nullptr) return;
    if (event_->sequence == 0) event_->sequence = part.sequence;
    event_->group = part.group;
    event_->waited += part.waited;
    event_->wire += part.wire;
    event_->wire_bytes += part.wire_bytes;
  }
  void attend() override { queue_.attend(); }

  /// They agree on the whole as on any operation, and refuse what does not go together.
  Round agree() {
    Round agreed{.everyone = true};
    if (queue_.ranks() == 1) return agreed;
    Request own = whole_;
    own.round = &agreed;
    run(own, event_);
    return agreed;
  }

 private:
  void run(const Request& request, CollectiveEvent* event) {
    bool announced = false;
    queue_.run_one(request, work_.called_, announced, Clock::time_point::max(), event);
  }
  Queue& queue_;
  const Request& whole_;
  const QueuedWork& work_;
  CollectiveEvent* const event_;
};

void Queue::run_pieces(const Request& request, const QueuedWork& work, CollectiveEvent* event) {
  PlaneOfPieces plane(*this, request, work, event);
  const Round agreed = plane.agree();
  try {
    request.pieces->run(agreed, work.deadline(), plane);
  } catch (const Error& error) {  // the others wait for this rank
    abort(error.what());
    throw;
  }
}

}  // namespace cohort::comm
