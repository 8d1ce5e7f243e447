#include "comm/hosts/messenger.h"

#include "base/result.h"
#include "status/timeline.h"
#include "sys/thread.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::comm::hosts {
namespace {

using namespace std::chrono_literals;
using Lock = std::lock_guard<std::recursive_mutex>;

constexpr std::size_t kEager = std::size_t{16} << 10;
constexpr std::uint64_t kMostUnmet =
    256;  // small messages that nobody has received; then sends wait for their receives
constexpr std::uint64_t kMetAtOnce = 32;
constexpr std::uint64_t kOfPost = std::uint64_t{1} << 63;  // in the operation's number of frames
constexpr auto kLook = 20ms;
constexpr auto kSpinning = 300us;

}  // namespace

Messenger::Messenger(Owner owner) : owner_(std::move(owner)), world_(owner_.world), transport_(world_.transport()) {
  world_.message_handler = [this](int peer, std::uint32_t, std::string_view bytes) { on_message(peer, bytes); };
}

Messenger::~Messenger() {
  const Lock lock(transport_.mutex());
  world_.message_handler = nullptr;
}

Messenger::Channel& Messenger::open(int peer) {
  Channel& channel = channels_[peer];
  channel.peer = peer;
  return channel;
}

// --- calls ---

Work Messenger::submit(const Request& request) {
  const auto called = Clock::now();
  if (owner_.drivers.load(std::memory_order_relaxed) == 0) transport_.progress();  // there may be news of the peer
  WorkPtr work;
  std::optional<Error> over;
  bool is_over = false;
  {
    const Lock lock(transport_.mutex());
    const std::uint64_t number = ++submitted_;
    work = std::make_shared<MessageWork>(*this, owner_.keep(), request, number, called);
    ++pending_;
    if (world_.ended()) {
      complete(nullptr, work, world_.recorded(to_string(request), number));
    } else if (request.root == kAnySource) {
      receive_any(work);
    } else if (request.kind == Kind::Send) {
      Channel& channel = open(request.root);
      Head head;
      head.dtype = request.dtype;
      head.tag = request.tag;
      head.count = request.input_count;
      head.id = ++channel.next_id;
      // To a peer that is lost nothing is sent at once: the offer that waits is what tells of it.
      if (request.input_bytes() <= kEager && channel.eager_unmet < kMostUnmet && !transport_.lost(request.root)) {
        ++channel.eager_unmet;
        tell(request.root, head, request.input, request.input_bytes());
        work->met_ = called;
        complete(&channel, work, std::nullopt);
      } else {
        head.message_kind = MessageKind::Offer;
        channel.offered.emplace(head.id, work);
        tell(request.root, head);
      }
    } else {
      receive(open(request.root), work);
    }
    is_over = work->done();
  }
  settle();
  if (!is_over || (work->any_source_ && !work->outcome())) return Work(std::move(work));
  over = work->outcome();
  if (over) return Work(std::make_shared<FailedWork>(*over));
  return {};
}

void Messenger::receive(Channel& channel, const WorkPtr& work) {
  const auto found = std::find_if(channel.unexpected.begin(), channel.unexpected.end(),
                                  [&](const UnexpectedMessage& each) { return each.head.tag == work->request_.tag; });
  if (found == channel.unexpected.end()) {
    channel.receives.push_back(work);
    transport_.connect(channel.peer);
  } else {
    const UnexpectedMessage message = std::move(*found);
    channel.unexpected.erase(found);
    meet(channel, work, message);
  }
}

/// Of what has come the first; the claim decides between this and the ranks of the host.
void Messenger::receive_any(const WorkPtr& work) {
  if (!claims_.empty()) drop_elsewhere();
  Channel* from = nullptr;
  std::deque<UnexpectedMessage>::iterator first;
  for (auto& [peer, channel] : channels_) {
    const auto found = std::find_if(channel.unexpected.begin(), channel.unexpected.end(),
                                    [&](const UnexpectedMessage& each) { return each.head.tag == work->request_.tag; });
    if (found == channel.unexpected.end() || (from != nullptr && first->arrival < found->arrival)) continue;
    from = &channel;
    first = found;
  }
  if (from != nullptr && work->takes(first->head.tag)) {
    const UnexpectedMessage message = std::move(*first);
    from->unexpected.erase(first);
    bind(*from, work);
    return meet(*from, work, message);
  }
  if (work->request_.claim) claims_.push_back(work);
  const Layout& layout = world_.layout();
  for (int peer = 0; peer < layout.size; ++peer) {
    if (layout.host_of(peer) == layout.host) continue;
    open(peer).receives.push_back(work);
    transport_.connect(peer);
  }
}

