#include "comm/engine/queue_communicator.h"

#include "base/env.h"
#include "base/result.h"
#include "comm/engine/agreement.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace cohort::comm {

QueueCommunicator::QueueCommunicator(rendezvous::Placement placement, std::chrono::milliseconds timeout,
                                     std::shared_ptr<Queue> queue, std::vector<int> hosts)
    : placement_(std::move(placement)),
      timeout_(timeout),
      queue_(std::move(queue)),
      gpu_sums_(std::get<std::string>(value_or_throw(env::value(env::kGpuSums))) == "exact" ? GpuSums::Exact
                                                                                            : GpuSums::Fast),
      nccl_(std::make_shared<cuda::NcclPlane>(placement_, std::move(hosts))) {}

QueueCommunicator::~QueueCommunicator() {
  if (queue_->in_child()) {
    // A forked child: the threads and the world are the parent's. Nothing is touched.
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
      "in the parent only, or exec a program that joins a world of its own",
      placement_.rank, ::getpid());
}

Request QueueCommunicator::timed(Request request) const {
  if (request.timeout.count() == 0) request.timeout = timeout_;
  return request;
}

void QueueCommunicator::prepare_for_gpus(std::span<Request> requests) {
  const auto on_gpu = [](const Request& request) { return request.device.type == DeviceType::CUDA; };
  for (Request& request : requests) {
    if (!on_gpu(request)) continue;
    request.fast = request.gpu_sums.value_or(gpu_sums_) == GpuSums::Fast && cuda::has_sum(request);
  }
  const bool direct = nccl_->open() && std::all_of(requests.begin(), requests.end(), [&](const Request& request) {
                        return on_gpu(request) && nccl_->may_take(request);
                      });
  for (Request& request : requests) {
    if (direct) {
      request.direct = nccl_->call(request);
    } else if (on_gpu(request)) {
      request = cuda::stage(request, {placement_.rank, placement_.size}, *rooms_,
                            [this](std::size_t bytes) { return allocate(bytes); });
    }
  }
}

Work QueueCommunicator::start(const Request& request) {
  check_home();
  if (request.timeout.count() != 0 && request.device.type == DeviceType::CPU) return queue_->submit(request);
  Request own = timed(request);
  prepare_for_gpus({&own, 1});
  if (!own.staging && !own.pieces && !own.direct) return queue_->submit(own);
  const auto deadline = Staging::Clock::now() + own.timeout;
  if (own.kind == Kind::Send) {
    own.staging->arrive(deadline, [this] {
      if (const auto why = queue_->why_ended("send")) throw *why;
    });
    Work work = queue_->submit(own);
    work.on_done([staging = own.staging] {});  // whose memory it is
    return work;
  }
  if (own.kind == Kind::Recv) {
    return cuda::deliver_later(queue_->submit(own), own.staging, deadline,
                               [queue = queue_] { return queue->why_ended("recv"); });
  }
  return queue_->submit_group({std::move(own)});
}

Work QueueCommunicator::start_group(std::vector<Request> requests) {
  check_home();
  for (Request& request : requests) request = timed(std::move(request));
  prepare_for_gpus(requests);
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
