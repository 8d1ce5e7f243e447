#include "ps/replication.h"

#include "base/log.h"
#include "base/thread.h"
#include "net/rpc.h"
#include "net/socket.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace cohort::ps {

void Replication::append(std::string_view head, std::string_view body) {
  ++position_;
  if (phase_ == Phase::Alone) return;
  records_.push_back(std::string(head).append(body));
  bytes_ += records_.back().size();
}

bool Replication::may_begin(const Holder& other, std::uint64_t copy) const noexcept {
  if (phase_ == Phase::Copying || phase_ == Phase::Near) return other == other_ && copy > copy_;
  return phase_ == Phase::Alone && (other != last_ || copy > copy_);
}

bool Replication::wants(std::uint64_t life, std::uint64_t copy) const noexcept {
  return phase_ != Phase::Alone && phase_ != Phase::Dropping && life == other_.life && copy == copy_;
}

void Replication::begin(const Holder& other, std::uint64_t copy, Pieces pieces, Time now) {
  forget();
  phase_ = Phase::Copying;
  other_ = last_ = other;
  copy_ = copy;
  first_ = 0;
  pieces_ = std::move(pieces);
  heard_ = now;
}

bool Replication::fetch(std::uint64_t received, Time now, std::optional<Time> sent) {
  if (received < first_ || received - first_ > image_.size() + (pieces_ ? 0 : records_.size())) return false;
  for (; first_ < received; ++first_) {
    std::deque<std::string>& from = image_.empty() ? records_ : image_;
    std::size_t& bytes = image_.empty() ? bytes_ : image_bytes_;
    bytes -= from.front().size();
    from.pop_front();
  }
  heard_ = now;
  if (sent) lease_ = *sent + kLease;
  return true;
}

std::string Replication::records(std::size_t bytes, std::uint64_t& count) {
  std::string some;
  count = 0;
  const auto take = [&](const std::string& record) {
    if (count > 0 && some.size() + record.size() > bytes) return false;
    some += record;
    ++count;
    return true;
  };
  for (const std::string& record : image_) {
    if (!take(record)) return some;
  }
  while (pieces_) {
    auto piece = pieces_();
    if (!piece) {
      pieces_ = nullptr;
      break;
    }
    image_bytes_ += piece->size();
    image_.push_back(*std::move(piece));
    if (!take(image_.back())) return some;
  }
  for (const std::string& record : records_) {
    if (!take(record)) break;
  }
  return some;
}

bool Replication::join() {
  if (phase_ == Phase::Copying && !pieces_ && image_.empty() && bytes_ <= kNear) {
    phase_ = Phase::Near;
    near_at_ = position_;
  }
  if (phase_ != Phase::Near || position_ - records_.size() < near_at_) return false;
  phase_ = Phase::Joining;
  return true;
}

bool Replication::joined(const Holder& other) noexcept {
  if (phase_ != Phase::Joining || other_ != other) return false;
  phase_ = Phase::Following;
  return true;
}

bool Replication::lose() {
  if (phase_ == Phase::Joining || phase_ == Phase::Following) {
    phase_ = Phase::Dropping;
    return true;
  }
  if (phase_ != Phase::Dropping) forget();
  return false;
}

bool Replication::dropped(const Holder& other) {
  if (phase_ != Phase::Dropping || other_ != other) return false;
  forget();
  return true;
}

void Replication::forget() {
  phase_ = Phase::Alone;
  other_ = {};
  pieces_ = nullptr;
  image_.clear();
  records_.clear();
  bytes_ = image_bytes_ = 0;
}

bool Replication::may_answer(std::uint64_t position, Time now) const noexcept {
  switch (phase_) {
    case Phase::Alone: return true;
    case Phase::Copying: return !is_behind();
    default: break;
  }
  return position_ - records_.size() >= position && now < lease_;
}

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAgain(10);
constexpr std::size_t kMostWaiting = std::size_t{32} << 20;  // bytes of commands; beyond that, the primary keeps them

}  // namespace

struct Follower::Batch {
  net::RpcAnswer answer;
  struct Received {
    Command command;
    std::string_view record;
  };
  std::vector<Received> commands = {};
  std::size_t bytes() const noexcept { return answer.body().size(); }
};