/// A receive from any source has its message, and expects none of the others any more.
void Messenger::bind(Channel& channel, const WorkPtr& work) {
  work->request_.root = channel.peer;
  const auto forget = [&](auto& list) { list.erase(std::remove(list.begin(), list.end(), work), list.end()); };
  for (auto& [peer, other] : channels_) forget(other.receives);
  forget(claims_);
}

/// Ends receives that have got their message within the host.
void Messenger::drop_elsewhere() {
  const std::vector<WorkPtr> all = claims_;
  for (const WorkPtr& work : all) {
    if (!work->lies_elsewhere()) continue;
    for (auto& [peer, channel] : channels_) {
      channel.receives.erase(std::remove(channel.receives.begin(), channel.receives.end(), work),
                             channel.receives.end());
    }
    claims_.erase(std::find(claims_.begin(), claims_.end(), work));
    complete(nullptr, work, std::nullopt);
  }
}

bool Messenger::wait_until(PendingWork& waited, Clock::time_point limit) {
  auto& work = static_cast<MessageWork&>(waited);
  const auto since = Clock::now();
  const bool of_program = !sys::in_service_thread();
  bool told = false;
  owner_.drivers.fetch_add(1);
  while (!work.done()) {
    const auto now = Clock::now();
    if (now >= limit) break;
    if (now - since < kSpinning) {
      if (!transport_.progress()) ::sched_yield();
    } else {
      if (of_program && !told) tell_waiting(work);
      told = of_program;
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(limit == Clock::time_point::max() ? 10ms : limit - now);
      transport_.sleep(std::min<std::chrono::milliseconds>(left, 10ms));
    }
    look_after();
  }
  owner_.drivers.fetch_sub(1);
  if (told && tellers_.fetch_sub(1) == 1) world_.status().messages.waiting.store(0, std::memory_order_relaxed);
  settle();
  return work.done();
}

/// For whoever looks at this rank from outside. Of several threads that wait, the last to begin is seen.
void Messenger::tell_waiting(const MessageWork& work) noexcept {
  const Lock lock(transport_.mutex());  // the peer of a receive from any source may be found meanwhile
  tellers_.fetch_add(1);
  status::LaneStatus& lane = world_.status().messages;
  const Request& request = work.request_;
  lane.peer.store(std::max(request.root, -1), std::memory_order_relaxed);
  // Messages within the host are counted apart, and told in the same place.
  lane.begin(kOfPost | work.number_,
             status::LaneStatus::pack(static_cast<std::uint8_t>(request.kind), request.dtype, ReduceOp::Sum),
             work.count());
  lane.waiting.store(1, std::memory_order_relaxed);
}

bool Messenger::idle() { return pending_.load() == 0; }

// --- messages ---

void Messenger::tell(int peer, const Head& head, const void* payload, std::size_t bytes) {
  std::string text(sizeof head + bytes, '\0');
  std::memcpy(text.data(), &head, sizeof head);
  if (bytes > 0) std::memcpy(text.data() + sizeof head, payload, bytes);
  transport_.message(peer, 0, text);
}

