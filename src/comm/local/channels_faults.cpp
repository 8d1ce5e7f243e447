// How sends and receives fail: refusals, deadlines, peers that are gone, the end of the world.
#include "comm/local/channels.h"

#include "base/result.h"
#include "transport/transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace cohort::comm::local {
namespace {

using namespace std::chrono_literals;

constexpr auto kLook = 20ms;

}  // namespace

std::string to_string(const Message& message) {
  const std::string peer = message.peer == kAnySource ? "any rank" : fmt::format("rank {}", message.peer_name);
  return fmt::format("{}({}[{}], {} {}, tag {})", name_of(message.kind), cohort::to_string(message.dtype),
                     message.count, message.kind == Kind::Send ? "to" : "from", peer, message.tag);
}

/// For either side: what was sent, and what its receiver expected.
Error Channels::refusal(const Message& own, std::int32_t tag, DType sent, std::int64_t sent_count, DType expected,
                        std::int64_t expected_count) const {
  const bool sends = own.kind == Kind::Send;
  const std::string why =
      fmt::format("rank {} sends {}[{}] (tag {}) to rank {}, which receives {}[{}]",
                  sends ? world_.name(rank_) : own.peer_name, cohort::to_string(sent), sent_count, tag,
                  sends ? own.peer_name : world_.name(rank_), cohort::to_string(expected), expected_count);
  ErrorContext context;
  context.rank = world_.name(rank_);
  context.host = world_.host();
  context.peer = own.peer_name;
  context.operation = to_string(own);
  context.sequence = own.number;
  context.cause = why;
  return Error(ErrorCode::Mismatch,
               fmt::format("{} refused -- rank {} ({}) -- {} -- give both the same type and count", name_of(own.kind),
                           world_.name(rank_), world_.host(), why),
               std::move(context));
}

/// A send that was over before its receiver refused it is reported by the next operation with that rank.
Error Channels::late(const Channel& channel, const Message& message) const {
  ErrorContext context = channel.late_refusal->context();
  return Error(
      ErrorCode::Mismatch,
      fmt::format("{}; that send was over before it was refused, so {} reports it, which was itself carried out",
                  channel.late_refusal->what(), to_string(message)),
      std::move(context));
}

/// All works that stand in a list of the channel.
std::vector<Channels::WorkPtr> Channels::waiting(const Channel& channel) const {
  std::vector<WorkPtr> all(channel.receives.begin(), channel.receives.end());
  all.insert(all.end(), channel.arriving.begin(), channel.arriving.end());
  all.insert(all.end(), channel.offered.begin(), channel.offered.end());
  all.insert(all.end(), channel.leaving.begin(), channel.leaving.end());
  for (const Outgoing& outgoing : channel.outbox) {
    if (outgoing.work) all.push_back(outgoing.work);
  }
  for (const WorkPtr& work : pulls_) {
    if (work->message_.peer == channel.peer) all.push_back(work);
  }
  return all;
}

std::string Channels::timed_out(const Channel& channel, const Message& message) const {
  const std::string pid = message.peer == kAnySource ? "" : world_.pid_text(message.peer);
  std::string why = message.peer == kAnySource
                        ? sources_text()
                        : fmt::format("rank {}{} {}", message.peer_name, pid.empty() ? "" : fmt::format(" ({})", pid),
                                      message.kind == Kind::Send ? "did not receive it" : "did not send it");
  if (message.peer != kAnySource && message.kind == Kind::Recv && !channel.unexpected.empty()) {
    const Unexpected& first = channel.unexpected.front();
    why += fmt::format("; {} of its messages wait to be received, the first is {}[{}] with tag {}",
                       channel.unexpected.size(), cohort::to_string(first.dtype), first.count, first.tag);
  }
  return fmt::format(
      "{} timed out after {} ms -- rank {} ({}) -- {} -- is it stopped, slow, or in another branch of the program? "
      "give a longer timeout if it is only slow",
      to_string(message), message.timeout.count(), world_.name(rank_), world_.host(), why);
}

/// Whom a receive from any source has waited for, and what of theirs did not fit.
std::string Channels::sources_text() const {
  std::string text = "none of the ranks";
  std::string others;
  for (int peer = 0; peer < world_.size(); ++peer) {
    if (peer == rank_) continue;
    const std::string pid = world_.pid_text(peer);
    text += fmt::format("{} {}{}", text.back() == 's' ? "" : ",", world_.name(peer),
                        pid.empty() ? "" : fmt::format(" ({})", pid));
    const auto& channel = channels_[static_cast<std::size_t>(peer)];
    if (!channel || channel->unexpected.empty()) continue;
    others += fmt::format("; {} messages of rank {} wait to be received, the first has tag {}",
                          channel->unexpected.size(), world_.name(peer), channel->unexpected.front().tag);
  }
  return text + " sent it" + others;
}

