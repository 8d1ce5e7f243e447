#include "comm/local/local_communicator.h"

#include "comm/group_cards.h"

#include "base/result.h"
#include "comm/local/operation.h"

#include "store/store.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::comm::local {
namespace {

class LocalBlock final : public MemoryBlock {
 public:
  LocalBlock(std::shared_ptr<sys::Mapping> segment, std::size_t asked, std::uint32_t id,
             const std::shared_ptr<Mesh>& mesh, std::shared_ptr<ForkGuard> guard)
      : segment_(std::move(segment)), id_(id), mesh_(mesh), guard_(std::move(guard)) {
    data = segment_->data();
    bytes = asked;
  }
  ~LocalBlock() override {
    if (guard_->in_child()) {
      // The mesh belongs to the parent; this child's mapping goes when the child does.
      static_cast<void>(new std::shared_ptr<sys::Mapping>(std::move(segment_)));
      return;
    }
    if (const auto mesh = mesh_.lock()) mesh->free_segment(id_);
  }

 private:
  std::shared_ptr<sys::Mapping> segment_;
  const std::uint32_t id_;
  const std::weak_ptr<Mesh> mesh_;
  const std::shared_ptr<ForkGuard> guard_;
};

}  // namespace

LocalCommunicator::LocalCommunicator(const FormOptions& options, std::unique_ptr<MeetingPoint> point)
    : placement_(options.placement),
      timeout_(options.timeout),
      core_(std::make_shared<Core>(options, std::move(point))) {}

LocalCommunicator::~LocalCommunicator() {
  if (core_->in_child()) {
    // A forked child: the threads and the world are the parent's. Nothing is touched.
    static_cast<void>(new std::shared_ptr<Core>(std::move(core_)));
    return;
  }
  core_->stop();
}

void LocalCommunicator::check_home() const {
  if (!core_->in_child()) return;
  raise(
      ErrorCode::InvalidArgument,
      "rank {}'s communicator belongs to the process that formed it -- this is a forked child of it (pid {}) -- use it "
      "in the parent only, or exec a program that joins a world of its own",
      core_->world().name(placement_.rank), ::getpid());
}

Work LocalCommunicator::start(const Request& request) {
  check_home();
  if (request.timeout.count() != 0) return core_->submit(request);
  Request own = request;
  own.timeout = timeout_;
  return core_->submit(own);
}

Work LocalCommunicator::start_group(std::vector<Request> requests) {
  check_home();
  for (Request& request : requests) {
    if (request.timeout.count() == 0) request.timeout = timeout_;
  }
  if (requests.size() > 1) {
    const std::uint64_t group = group_digest(requests);
    for (Request& request : requests) request.group = group;
  }
  return core_->submit_group(std::move(requests));
}

std::shared_ptr<MemoryBlock> LocalCommunicator::allocate(std::size_t bytes, Device) {
  check_home();
  std::uint32_t id = 0;
  auto segment = core_->world().mesh()->create_segment(std::max<std::size_t>(bytes, 1), id);
  if (!segment) {
    ErrorContext context;
    const int own = core_->world().name(placement_.rank);
    context.rank = own;
    context.host = placement_.host;
    throw Error(
        segment.error().code(),
        fmt::format("allocate({}) failed -- rank {} ({}) -- {}", bytes, own, placement_.host, segment.error().what()),
        std::move(context));
  }
  return std::make_shared<LocalBlock>(*std::move(segment), bytes, id, core_->world().mesh(), core_->guard());
}

int LocalCommunicator::join(const BarrierOptions& options) {
  check_home();
  return core_->join(options.timeout.value_or(timeout_));
}

void LocalCommunicator::abort(std::string_view reason) {
  check_home();
  core_->engine().abort(reason);
}

// --- groups ---

std::shared_ptr<CommunicatorImpl> LocalCommunicator::split(const SplitOptions& options) {
  return form_group(options.color, options.key, {}, options.timeout.value_or(timeout_));
}

std::shared_ptr<CommunicatorImpl> LocalCommunicator::group(std::span<const int> ranks, const GroupOptions& options) {
  const auto own = std::find(ranks.begin(), ranks.end(), placement_.rank);
  const bool member = own != ranks.end();
  return form_group(member ? 0 : kNoColor, member ? static_cast<int>(own - ranks.begin()) : 0, ranks,
                    options.timeout.value_or(timeout_));
}

std::shared_ptr<CommunicatorImpl> LocalCommunicator::form_group(int color, int key, std::span<const int> listed,
                                                                std::chrono::milliseconds timeout) {
  check_home();
  std::unique_ptr<MeetingPoint> point;
  GroupCardHead own;
  own.color = color;
  own.key = key;
  prepare(own, [&] {
    if (color == kNoColor) return;
    point = std::make_unique<MeetingPoint>(placement_.size);
    own.set_entry(point->entry());
  });
  std::vector<GroupCardHead> cards(static_cast<std::size_t>(placement_.size));
  core_->submit(exchange_of(own, cards, listed, timeout)).wait();
  check_prepared(cards, [&](int rank) { return core_->world().name(rank); });
  if (color == kNoColor) return nullptr;

  const std::vector<int> members = members_of(cards, color);
  FormOptions form;
  form.store =
      store::make_in_process_store();  // this rank's own: what the others would have put there has come already
  form.placement = placement_;
  form.placement.size = form.placement.local_size = static_cast<int>(members.size());
  form.join_timeout = timeout;
  form.timeout = timeout_;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i] == placement_.rank) form.placement.rank = form.placement.local_rank = static_cast<int>(i);
    form.store->set(meeting_key(static_cast<int>(i)), cards[static_cast<std::size_t>(members[i])].entry_text());
  }
  return std::make_shared<LocalCommunicator>(form, std::move(point));
}

}  // namespace cohort::comm::local