void Messenger::on_message(int peer, std::string_view bytes) {
  if (bytes.empty()) return;
  UnexpectedMessage message;
  Head& head = message.head;
  const auto broken = [&](std::string_view why) { world_.on_broken(peer, why); };
  if (bytes.size() < sizeof head) return broken("a message without a head");
  std::memcpy(&head, bytes.data(), sizeof head);
  bytes.remove_prefix(sizeof head);
  if (static_cast<int>(head.dtype) >= kDTypeCount || static_cast<int>(head.expected) >= kDTypeCount || head.count < 0) {
    return broken("a message of no known type");
  }
  Channel& channel = open(peer);
  switch (head.message_kind) {
    case MessageKind::Eager:
      if (head.count > static_cast<std::int64_t>(kEager) ||
          bytes.size() != static_cast<std::size_t>(head.count) * size_of(head.dtype)) {
        return broken("a message of another length than it says");
      }
      [[fallthrough]];
    case MessageKind::Offer: {
      message.payload.resize(bytes.size());
      if (!bytes.empty()) std::memcpy(message.payload.data(), bytes.data(), bytes.size());
      const auto found = std::find_if(channel.receives.begin(), channel.receives.end(),
                                      [&](const WorkPtr& each) { return each->takes(head.tag); });
      if (found == channel.receives.end()) {
        message.arrival = ++arrivals_;
        channel.unexpected.push_back(std::move(message));
        return;
      }
      const WorkPtr work = *found;
      channel.receives.erase(found);
      if (work->any_source_) bind(channel, work);
      return meet(channel, work, message);
    }
    case MessageKind::Grant: {
      const auto found = channel.offered.find(head.id);
      if (found == channel.offered.end()) return broken("it asked for a message that was not offered");
      const WorkPtr work = found->second;
      channel.offered.erase(found);
      work->met_ = Clock::now();
      work->out_.peer = peer;
      work->out_.operation = kOfPost | head.id;
      work->out_.data = static_cast<const std::byte*>(work->request_.input);
      work->out_.bytes = work->request_.input_bytes();
      work->out_.authenticated = may_be_object(work->request_.dtype);
      channel.moving.push_back(work);
      transport_.send(work->out_);
      return;
    }
    case MessageKind::Refused: {
      const auto found = channel.offered.find(head.id);
      if (found != channel.offered.end()) {
        const WorkPtr work = found->second;
        channel.offered.erase(found);
        complete(nullptr, work, refusal(work->request_, work->number_, head));
      } else if (!channel.late_refusal) {
        Request own;
        own.kind = Kind::Send;
        own.root = peer;
        own.tag = head.tag;
        own.dtype = head.dtype;
        own.input_count = head.count;
        channel.late_refusal = refusal(own, 0, head);
      }
      return;
    }
    case MessageKind::Met: channel.eager_unmet -= std::min<std::uint64_t>(head.id, channel.eager_unmet); return;
  }
  broken("a message of no known kind");
}

/// A receive and the message that it gets.
void Messenger::meet(Channel& channel, const WorkPtr& work, const UnexpectedMessage& message) {
  const Head& head = message.head;
  const Request& request = work->request_;
  work->met_ = Clock::now();
  if (head.message_kind == MessageKind::Eager && ++channel.met >= kMetAtOnce) {
    Head met;
    met.message_kind = MessageKind::Met;
    met.id = std::exchange(channel.met, 0);
    tell(channel.peer, met);
  }
  if (head.dtype != request.dtype || head.count != request.output_count) {
    Head answer = head;
    answer.message_kind = MessageKind::Refused;
    answer.expected = request.dtype;
    answer.expected_count = request.output_count;
    tell(channel.peer, answer);
    return complete(nullptr, work, refusal(request, work->number_, answer));
  }
  if (head.message_kind == MessageKind::Eager) {
    if (!message.payload.empty()) std::memcpy(request.output, message.payload.data(), message.payload.size());
    return complete(&channel, work, std::nullopt);
  }
  work->in_.peer = channel.peer;
  work->in_.operation = kOfPost | head.id;
  work->in_.to = static_cast<std::byte*>(request.output);
  work->in_.room = request.output_bytes();
  work->in_.authenticated = may_be_object(request.dtype);
  channel.moving.push_back(work);
  transport_.receive(work->in_);
  Head grant;
  grant.message_kind = MessageKind::Grant;
  grant.id = head.id;
  tell(channel.peer, grant);
}

// --- endings ---

void Messenger::complete(Channel* channel, const WorkPtr& work, std::optional<Error> error) {
  if (!error && channel != nullptr && channel->late_refusal) {
    error = late(*channel, work->request_);
    channel->late_refusal.reset();
  }
  if (work->request_.claim) work->request_.claim->take(kBetweenHosts);  // if only to say how it failed
  work->set_outcome(std::move(error));
  work->set_done();
  finished_.push_back(work);
  --pending_;
}

