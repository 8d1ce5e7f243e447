#include "ps/backup.h"

#include "base/log.h"
#include "net/socket.h"

#include <algorithm>
#include <utility>

namespace cohort::ps {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kSent = std::size_t{1} << 20;  // bytes of records in an answer
constexpr std::uint64_t kVerifyEvery = 1024;         // number of commands between two comparisons
constexpr milliseconds kLooksAgain(10);
constexpr milliseconds kComesAgain(500);  // time to connect again, if both processes are alive

}  // namespace

// ---- answers ----

bool Backup::may_answer() const {
  return held_.empty() && replication_.may_answer(replication_.position(), Clock::now());
}

void Backup::answer(const ClientPtr& client, std::uint64_t id, const std::string& head, std::size_t bytes,
                    const std::function<void(char*)>& fill) {
  if (may_answer()) return rpc_.answer(client, id, head, bytes, fill);
  std::string body = head;
  body.resize(head.size() + bytes);
  fill(body.data() + head.size());
  answer(client, id, std::move(body));
}

void Backup::answer(const ClientPtr& client, std::uint64_t id, std::string body) {
  if (may_answer()) {
    rpc_.answer(client, id, body);
  } else {
    held_bytes_ += body.size();
    held_.push_back({replication_.position(), client, id, std::move(body)});
  }
}

void Backup::answer_held() {
  const auto now = Clock::now();
  while (!held_.empty() && replication_.may_answer(held_.front().position, now)) {
    rpc_.answer(held_.front().client, held_.front().id, held_.front().body);
    held_bytes_ -= held_.front().body.size();
    held_.pop_front();
    if (held_.empty() && changed_) changed_();
  }
}

// ---- who gets a copy, and has it ----

Result<void> Backup::follow(const ClientPtr& client, const Call& call, const Follow& asked, State* state) {
  const Holder other{asked.by, asked.life};
  if (membership_ == nullptr || !replication_.may_begin(other, asked.copy) || !membership_->map().lives(other)) {
    rpc_.answer(client, call.id, answer_of(Error(ErrorCode::InvalidArgument, "another process has the copy")));
    return {};
  }
  if (state == nullptr) {  // the follower asks again
    rpc_.answer(client, call.id, answer_of(Error(ErrorCode::InvalidArgument, "the rows are being worked on")));
    return {};
  }
  auto pieces = [image = std::make_shared<Image>(state->freeze())]() -> std::optional<std::string> {
    const auto piece = image->next();
    if (!piece) return std::nullopt;
    return record_head({.method = Method::Piece, .body = *piece}).append(*piece);
  };
  replication_.begin(other, asked.copy, std::move(pieces), Clock::now());
  const ClientPtr before = std::exchange(client_, client);
  fetching_.reset();
  sent_.reset();
  if (before && before != client) rpc_.close(before);
  rpc_.answer(client, call.id, pack(Answer{}));
  watch();
  return {};
}

Result<void> Backup::fetch(const ClientPtr& client, const Call& call, const Fetch& asked) {
  if (!replication_.wants(asked.life, asked.copy)) {
    rpc_.answer(client, call.id, answer_of(Error(ErrorCode::InvalidArgument, "the copy is not wanted any more")));
    return {};
  }
  if (client != client_) {  // the follower has connected again
    client_ = client;
    sent_.reset();
    watch();
  }
  if (!replication_.fetch(asked.position, Clock::now(), sent_))
    return fail(ErrorCode::Corrupt, "records from {} on, which it cannot have had", asked.position);
  room_ = asked.room;
  takes_ = std::min<std::size_t>(kSent, asked.most);
  fetching_ = call.id;
  heartbeat_ = rpc_.after(kHeartbeat, [this] {
    if (!fetching_) return;
    rpc_.answer(client_, *std::exchange(fetching_, std::nullopt), pack(Answer{}).append(pack(Fetched{})));
    sent_ = Clock::now();
  });
  answer_held();
  send_records();
  if (replication_.join()) {
    const Holder other = replication_.other();
    tell_map([rows = rows_, self = membership_->self(), other](ServerMap& map) { return add(map, rows, self, other); },
             [this, other](Outcome outcome) {
               if (replication_.other() != other) return;
               if (outcome == Outcome::Refused) return give_up("the map does not take it");
               if (!replication_.joined(other)) return;
               log::info("ps", "the rows of parameter server {} have a backup: {}", rows_,
                         membership_->map().endpoint_of(other));
             });
  }
  return {};
}

