#include "ps/follower.h"

#include "base/log.h"
#include "base/thread.h"
#include "net/rpc.h"
#include "net/socket.h"
#include "ps/journal.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace cohort::ps {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAgain(10);
constexpr std::size_t kMostWaiting = std::size_t{32} << 20;  // bytes of commands; beyond it the primary keeps them

}  // namespace

struct Follower::Batch {
  net::RpcAnswer answer;
  std::vector<Command> commands = {};
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
  std::unique_ptr<net::RpcClient> primary;
  for (const auto until = net::deadline_in(kSilence); !primary;) {  // in short turns: this process may end meanwhile
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
      const auto command = next_record(rest);
      if (!command) raise(ErrorCode::Corrupt, "a record that is torn");
      batch->commands.push_back(*command);
    }
    // From here on they are here, whatever happens to the primary: it may say so while they are carried out.
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
    } catch (const std::exception& error) {
      log::error("ps",
                 "the copy of the rows of parameter server {} is not what the primary on {} has: {} -- it is given up; "
                 "is the memory of one of the two hosts sound, and are both the same build?",
                 options_.rows, endpoint_, error.what());
      damaged_ = true;
      return;
    }
    lock.lock();
    waiting_bytes_ -= batch.bytes();
    waiting_.pop_front();
  }
}

void Follower::carry_out(const Batch& batch) {
  for (const Command& command : batch.commands) {
    if (stopping_) return;
    if (const auto done = state_.replay(command); !done) throw done.error();
  }
  bytes_ = state_.bytes();
  const bool gone = !state_.loading() && state_.workers().count() > 0 && !state_.workers().least();
  if (workers_gone_.exchange(gone) != gone) options_.changed();
}

bool Follower::is_backup() const {
  const ServerMap map = membership_.map();
  if (map.rows[options_.rows].backup == membership_.self()) return true;
  // What is known here may be old.
  bool is = false;
  const auto looked = membership_.change(
      [&](ServerMap& now) {
        is = now.rows[options_.rows].backup == membership_.self() && now.rows[options_.rows].primary == primary_;
        return Outcome::Already;
      },
      net::deadline_in(std::chrono::seconds(10)));
  return looked.has_value() && is;
}

/// False: the place refuses, so its process is gone.
bool Follower::somebody_listens() const {
  const auto socket = net::connect_once(value_or_throw(parse_endpoint(endpoint_)), net::deadline_in(milliseconds(100)));
  return socket || socket.error().kind != net::ConnectFailure::Refused;
}

std::optional<Follower::End> Follower::promote() {
  if (state_.loading()) return End::Away;
  // Everybody has left: nobody needs the rows any more.
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
    return std::nullopt;  // and again
  }
  return *outcome == Outcome::Refused ? End::Away : End::Promoted;
}

}  // namespace cohort::ps