void Messenger::settle() {
  std::vector<WorkPtr> finished;
  std::vector<std::function<void()>> callbacks;
  {
    const Lock lock(transport_.mutex());
    finished.swap(finished_);
    for (const WorkPtr& work : finished) {
      for (auto& callback : work->take_callbacks()) callbacks.push_back(std::move(callback));
    }
  }
  for (const WorkPtr& work : finished) report(*work);
  for (const auto& callback : callbacks) callback();
}

void Messenger::report(const MessageWork& work) const {
  Observer* const observer = owner_.observer.load(std::memory_order_acquire);
  if ((observer == nullptr && !status::timeline::on()) || work.lies_elsewhere()) return;
  CollectiveEvent event;
  event.operation = name_of(work.request_.kind);
  event.sequence = work.number_;
  event.bytes = static_cast<std::size_t>(work.count()) * size_of(work.request_.dtype);
  event.called = event.begun = work.called_;
  event.ended = Clock::now();
  event.waited =
      std::max(std::chrono::nanoseconds(0),
               std::chrono::nanoseconds((work.met_ == Clock::time_point{} ? event.ended : work.met_) - work.called_));
  event.failed = work.outcome().has_value();
  status::timeline::add(event);
  if (observer != nullptr) observer->on_collective(event);
}

std::vector<Messenger::WorkPtr> Messenger::waiting(const Channel& channel) const {
  std::vector<WorkPtr> all(channel.receives.begin(), channel.receives.end());
  for (const auto& [id, work] : channel.offered) all.push_back(work);
  all.insert(all.end(), channel.moving.begin(), channel.moving.end());
  return all;
}

void Messenger::look_after() {
  if (pending_.load() == 0) return settle();
  {
    const Lock lock(transport_.mutex());
    if (!claims_.empty()) drop_elsewhere();
    for (auto& [peer, channel] : channels_) {
      for (auto each = channel.moving.begin(); each != channel.moving.end();) {
        const WorkPtr work = *each;
        const bool over = !world_.ended() && (work->sends() ? work->out_.done.load() : work->in_.done.load());
        each = over ? channel.moving.erase(each) : std::next(each);
        if (over) complete(&channel, work, std::nullopt);
      }
    }
    const auto now = Clock::now();
    if (now - looked_ >= kLook) {
      looked_ = now;
      if (!world_.ended()) find_late();
    }
    if (world_.ended()) fail_all();
  }
  settle();
}

/// Ends the world if a peer is gone that something waits for, or if a deadline has passed.
bool Messenger::find_late() {
  const auto now = Clock::now();
  const Layout& layout = world_.layout();
  const std::string& host = world_.options().placement.host;
  for (auto& [peer, channel] : channels_) {
    const std::vector<WorkPtr> all = waiting(channel);
    if (all.empty()) continue;
    const std::string pid = world_.pid_text(peer);
    const auto how = transport_.lost(peer);
    const auto found = !how ? all.end() : std::find_if(all.begin(), all.end(), [&, &gone = *how](const WorkPtr& one) {
      return ends_with(*one, gone);
    });
    if (found != all.end()) {
      const MessageWork& work = **found;
      world_.end(ErrorCode::PeerLost, peer, work.number_,
                 fmt::format("{} failed -- rank {} ({}) lost rank {} ({}{}) -- {} -- see the output of rank {}; the "
                             "communicator has to be formed anew",
                             to_string(work.request_), layout.rank, host, peer, world_.host_name(peer),
                             pid.empty() ? "" : ", " + pid, *how, peer));
      return true;
    }
    for (const WorkPtr& work : all) {
      if (now < work->called_ + work->request_.timeout || work->lies_elsewhere()) continue;
      const bool any = work->request_.root == kAnySource;
      std::string why = any ? sources_text()
                            : fmt::format("rank {}{} {}", peer, pid.empty() ? "" : fmt::format(" ({})", pid),
                                          work->sends() ? "did not receive it" : "did not send it");
      if (!work->sends() && !any && !channel.unexpected.empty()) {
        const Head& first = channel.unexpected.front().head;
        why += fmt::format("; {} of its messages wait to be received, the first is {}[{}] with tag {}",
                           channel.unexpected.size(), cohort::to_string(first.dtype), first.count, first.tag);
      }
      world_.end(
          ErrorCode::Timeout, any ? -1 : peer, work->number_,
          fmt::format("{} timed out after {} ms -- rank {} ({}) -- {} -- is it stopped, slow, or in another branch "
                      "of the program? give a longer timeout if it is only slow",
                      to_string(work->request_), work->request_.timeout.count(), layout.rank, host, why));
      return true;
    }
  }
  return false;
}