/// Whether a peer that is lost ends a work of its channel. From any source, others may still send where it only left.
bool Channels::ends_with(const ChannelWork& work, std::string_view how) const {
  if (work.message_.lies_elsewhere()) return false;
  if (work.message_.peer != kAnySource || how != transport::kLeft) return true;
  return !work.message_.claim && std::all_of(opened_.begin(), opened_.end(), [&](const Channel* other) {
    return world_.lost(other->peer).has_value();
  });
}

/// From time to time: ends the world if a peer is gone that something waits for, or if a deadline has passed.
void Channels::look_after(Lock& lock) {
  if (world_.ended()) return fail_all();
  const auto now = Clock::now();
  if (now - looked_ < kLook || pending_ == 0) return;
  looked_ = now;
  for (std::size_t i = 0; i < opened_.size(); ++i) {
    Channel& channel = *opened_[i];
    if (waiting(channel).empty()) continue;
    if (const auto how = world_.lost(channel.peer)) {
      progress(lock);  // it may have done its part and then gone
      const auto still = waiting(channel);
      if (world_.ended()) continue;
      const auto found =
          std::find_if(still.begin(), still.end(), [&](const auto& one) { return ends_with(*one, *how); });
      if (found != still.end()) {
        const int peer = world_.name(channel.peer);
        const std::string pid = world_.pid_text(channel.peer);
        end(*found, peer, ErrorCode::PeerLost,
            fmt::format("{} failed -- rank {} ({}) lost rank {} ({}{}) -- {} -- see the output of rank {}; the "
                        "communicator has to be formed anew",
                        to_string((*found)->message_), world_.name(rank_), world_.host(), peer, world_.host(),
                        pid.empty() ? "" : ", " + pid, *how, peer));
        return;
      }
    }
    for (const WorkPtr& work : waiting(channel)) {
      if (now < work->deadline() || work->message_.lies_elsewhere()) continue;
      end(work, work->message_.peer_name, ErrorCode::Timeout, timed_out(channel, work->message_));
      return;
    }
  }
}

void Channels::end(const WorkPtr& work, int peer, ErrorCode code, const std::string& text) {
  world_.record(code, peer, work->message_.number, text);
  fail_all();
}

/// The world has ended. What a thread copies right now fails when that thread is back.
void Channels::fail_all() {
  for (Channel* const channel : opened_) {
    const std::vector<WorkPtr> all = waiting(*channel);
    channel->receives.clear();
    channel->arriving.clear();
    channel->offered.clear();
    channel->leaving.clear();
    channel->outbox.clear();
    for (const WorkPtr& work : all) {
      if (work->busy_ || work->outcome()) continue;  // those from any source stand in every channel
      complete(work, world_.recorded(to_string(work->message_), work->message_.number));
    }
  }
  pulls_.erase(std::remove_if(pulls_.begin(), pulls_.end(), [](const WorkPtr& work) { return !work->busy_; }),
               pulls_.end());
  pulls_to_do_.store(0, std::memory_order_relaxed);
  claims_.clear();
}

/// The sender's memory could not be read: it is gone, or that is not allowed after all.
void Channels::lost_in_pull(Lock& lock, const WorkPtr& work, const Error& why) {
  work->busy_ = true;  // no other thread tries meanwhile
  // A process that dies loses its memory a little before it shows as dying.
  std::optional<std::string> how;
  for (int i = 0; i < 100 && !how && !world_.ended(); ++i) {
    lock.unlock();
    how = world_.lost(work->message_.peer);
    if (!how) std::this_thread::sleep_for(2ms);
    lock.lock();
  }
  work->busy_ = false;
  const std::string pid = world_.pid_text(work->message_.peer);
  if (how) {
    end(work, work->message_.peer_name, ErrorCode::PeerLost,
        fmt::format("{} failed -- rank {} ({}) lost rank {} ({}{}) -- {} while its message was read -- see the output "
                    "of rank {}; the communicator has to be formed anew",
                    to_string(work->message_), world_.name(rank_), world_.host(), work->message_.peer_name,
                    world_.host(), pid.empty() ? "" : ", " + pid, *how, work->message_.peer_name));
  } else {
    end(work, work->message_.peer_name, why.code(),
        fmt::format("{} failed -- rank {} ({}) -- {} -- COHORT_PLAN=cross=off does without it",
                    to_string(work->message_), world_.name(rank_), world_.host(), why.what()));
  }
}

}  // namespace cohort::comm::local
