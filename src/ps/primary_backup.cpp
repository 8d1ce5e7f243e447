// The part of Primary for its backup (a copy of the rows in another process), for answers that wait for the backup, and
// for workers that are lost.

#include "base/log.h"
#include "base/thread.h"
#include "net/socket.h"
#include "ps/journal.h"
#include "ps/primary.h"
#include "ps/server_map.h"

#include <algorithm>
#include <chrono>
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

void Primary::told(const Serving& serving) noexcept { epoch_ = std::max(epoch_, serving.epoch); }

// ---- answers ----

bool Primary::may_answer() const {
  return held_.empty() && replication_.may_answer(replication_.position(), Clock::now());
}

void Primary::answer(const ClientPtr& client, std::uint64_t id, const std::string& head, std::size_t bytes,
                     const std::function<void(char*)>& fill) {
  if (may_answer()) return rpc_.answer(client, id, head, bytes, fill);
  std::string body = head;
  body.resize(head.size() + bytes);
  fill(body.data() + head.size());
  answer(client, id, std::move(body));
}

void Primary::answer(const ClientPtr& client, std::uint64_t id, std::string body) {
  if (may_answer()) {
    rpc_.answer(client, id, body);
  } else {
    held_bytes_ += body.size();
    held_.push_back({replication_.position(), client, id, std::move(body)});
  }
}

void Primary::answer_held() {
  const auto now = Clock::now();
  while (!held_.empty() && replication_.may_answer(held_.front().position, now)) {
    rpc_.answer(held_.front().client, held_.front().id, held_.front().body);
    held_bytes_ -= held_.front().body.size();
    held_.pop_front();
    if (held_.empty() && options_.changed) options_.changed();
  }
}

// ---- who gets a copy, and has it ----

Result<void> Primary::follow(const ClientPtr& client, const Call& call, const Follow& asked) {
  const Holder other{asked.by, asked.life};
  if (options_.membership == nullptr || !replication_.may_begin(other, asked.copy) ||
      !options_.membership->map().lives(other)) {
    rpc_.answer(client, call.id, answer_of(Error(ErrorCode::InvalidArgument, "another process has the copy")));
    return {};
  }
  if (working_) {  // the follower asks again
    rpc_.answer(client, call.id, answer_of(Error(ErrorCode::InvalidArgument, "the rows are being worked on")));
    return {};
  }
  auto pieces = [image = std::make_shared<Image>(state_.freeze())]() -> std::optional<std::string> {
    const auto piece = image->next();
    if (!piece) return std::nullopt;
    return record_head({.method = Method::Piece, .body = *piece}).append(*piece);
  };
  replication_.begin(other, asked.copy, std::move(pieces), Clock::now());
  const ClientPtr before = std::exchange(backup_, client);
  fetching_.reset();
  sent_.reset();
  if (before && before != client) rpc_.close(before);
  rpc_.answer(client, call.id, pack(Answer{}));
  look_at_backup();
  return {};
}

Result<void> Primary::fetch(const ClientPtr& client, const Call& call, const Fetch& asked) {
  if (!replication_.wants(asked.life, asked.copy)) {
    rpc_.answer(client, call.id, answer_of(Error(ErrorCode::InvalidArgument, "the copy is not wanted any more")));
    return {};
  }
  if (client != backup_) {  // the follower has connected again
    backup_ = client;
    sent_.reset();
    look_at_backup();
  }
  if (!replication_.fetch(asked.position, Clock::now(), sent_))
    return fail(ErrorCode::Corrupt, "records from {} on, which it cannot have had", asked.position);
  backup_room_ = asked.room;
  backup_takes_ = std::min<std::size_t>(kSent, asked.most);
  fetching_ = call.id;
  heartbeat_ = rpc_.after(kHeartbeat, [this] {
    if (!fetching_) return;
    rpc_.answer(backup_, *std::exchange(fetching_, std::nullopt), pack(Answer{}).append(pack(Fetched{})));
    sent_ = Clock::now();
  });
  answer_held();
  send_records();
  if (replication_.join()) {
    const Holder other = replication_.other();
    tell_map([rows = *options_.rows, self = options_.membership->self(),
              other](ServerMap& map) { return add(map, rows, self, other); },
             [this, other](Outcome outcome) {
               if (replication_.other() != other) return;
               if (outcome == Outcome::Refused) return backup_is_lost("the map does not take it");
               if (!replication_.joined(other)) return;
               log::info("ps", "the rows of parameter server {} have a backup: {}", *options_.rows,
                         options_.membership->map().endpoint_of(other));
             });
  }
  return {};
}

void Primary::send_records() {
  if (!fetching_ || backup_takes_ == 0 || !replication_.has_records()) return;
  Fetched fetched;
  const std::string records = replication_.records(backup_takes_, fetched.count);
  if (fetched.count == 0) return;
  sent_ = Clock::now();
  rpc_.answer(backup_, *std::exchange(fetching_, std::nullopt), pack(Answer{}).append(pack(fetched)).append(records));
}

