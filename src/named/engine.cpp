#include "named/engine.h"

#include "named/engine_core.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

namespace cohort::named {

Engine::Engine(Communicator comm, EngineOptions options) {
  if (!comm) raise(ErrorCode::InvalidArgument, "named::Engine: this Communicator belongs to no world");
  core_ = std::make_unique<EngineCore>(std::move(comm), std::move(options));
}

Engine::~Engine() {
  // The thread and all that waits for it are the parent's.
  if (core_->in_child()) static_cast<void>(core_.release());
}

int Engine::rank() const noexcept { return core_->rank(); }
int Engine::size() const noexcept { return core_->size(); }

Handle Engine::submit(Request request) { return core_->submit(std::move(request)); }
std::vector<Handle> Engine::submit(std::vector<Request> requests) { return core_->submit(std::move(requests)); }

Handle Engine::join_async() { return core_->join(); }
int Engine::join() { return join_async().outcome().last_joined; }

Communicator Engine::form_group(std::span<const int> ranks) { return form_group_async(ranks).outcome().group; }

Handle Engine::form_group_async(std::span<const int> ranks) {
  Request request;
  request.kind = Kind::Group;
  request.name = fmt::format("form_group [{}]", fmt::join(ranks, ", "));
  if (request.name.size() > kLongestName) request.name.resize(kLongestName);  // the list itself is compared
  request.splits.assign(ranks.begin(), ranks.end());
  return submit(std::move(request));
}

void Engine::shutdown() { core_->shutdown(); }
void Engine::begin_shutdown() { core_->begin_shutdown(); }
bool Engine::ended() const noexcept { return core_->ended(); }
Engine::Statistics Engine::statistics() const { return core_->statistics(); }

}  // namespace cohort::named