/// Whether a peer that is lost ends a work of its channel. From any source, others may still send where it only left.
bool Messenger::ends_with(const MessageWork& work, std::string_view how) {
  if (work.lies_elsewhere()) return false;
  if (work.request_.root != kAnySource || how != transport::kLeft) return true;
  const Layout& layout = world_.layout();
  for (int peer = 0; peer < layout.size; ++peer) {
    if (peer == layout.rank) continue;
    const bool here = layout.host_of(peer) == layout.host;
    if (!(here ? world_.local_world().lost(layout.local_of(peer)) : transport_.lost(peer))) return false;
  }
  return true;
}

/// Whom a receive from any source has waited for, on this host as well, and what of theirs did not fit.
std::string Messenger::sources_text() const {
  std::string text = "none of the ranks";
  std::string others;
  for (int peer = 0; peer < world_.layout().size; ++peer) {
    if (peer == world_.layout().rank) continue;
    const std::string pid = world_.pid_text(peer);
    text += fmt::format("{} {}{}", text.back() == 's' ? "" : ",", peer, pid.empty() ? "" : fmt::format(" ({})", pid));
    const auto channel = channels_.find(peer);
    if (channel == channels_.end() || channel->second.unexpected.empty()) continue;
    const auto& unexpected = channel->second.unexpected;
    others += fmt::format("; {} messages of rank {} wait to be received, the first has tag {}", unexpected.size(), peer,
                          unexpected.front().head.tag);
  }
  return text + " sent it" + others;
}

void Messenger::fail_all() {
  world_.tell_if_ended();  // from here on the transport touches nobody's memory
  for (auto& [peer, channel] : channels_) {
    const std::vector<WorkPtr> all = waiting(channel);
    channel.receives.clear();
    channel.offered.clear();
    channel.moving.clear();
    for (const WorkPtr& work : all) {
      if (work->done()) continue;  // those from any source stand in every channel
      complete(nullptr, work, world_.recorded(to_string(work->request_), work->number_));
    }
  }
  claims_.clear();
}

std::string Messenger::to_string(const Request& request) const {
  const bool sends = request.kind == Kind::Send;
  const std::string peer = request.root == kAnySource ? "any rank" : fmt::format("rank {}", request.root);
  return fmt::format("{}({}[{}], {} {}, tag {})", name_of(request.kind), cohort::to_string(request.dtype),
                     sends ? request.input_count : request.output_count, sends ? "to" : "from", peer, request.tag);
}

/// For either side: what was sent, and what its receiver expected.
Error Messenger::refusal(const Request& own, std::uint64_t number, const Head& head) const {
  const int rank = world_.layout().rank;
  const bool sends = own.kind == Kind::Send;
  const std::string& host = world_.options().placement.host;
  const std::string why = fmt::format("rank {} sends {}[{}] (tag {}) to rank {}, which receives {}[{}]",
                                      sends ? rank : own.root, cohort::to_string(head.dtype), head.count, head.tag,
                                      sends ? own.root : rank, cohort::to_string(head.expected), head.expected_count);
  ErrorContext context;
  context.rank = rank;
  context.host = host;
  context.peer = own.root;
  context.operation = to_string(own);
  context.sequence = number;
  context.cause = why;
  return Error(ErrorCode::Mismatch,
               fmt::format("{} refused -- rank {} ({}) -- {} -- give both the same type and count", name_of(own.kind),
                           rank, host, why),
               std::move(context));
}

Error Messenger::late(const Channel& channel, const Request& request) const {
  return Error(
      ErrorCode::Mismatch,
      fmt::format("{}; that send was over before it was refused, so {} reports it, which was itself carried out",
                  channel.late_refusal->what(), to_string(request)),
      channel.late_refusal->context());
}

}  // namespace cohort::comm::hosts