void Primary::verify_now_and_then() {
  if (replication_.phase() == Replication::Phase::Alone || ++since_verified_ < kVerifyEvery) return;
  since_verified_ = 0;
  const auto rows = state_.tables().some_rows(turn_++);
  if (!rows) return;
  const std::string body = pack(*rows);
  replication_.append({.method = Method::Verify, .body = body});
}

// ---- a backup that is lost ----

void Primary::lose_backup() {
  using Phase = Replication::Phase;
  backup_ = nullptr;
  fetching_.reset();
  sent_.reset();
  switch (replication_.phase()) {
    case Phase::Copying:
    case Phase::Near: return backup_is_lost("its connection is lost");
    case Phase::Joining:
    case Phase::Following: return look_for_backup(Clock::now() + kComesAgain);
    case Phase::Alone:
    case Phase::Dropping: break;
  }
}

/// Decides whether the backup is dead: it is if no process listens at its address. Otherwise it may only have lost its
/// connection, and will connect again.
void Primary::look_for_backup(Clock::time_point until) {
  const std::string at = options_.membership->map().endpoint_of(replication_.other());
  options_.membership->later([at, until, self = self_, &rpc = rpc_, other = replication_.other()] {
    const auto endpoint = parse_endpoint(at);
    bool dead = !endpoint;
    if (endpoint) {
      const auto socket = net::connect_once(*endpoint, net::deadline_in(milliseconds(100)));
      dead = !socket && socket.error().kind == net::ConnectFailure::Refused;
    }
    rpc.post([self, other, dead, until] {
      Primary* const primary = *self;
      if (primary == nullptr || primary->replication_.other() != other || primary->backup_) return;
      if (dead) return primary->backup_is_lost("its process is gone");
      if (Clock::now() >= until) return primary->backup_is_lost("its connection is lost");
      primary->backup_timer_ = primary->rpc_.after(kLooksAgain, [primary, until] { primary->look_for_backup(until); });
    });
  });
}

void Primary::look_at_backup() {
  if (!replication_.is_watched()) return;
  if (replication_.is_silent(Clock::now())) return backup_is_lost("it says nothing");
  backup_timer_ = rpc_.after(kSilence / 8, [this] { look_at_backup(); });
}

void Primary::backup_is_lost(const std::string& why) {
  const Holder other = replication_.other();
  if (!replication_.is_watched()) return;
  if (!replication_.lose()) {  // it had a copy, but was not the backup yet
    log::info("ps", "the copy of the rows of parameter server {} is given up: {}", *options_.rows, why);
    backup_room_ = ~std::size_t{0};
    fetching_.reset();
    if (const ClientPtr before = std::exchange(backup_, nullptr)) rpc_.close(before);
    answer_held();
    return;
  }
  if (!workers_gone()) {
    log::warn(
        "ps",
        "the backup of the rows of parameter server {} is lost: {}; they go on without one until another server has "
        "a copy",
        *options_.rows, why);
  }
  tell_map([rows = *options_.rows, self = options_.membership->self(),
            other](ServerMap& map) { return drop(map, rows, self, other); },
           [this, other](Outcome outcome) {
             if (outcome == Outcome::Refused) return;  // another process serves the rows: the next map ends this one
             if (!replication_.dropped(other)) return;
             backup_room_ = ~std::size_t{0};
             const ClientPtr before = std::exchange(backup_, nullptr);
             if (before) rpc_.close(before);
             answer_held();
           });
}

void Primary::tell_map(Membership::Edit edit, std::function<void(Outcome)> done) {
  Membership& membership = *options_.membership;
  membership.later([&membership, &rpc = rpc_, self = self_, edit = std::move(edit), done = std::move(done)] {
    const auto outcome = membership.change(edit, net::deadline_in(std::chrono::seconds(5)));
    rpc.post([self, outcome, edit, done] {
      if (*self == nullptr) return;
      if (outcome) return done(*outcome);
      log::warn("ps", "rows of parameter server {}: {}; trying again", *(*self)->options_.rows, outcome.error().what());
      (*self)->tell_map(edit, done);
    });
  });
}

void Primary::on_gone(const ClientPtr& client) {
  parked_.remove_if([&](const Parked& one) { return one.client == client; });
  waiting_.remove_if([&](const Waiting& one) { return one.client == client; });
  std::erase_if(late_, [&](const Late& one) {
    if (one.client == client) late_bytes_ -= one.body.size();
    return one.client == client;
  });
  if (client == backup_) lose_backup();
  const auto found = sessions_.find(client);
  if (found == sessions_.end()) return;
  const Session session = found->second;
  sessions_.erase(found);
  be_patient(session.worker, session.incarnation, options_.patience);
}