Follower::Follower(Options options, Membership& membership, std::function<void(End)> on_end)
    : options_(std::move(options)), membership_(membership), on_end_(std::move(on_end)) {
  const ServerMap map = membership_.map();
  primary_ = map.rows[options_.rows].primary;
  endpoint_ = map.endpoint_of(primary_);
  replaying_ = sys::start_without_signals([this] { replay(); });
  thread_ = sys::start_without_signals([this] { run(); });
}

Follower::~Follower() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  replaying_.join();
}

void Follower::run() {
  End end = End::Away;
  try {
    end = follow();
  } catch (const std::exception& error) {
    log::info("ps", "the copy of the rows of parameter server {} is given up: {}", options_.rows, error.what());
  }
  if (!stopping_) on_end_(end);
}

std::unique_ptr<net::RpcClient> Follower::connect(net::Deadline deadline, bool anew) {
  std::unique_ptr<net::RpcClient> primary;
  const net::RpcPlace place = value_or_throw(place_of(endpoint_, options_.secret_file));
  net::rpc_connect(place, deadline, [&](net::SecureConnection connection, const std::string& at, net::Deadline limit) {
    auto made = std::make_unique<net::RpcClient>(std::move(connection), "parameter", at);
    if (anew) {
      const std::string answer =
          made->call(static_cast<std::uint8_t>(Method::Follow),
                     pack(Follow{options_.rows, membership_.self().server, membership_.self().life, copy_}), limit);
      const auto opened = value_or_throw(unpack<Answer>(answer));
      if (opened.record.error) throw *opened.record.error;
    }
    primary = std::move(made);
  });
  return primary;
}

Follower::End Follower::follow() {
  if (!options_.journal.empty()) {
    auto journal = Journal::remove(options_.journal).and_then([this] {
      return Journal::open(options_.journal, rows_.state, options_.journal_tail);
    });
    if (!journal) {
      if (journal.error().code() != ErrorCode::Unavailable) give_up(journal.error());
      return damaged_ ? End::Damaged : End::Away;
    }
    rows_.journal = *std::move(journal);
  }
  std::unique_ptr<net::RpcClient> primary;
  for (const auto until = net::deadline_in(kSilence); !primary;) {  // in short attempts: this process may be ending
    if (stopping_) return End::Away;
    try {
      primary = connect(net::deadline_in(milliseconds(200)), true);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::Timeout || net::passed(until)) throw;
    }
  }
  while (!stopping_) {
    try {
      fetch(*primary);
    } catch (const Error& error) {
      log::debug("ps", "rows of parameter server {}: {}", options_.rows, error.what());
    }
    primary.reset();
    if (damaged_) return End::Damaged;
    if (stopping_ || !is_backup()) return End::Away;
    while (!primary && !stopping_ && !damaged_) {
      const bool listens = somebody_listens();
      const auto silent = Clock::now() - heard_;
      const bool dead = !listens || disowned_ || silent >= kSilence;
      if (dead && silent >= kLease + kLeaseMargin && has_all()) {
        if (const auto end = promote()) return *end;
      }
      try {
        if (listens) primary = connect(std::min(net::deadline_in(milliseconds(100)), heard_ + kSilence), false);
      } catch (const Error& error) {
        log::debug("ps", "rows of parameter server {}: {}", options_.rows, error.what());
      }
      if (!primary) std::this_thread::sleep_for(kAgain);
    }
    if (damaged_) return End::Damaged;
  }
  return End::Away;
}