Result<void> Backup::append(const Command& command) {
  const bool wanted = journal_ || replication_.phase() != Replication::Phase::Alone;
  const std::string head = wanted ? record_head(command) : std::string();
  if (journal_) {
    if (auto written = journal_->append(command.method, head, command.body); !written) return written;
  }
  replication_.append(head, command.body);
  send_records();
  return {};
}

void Backup::send_records() {
  if (!fetching_ || takes_ == 0 || !replication_.has_records()) return;
  Fetched fetched;
  const std::string records = replication_.records(takes_, fetched.count);
  if (fetched.count == 0) return;
  sent_ = Clock::now();
  rpc_.answer(client_, *std::exchange(fetching_, std::nullopt), pack(Answer{}).append(pack(fetched)).append(records));
}

Result<void> Backup::look_after(State& state) {
  if (journal_) journal_->compact_if_long(state);
  if (++since_verified_ < kVerifyEvery || (!journal_ && replication_.phase() == Replication::Phase::Alone)) return {};
  since_verified_ = 0;
  const auto rows = state.tables().some_rows(turn_++);
  return rows ? append({.method = Method::Verify, .body = pack(*rows)}) : Result<void>();
}

// ---- a backup that is lost ----

void Backup::lose() {
  using Phase = Replication::Phase;
  client_ = nullptr;
  fetching_.reset();
  sent_.reset();
  switch (replication_.phase()) {
    case Phase::Copying:
    case Phase::Near: return give_up("its connection is lost");
    case Phase::Joining:
    case Phase::Following: return look_for(Clock::now() + kComesAgain);
    case Phase::Alone:
    case Phase::Dropping: break;
  }
}

/// Decides whether the backup is dead: it is if no process listens at its address. Otherwise it may only have lost its
/// connection, and will connect again.
void Backup::look_for(Clock::time_point until) {
  const std::string at = membership_->map().endpoint_of(replication_.other());
  membership_->later([this, at, until, alive = std::weak_ptr(alive_), &rpc = rpc_, other = replication_.other()] {
    const auto endpoint = parse_endpoint(at);
    bool dead = !endpoint;
    if (endpoint) {
      const auto socket = net::connect_once(*endpoint, net::deadline_in(milliseconds(100)));
      dead = !socket && socket.error().kind == net::ConnectFailure::Refused;
    }
    rpc.post([this, alive, other, dead, until] {
      if (alive.expired() || replication_.other() != other || client_) return;
      if (dead) return give_up("its process is gone");
      if (Clock::now() >= until) return give_up("its connection is lost");
      timer_ = rpc_.after(kLooksAgain, [this, until] { look_for(until); });
    });
  });
}

void Backup::watch() {
  if (!replication_.is_watched()) return;
  if (replication_.is_silent(Clock::now())) return give_up("it says nothing");
  timer_ = rpc_.after(kSilence / 8, [this] { watch(); });
}

void Backup::give_up(const std::string& why) {
  const Holder other = replication_.other();
  if (!replication_.is_watched()) return;
  if (!replication_.lose()) {  // the process had a copy, but was not the backup yet
    log::info("ps", "the copy of the rows of parameter server {} is given up: {}", rows_, why);
    room_ = ~std::size_t{0};
    fetching_.reset();
    if (const ClientPtr before = std::exchange(client_, nullptr)) rpc_.close(before);
    answer_held();
    return;
  }
  if (!is_over_()) {
    log::warn(
        "ps",
        "the backup of the rows of parameter server {} is lost: {}; they go on without one until another server has "
        "a copy",
        rows_, why);
  }
  tell_map([rows = rows_, self = membership_->self(), other](ServerMap& map) { return drop(map, rows, self, other); },
           [this, other](Outcome outcome) {
             if (outcome == Outcome::Refused) return;  // another process serves the rows: the next map ends this one
             if (!replication_.dropped(other)) return;
             room_ = ~std::size_t{0};
             const ClientPtr before = std::exchange(client_, nullptr);
             if (before) rpc_.close(before);
             answer_held();
           });
}

void Backup::tell_map(Membership::Edit edit, std::function<void(Outcome)> done) {
  membership_->later([this, &membership = *membership_, &rpc = rpc_, alive = std::weak_ptr(alive_),
                      edit = std::move(edit), done = std::move(done)] {
    const auto outcome = membership.change(edit, net::deadline_in(std::chrono::seconds(5)));
    rpc.post([this, alive, outcome, edit, done] {
      if (alive.expired()) return;
      if (outcome) return done(*outcome);
      log::warn("ps", "rows of parameter server {}: {}; trying again", rows_, outcome.error().what());
      tell_map(edit, done);
    });
  });
}

}  // namespace cohort::ps