void Primary::be_patient(std::uint32_t number, std::uint64_t incarnation, milliseconds time) {
  patience_timers_[number] = rpc_.after(time, [this, number, incarnation] {
    // A worker that has come again meanwhile waits among the calls.
    if (must_wait()) return be_patient(number, incarnation, kStillWorking);
    const Worker& worker = state_.workers().at(number);
    if (worker.incarnation != incarnation) return;
    if (worker.phase == Worker::Phase::Live || worker.phase == Worker::Phase::Joined) decide(number, incarnation);
  });
}

void Primary::decide(std::uint32_t number, std::uint64_t incarnation) {
  for (const auto& settlement : settlements_) {
    if (settlement->question().worker == number && settlement->question().incarnation == incarnation) return;
  }
  const Settle question{number, incarnation, 0};
  if (!note({.method = Method::Settle, .worker = number}, pack(question))) return;
  const Hello& known = *state_.introduced();
  std::vector<std::uint32_t> others;
  for (std::uint32_t i = 0; i < known.servers.size(); ++i) {
    if (i != known.server) others.push_back(i);
  }
  if (others.empty()) {
    lost(question, state_.ended(question));
    return;
  }
  settlements_.push_back(std::make_unique<Settlement>(
      question, state_.ended(question), std::move(others),
      [place_of = options_.place_of, known](std::uint32_t server) { return place_of(known, server); }));
  look_at_settlements();
}

void Primary::look_at_settlements() {
  for (auto at = settlements_.begin(); at != settlements_.end() && !working_;) {
    const auto here = at++;
    const auto ended = (*here)->result();
    if (!ended) continue;
    const Settle question = (*here)->question();
    settlements_.erase(here);
    lost(question, *ended);
  }
  looking_ = settlements_.empty() ? nullptr : rpc_.after(milliseconds(10), [this] { look_at_settlements(); });
}

void Primary::lost(const Settle& question, std::int64_t ended) {
  log::warn("ps", "worker {} on {} is lost at clock {}; {}", question.worker, state_.workers().at(question.worker).host,
            ended,
            state_.has_staged(question.worker, ended) ? "its pushes after that are dropped" : "the others go on");
  (void)note({.method = Method::Lost, .worker = question.worker, .incarnation = question.incarnation},
             pack(Settled{ended}));
  afterwards([this, worker = question.worker] { let_in(worker); });
}

/// Lets the worker's new process in, when everything that an earlier one has done is settled.
void Primary::let_in(std::uint32_t worker) {
  for (const ClientPtr& client : clients_of(worker)) rpc_.close(client);
  std::list<Waiting> come;
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    const auto here = at++;
    if (here->hello.worker == worker) come.splice(come.end(), waiting_, here);
  }
  for (const Waiting& one : come) {
    if (const auto may = agrees(one.hello); !may) {
      answer(one.client, one.id, answer_of(may.error()));
    } else {
      join(one.client, one.id, one.hello);
    }
  }
}

std::vector<Primary::ClientPtr> Primary::clients_of(std::uint32_t worker) const {
  std::vector<ClientPtr> clients;
  for (const auto& [client, session] : sessions_) {
    if (session.worker == worker) clients.push_back(client);
  }
  return clients;
}

Settlement::Settlement(const Settle& question, std::int64_t ended, std::vector<std::uint32_t> others, PlaceOf place_of)
    : question_(question), others_(std::move(others)), place_of_(std::move(place_of)), most_(ended) {
  thread_ = sys::start_without_signals([this] { run(); });
}

Settlement::~Settlement() {
  stopping_ = true;
  thread_.join();
}

void Settlement::run() {
  for (const std::uint32_t server : others_) {
    Settle question = question_;
    question.server = server;
    for (bool answered = false; !answered;) {
      if (stopping_) return;
      try {
        // A short deadline, so that this server can end without waiting for the other one.
        const auto deadline = net::deadline_in(milliseconds(500));
        const net::RpcPlace place = value_or_throw(place_of_(server));
        net::rpc_connect(place, deadline, [&](net::SecureConnection connection, const std::string& at, net::Deadline) {
          net::RpcClient client(std::move(connection), "parameter", at);
          const std::string answer = client.call(static_cast<std::uint8_t>(Method::Settle), pack(question), deadline);
          const auto opened = value_or_throw(unpack<Answer>(answer));
          if (opened.record.error) throw *opened.record.error;
          const auto settled = value_or_throw(codec::decode<Settled>(opened.payload));
          const std::lock_guard lock(mutex_);
          most_ = std::max(most_, settled.committed);
          answered = true;
        });
      } catch (const Error& error) {
        {
          const std::lock_guard lock(mutex_);
          trouble_ = error.what();
        }
        std::this_thread::sleep_for(milliseconds(20));
      }
    }
  }
  const std::lock_guard lock(mutex_);
  settled_ = true;
}

std::optional<std::int64_t> Settlement::result() const {
  const std::lock_guard lock(mutex_);
  return settled_ ? std::optional(most_) : std::nullopt;
}

std::string Settlement::trouble() const {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

}  // namespace cohort::ps