void Follower::fetch(net::RpcClient& primary) {
  const auto ask = [&] {
    const std::size_t waiting = waiting_bytes_;
    return primary.begin(static_cast<std::uint8_t>(Method::Fetch),
                         pack(Fetch{options_.rows, membership_.self().life, copy_, received_, options_.room() + waiting,
                                    kMostWaiting - std::min(kMostWaiting, waiting)}));
  };
  std::uint64_t call = ask();
  while (!stopping_ && !damaged_) {
    auto batch =
        std::make_unique<Batch>(Batch{primary.finish(call, std::max(heard_, Clock::now() - kSilence / 2) + kSilence)});
    const auto opened = value_or_throw(unpack<Answer>(batch->answer.body()));
    disowned_ = opened.record.error.has_value();
    if (disowned_) throw *opened.record.error;
    const auto fetched = value_or_throw(unpack<Fetched>(opened.payload));
    heard_ = Clock::now();
    std::string_view rest = fetched.payload;
    for (std::uint64_t i = 0; i < fetched.record.count; ++i) {
      const std::string_view before = rest;
      const auto command = next_record(rest);
      if (!command) raise(ErrorCode::Corrupt, "a record that is torn");
      batch->commands.push_back({*command, before.substr(0, before.size() - rest.size())});
    }
    // This process has the commands now, whatever happens to the primary, so it confirms them while they are being run.
    // (If both die, the primary's journal counts. This process's journal has all commands when it takes that place.)
    received_ += batch->commands.size();
    if (!batch->commands.empty()) {
      const std::lock_guard lock(mutex_);
      waiting_bytes_ += batch->bytes();
      waiting_.push_back(std::move(batch));
      changed_.notify_all();
    }
    call = ask();
  }
}

bool Follower::has_all() const {
  const std::lock_guard lock(mutex_);
  return waiting_.empty();
}

void Follower::replay() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    const Batch& batch = *waiting_.front();
    lock.unlock();
    try {
      carry_out(batch);
    } catch (const Error& error) {
      return give_up(error);
    } catch (const std::exception& error) {  // out of memory
      return give_up(Error(ErrorCode::Unavailable, error.what()));
    }
    lock.lock();
    waiting_bytes_ -= batch.bytes();
    waiting_.pop_front();
  }
}

void Follower::give_up(const Error& error) {
  std::string why = error.what();
  if (error.code() == ErrorCode::Corrupt) {
    why += fmt::format(
        " -- it is not what the primary on {} has; is the memory of one of the two hosts sound, and are "
        "both the same build?",
        endpoint_);
  }
  log::error("ps", "the copy of the rows of parameter server {} is given up: {}", options_.rows, why);
  damaged_ = true;
}

void Follower::carry_out(const Batch& batch) {
  auto& [state, journal] = rows_;
  for (const auto& [command, record] : batch.commands) {
    if (stopping_) return;
    if (journal) value_or_throw(journal->append(command.method, record, {}));
    if (const auto done = state.replay(command); !done) throw done.error();
  }
  if (journal && !state.loading()) journal->compact_if_long(state);
  bytes_ = state.tables().bytes() + state.tables().copied();
  const bool gone = !state.loading() && state.workers().count() > 0 && !state.workers().least();
  if (workers_gone_.exchange(gone) != gone) options_.changed();
}

bool Follower::is_backup() const {
  const ServerMap map = membership_.map();
  if (map.rows[options_.rows].backup == membership_.self()) return true;
  // The local copy of the map may be outdated.
  bool is = false;
  const auto looked = membership_.change(
      [&](ServerMap& now) {
        is = now.rows[options_.rows].backup == membership_.self() && now.rows[options_.rows].primary == primary_;
        return Outcome::Already;
      },
      net::deadline_in(std::chrono::seconds(10)));
  return looked.has_value() && is;
}

/// Returns false if the endpoint refuses connections, so its process is gone.
bool Follower::somebody_listens() const {
  const auto socket = net::connect_once(value_or_throw(parse_endpoint(endpoint_)), net::deadline_in(milliseconds(100)));
  return socket || socket.error().kind != net::ConnectFailure::Refused;
}

std::optional<Follower::End> Follower::promote() {
  if (rows_.state.loading()) return End::Away;
  // All workers have left, so the rows are not needed any more.
  if (workers_gone_) return End::Away;
  const auto outcome = membership_.change(
      [&](ServerMap& map) {
        const Outcome made = ps::promote(map, options_.rows, membership_.self());
        epoch_ = map.rows[options_.rows].epoch;
        return made;
      },
      net::deadline_in(std::chrono::seconds(5)));
  if (!outcome) {
    log::warn("ps",
              "the primary of the rows of parameter server {} is gone, and their backup cannot take its place: {}",
              options_.rows, outcome.error().what());
    return std::nullopt;  // the caller tries again
  }
  return *outcome == Outcome::Refused ? End::Away : End::Promoted;
}

}  // namespace cohort::ps
