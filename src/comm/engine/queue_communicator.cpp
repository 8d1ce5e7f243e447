#include "comm/engine/queue_communicator.h"

#include "base/result.h"
#include "comm/engine/agreement.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace cohort::comm {

QueueCommunicator::~QueueCommunicator() {
  if (queue_->in_child()) {
    // In a forked child the threads and the world belong to the parent, so the queue is leaked.
    static_cast<void>(new std::shared_ptr<Queue>(std::move(queue_)));
    return;
  }
  queue_->stop();
}

void QueueCommunicator::check_home() const {
  if (!queue_->in_child()) return;
  raise(
      ErrorCode::InvalidArgument,
      "rank {}'s communicator belongs to the process that formed it -- this is a forked child of it (pid {}) -- use it "
      "in the parent only, or exec a program that forms a world of its own",
      placement_.rank, ::getpid());
}

Request QueueCommunicator::timed(Request request) const {
  if (request.timeout.count() == 0) request.timeout = timeout_;
  return request;
}

Work QueueCommunicator::start(const Request& request) {
  check_home();
  return queue_->submit(request.timeout.count() != 0 ? request : timed(request));
}

Work QueueCommunicator::start_group(std::vector<Request> requests) {
  check_home();
  for (Request& request : requests) request = timed(std::move(request));
  if (requests.size() > 1) {
    const std::uint64_t group = group_digest(requests);
    for (Request& request : requests) request.group = group;
  }
  return queue_->submit_group(std::move(requests));
}

int QueueCommunicator::join(const BarrierOptions& options) {
  check_home();
  return queue_->join(options.timeout.value_or(timeout_));
}

void QueueCommunicator::abort(std::string_view reason) {
  check_home();
  queue_->abort(reason);
}

std::shared_ptr<CommunicatorImpl> QueueCommunicator::split(const SplitOptions& options) {
  check_home();
  return form_group(options.color, options.key, {}, options.timeout.value_or(timeout_), options.background);
}

std::shared_ptr<CommunicatorImpl> QueueCommunicator::group(std::span<const int> ranks, const GroupOptions& options) {
  check_home();
  const auto own = std::find(ranks.begin(), ranks.end(), placement_.rank);
  const bool member = own != ranks.end();
  return form_group(member ? 0 : kNoColor, member ? static_cast<int>(own - ranks.begin()) : 0, ranks,
                    options.timeout.value_or(timeout_), options.background);
}

}  // namespace cohort::comm
