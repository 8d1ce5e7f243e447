#include "comm/local/local_communicator.h"

#include "base/result.h"
#include "comm/control/group_infos.h"
#include "store/store.h"

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

LocalCommunicator::LocalCommunicator(const FormOptions& options, std::unique_ptr<Rendezvous> point)
    : QueueCommunicator(options.placement, options.timeout, std::make_shared<Core>(options, std::move(point))) {}

std::shared_ptr<MemoryBlock> LocalCommunicator::allocate(std::size_t bytes) {
  check_home();
  std::uint32_t id = 0;
  auto segment = core().world().mesh()->create_segment(std::max<std::size_t>(bytes, 1), id);
  if (!segment) {
    ErrorContext context;
    const int own = core().world().name(placement_.rank);
    context.rank = own;
    context.host = placement_.host;
    throw Error(
        segment.error().code(),
        fmt::format("allocate({}) failed -- rank {} ({}) -- {}", bytes, own, placement_.host, segment.error().what()),
        std::move(context));
  }
  return std::make_shared<LocalBlock>(*std::move(segment), bytes, id, core().world().mesh(), core().guard());
}

std::shared_ptr<CommunicatorImpl> LocalCommunicator::form_group(int color, int key, std::span<const int> listed,
                                                                std::chrono::milliseconds timeout, bool background) {
  std::unique_ptr<Rendezvous> point;
  GroupInfoHead own;
  own.color = color;
  own.key = key;
  prepare(own, [&] {
    if (color == kNoColor) return;
    point = std::make_unique<Rendezvous>(placement_.size);
    own.set_entry(point->entry());
  });
  std::vector<GroupInfoHead> infos(static_cast<std::size_t>(placement_.size));
  queue_->submit(exchange_of(own, infos, listed, timeout)).wait();
  check_prepared(infos, [&](int rank) { return core().world().name(rank); });
  if (color == kNoColor) return nullptr;

  const std::vector<int> members = members_of(infos, color);
  FormOptions form;
  form.placement = placement_;
  form.placement.size = form.placement.local_size = static_cast<int>(members.size());
  form.join_timeout = timeout;
  form.timeout = timeout_;
  form.background = background;
  std::vector<std::string> entries;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i] == placement_.rank) form.placement.rank = form.placement.local_rank = static_cast<int>(i);
    entries.emplace_back(infos[static_cast<std::size_t>(members[i])].entry_text());
  }
  form.store = store_of(entries);
  return std::make_shared<LocalCommunicator>(form, std::move(point));
}

}  // namespace cohort::comm::local
