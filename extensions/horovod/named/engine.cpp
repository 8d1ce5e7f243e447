#include "horovod/named/engine.h"

#include "base/log.h"
#include "base/thread.h"
#include "comm/api/work_state.h"
#include "horovod/named/executor.h"
#include "horovod/named/requests.h"
#include "horovod/named/rounds.h"
#include "horovod/named/table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace cohort::named {

/// The thread of an Engine, which alone calls the communicator: it negotiates with the other ranks in rounds which
/// operations all have requested, and has them carried out. In a round the ranks' contributions are combined, and every
/// rank draws the same conclusions from them. Any thread may call the public functions.
class EngineCore {
 public:
  EngineCore(Communicator comm, EngineOptions options);
  ~EngineCore();
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;

  Requests& requests() noexcept { return requests_; }
  void shutdown();
  void begin_shutdown();
  bool ended() const noexcept { return over_; }
  Engine::Statistics statistics() const;
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

 private:
  using Clock = std::chrono::steady_clock;

  /// A rank's contribution to a round.
  struct Contribution {
    std::vector<std::uint64_t> words;  // flags, then bits
    std::vector<PendingPtr> described;
    bool joins = false;
    std::vector<Stalled> stalled;
  };

  void run() noexcept;
  void agree_on_options();
  void serve();

  // One round of negotiation.
  bool round(std::vector<Stalled> stalled);  // false: the engine ends
  Contribution contribute(std::vector<Stalled> stalled);
  std::vector<std::uint64_t> combine(const Contribution& own);
  std::vector<std::string> exchange(const std::string& own);
  void enter_descriptions(const Contribution& own);
  void take_table(std::vector<Ready>& ready);
  void take_census(const Contribution& own);
  void fail_expired(const Stall& stall);
  void finish_join();
  Error why_ended();

  Communicator comm_;
  const EngineOptions options_;
  const int rank_;
  const int size_;
  const std::shared_ptr<Wakeup> wakeup_ = std::make_shared<Wakeup>();
  std::atomic<bool> stopping_{false};
  std::atomic<bool> over_{false};  // the engine's thread has done its last work
  Requests requests_;
  Executor executor_;

  // Used by the thread only.
  std::unique_ptr<RoundAnnouncer> announcer_;
  Table table_;
  std::vector<bool> joined_;
  int last_joined_ = -1;
  std::uint64_t round_ = 1;
  std::atomic<std::uint64_t> rounds_{0}, exchanges_{0}, rings_{0};

  std::mutex shutdown_mutex_;
  std::thread thread_;
};

Engine::Engine(Communicator comm, EngineOptions options) {
  if (!comm) raise(ErrorCode::InvalidArgument, "named::Engine: this Communicator belongs to no world");
  core_ = std::make_unique<EngineCore>(std::move(comm), std::move(options));
}

Engine::~Engine() {
  // A forked child has no engine thread, so the core is left to the parent.
  if (core_->requests().in_child()) static_cast<void>(core_.release());
}

int Engine::rank() const noexcept { return core_->rank(); }
int Engine::size() const noexcept { return core_->size(); }

Handle Engine::submit(Request request) { return core_->requests().submit(std::move(request)); }
std::vector<Handle> Engine::submit(std::vector<Request> requests) {
  return core_->requests().submit(std::move(requests));
}

Handle Engine::join_async() { return core_->requests().join(); }
int Engine::join() { return join_async().outcome().last_joined; }

Communicator Engine::form_group(std::span<const int> ranks) { return form_group_async(ranks).outcome().group; }

Handle Engine::form_group_async(std::span<const int> ranks) {
  Request request;
  request.kind = Kind::Group;
  request.name = fmt::format("form_group [{}]", fmt::join(ranks, ", "));
  if (request.name.size() > kLongestName) request.name.resize(kLongestName);  // ranks compare the list itself, too
  request.splits.assign(ranks.begin(), ranks.end());
  return submit(std::move(request));
}

void Engine::shutdown() { core_->shutdown(); }
void Engine::begin_shutdown() { core_->begin_shutdown(); }
bool Engine::ended() const noexcept { return core_->ended(); }
Engine::Statistics Engine::statistics() const { return core_->statistics(); }

namespace {

// Time for which requests without waiters are gathered. A round costs about 10 us on this and all other ranks.
constexpr auto kLinger = std::chrono::microseconds(100);

}  // namespace

EngineCore::EngineCore(Communicator comm, EngineOptions options)
    : comm_(std::move(comm)),
      options_(std::move(options)),
      rank_(comm_.rank()),
      size_(comm_.size()),
      requests_(rank_, size_, options_, options_.timeout.value_or(comm_.timeout()), wakeup_),
      executor_(comm_, options_, requests_, stopping_),
      table_(size_),
      joined_(static_cast<std::size_t>(size_), false) {
  const sys::SignalsBlocked blocked;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    raise(ErrorCode::Unavailable, "named::Engine: no thread -- rank {} -- {} -- raise the limit of threads", rank_,
          error.what());
  }
}

EngineCore::~EngineCore() { shutdown(); }

// --- users' calls ---

void EngineCore::shutdown() {
  const std::lock_guard lock(shutdown_mutex_);
  begin_shutdown();
  if (thread_.joinable()) thread_.join();
}

void EngineCore::begin_shutdown() {
  stopping_ = true;
  wakeup_->notify();
}

Engine::Statistics EngineCore::statistics() const {
  Engine::Statistics now;
  now.rounds = rounds_;
  now.exchanges = exchanges_;
  now.batches = executor_.batches();
  now.rings = rings_;
  return now;
}

// --- the thread ---

void EngineCore::run() noexcept {
  ::pthread_setname_np(::pthread_self(), "cohort-named");
  comm::times::leave_out_this_thread();
  try {
    agree_on_options();
    announcer_ = std::make_unique<MessageRoundAnnouncer>(comm_, wakeup_);
    serve();
    announcer_->close(options_.shutdown_timeout);
  } catch (const Error& error) {
    requests_.end(error);
    if (error.code() != ErrorCode::Mismatch) comm_.abort(error.what());
  } catch (const std::exception& error) {
    requests_.end(
        Error(ErrorCode::Internal, fmt::format("unexpected in the engine of named operations -- {}", error.what())));
    comm_.abort(error.what());
  }
  announcer_.reset();
  over_ = true;
}

// Compares the options from which all ranks plan. Ranks also wait here for each other, however late they start.
void EngineCore::agree_on_options() {
  std::array<std::uint64_t, 3> own{options_.fusion_threshold, options_.cache_capacity,
                                   static_cast<std::uint64_t>(options_.joined_average)};
  std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(size_));
  Work meeting = comm_.all_gather(std::span(own), std::span(all));
  constexpr auto kSlice = std::chrono::milliseconds(50);
  auto patience = options_.shutdown_timeout;
  while (!meeting.wait_for(kSlice)) {
    if (!stopping_) continue;
    patience -= kSlice;
    if (patience.count() <= 0) comm_.abort("a rank ended its engine of named operations before all had made one");
  }
  for (int rank = 1; rank < size_; ++rank) {
    const auto theirs = all.begin() + static_cast<std::ptrdiff_t>(own.size()) * rank;
    if (std::equal(all.begin(), all.begin() + own.size(), theirs)) continue;
    raise(ErrorCode::Mismatch,
          "named::Engine: options differ -- rank 0 has fusion_threshold {}, cache_capacity {}, joined_average {}, rank "
          "{} has {}, {}, {} -- give all ranks the same",
          all[0], all[1], all[2], rank, theirs[0], theirs[1], theirs[2]);
  }
}

void EngineCore::serve() {
  while (true) {
    const bool rung = announcer_->heard() >= round_;
    std::vector<Stalled> stalled = requests_.take_stalled();
    if (rung || !stalled.empty() || requests_.stirred() || stopping_) {
      if (!round(std::move(stalled))) return;
      wakeup_->linger(kLinger);
      continue;
    }
    // Some clocks overflow on time_point::max().
    wakeup_->wait_until(std::min(requests_.look_at(), Clock::now() + std::chrono::hours(1)));
  }
}

// --- one round ---

void visit_fields(auto& m, auto& a, const Stalled*) { a(m.name, m.milliseconds, m.expired); }

namespace {

// Flags of the first word. Ranks combine the words by "and", so a flag is sent as a zero bit.
constexpr std::uint64_t kNews = 1;    // names are described
constexpr std::uint64_t kCensus = 2;  // requests an exchange of the names that ranks lack
constexpr std::uint64_t kEnd = 4;     // a rank shuts down

constexpr std::size_t kMostStalls = 256;

/// A name in an exchange of descriptions.
struct Description {
  std::string name;
  Signature signature;
};
struct Descriptions {
  bool joins = false;
  std::vector<Description> all;
};
/// A rank's part in an exchange about names that wait too long.
struct Census {
  std::vector<std::uint64_t> words;
  std::vector<Stalled> stalled;
};

void visit_fields(auto& m, auto& a, const Description*) { a(m.name, m.signature); }
void visit_fields(auto& m, auto& a, const Descriptions*) { a(m.joins, m.all); }
void visit_fields(auto& m, auto& a, const Census*) { a(m.words, m.stalled); }

bool bit_of(std::span<const std::uint64_t> words, std::size_t slot) noexcept {
  return slot / kWordBits < words.size() && (words[slot / kWordBits] >> (slot % kWordBits) & 1) != 0;
}

}  // namespace

bool EngineCore::round(std::vector<Stalled> stalled) {
  const Contribution own = contribute(std::move(stalled));
  const std::vector<std::uint64_t> all = combine(own);
  ++round_;
  const std::uint64_t flags = ~all.front();
  if ((flags & kEnd) != 0) {
    requests_.end(why_ended());
    return false;
  }
  std::vector<Ready> ready;
  if ((flags & kNews) != 0) enter_descriptions(own);
  requests_.take_slots(std::span(all).subspan(1), joined_, ready);
  if ((flags & kNews) != 0) take_table(ready);
  if ((flags & kCensus) != 0) take_census(own);
  executor_.execute(std::move(ready), *announcer_);
  finish_join();
  return true;
}

EngineCore::Contribution EngineCore::contribute(std::vector<Stalled> stalled) {
  Requests::News news = requests_.take_news();
  Contribution own;
  own.stalled = std::move(stalled);
  own.joins = news.joins;
  own.described = std::move(news.described);
  std::uint64_t flags = 0;
  if (own.joins || !own.described.empty()) flags |= kNews;
  if (!own.stalled.empty()) flags |= kCensus;
  if (stopping_) flags |= kEnd;
  own.words.push_back(~flags);
  own.words.insert(own.words.end(), news.bits.begin(), news.bits.end());
  if (joined_[static_cast<std::size_t>(rank_)]) std::fill(own.words.begin() + 1, own.words.end(), ~std::uint64_t{0});
  return own;
}

std::vector<std::uint64_t> EngineCore::combine(const Contribution& own) {
  std::vector<std::uint64_t> all = own.words;
  AllReduceOptions options;
  options.op = ReduceOp::BitAnd;
  options.timeout = executor_.timeout();
  Work work = comm_.all_reduce(std::span(all), options);
  rounds_.fetch_add(1, std::memory_order_relaxed);
  if (!work.done()) {  // a rank may be asleep
    announcer_->ring(round_);
    rings_.fetch_add(1, std::memory_order_relaxed);
  }
  work.wait();
  return all;
}

/// Sends `own` to all ranks; returns the text of each rank, by rank.
std::vector<std::string> EngineCore::exchange(const std::string& own) {
  AllGatherOptions options;
  options.timeout = executor_.timeout();
  const auto size = static_cast<std::size_t>(size_);
  const auto own_length = static_cast<std::int64_t>(own.size());
  std::vector<std::int64_t> lengths(size);
  comm_.all_gather(std::span(&own_length, 1), std::span(lengths), options).wait();
  std::int64_t total = 0;
  for (const std::int64_t length : lengths) total += length;
  std::string bytes(static_cast<std::size_t>(total), '\0');
  comm_
      .all_gather_v(ConstBuffer(own.data(), own_length, DType::UInt8), Buffer(bytes.data(), total, DType::UInt8),
                    lengths, options)
      .wait();
  std::vector<std::string> result;
  std::size_t at = 0;
  for (const std::int64_t length : lengths) {
    result.push_back(bytes.substr(at, static_cast<std::size_t>(length)));
    at += static_cast<std::size_t>(length);
  }
  return result;
}

void EngineCore::enter_descriptions(const Contribution& own) {
  exchanges_.fetch_add(1, std::memory_order_relaxed);
  Descriptions mine{own.joins, {}};
  for (const PendingPtr& one : own.described) mine.all.push_back({one->request.name, one->signature});
  const std::vector<std::string> all = exchange(codec::encode(mine));
  for (int rank = 0; rank < size_; ++rank) {
    auto theirs = value_or_throw(codec::decode<Descriptions>(all[static_cast<std::size_t>(rank)]));
    for (Description& one : theirs.all) {
      requests_.free_slot(one.name);  // the cached operation is not what all ranks request now
      table_.add(rank, one.name, std::move(one.signature));
    }
    if (!theirs.joins) continue;
    joined_[static_cast<std::size_t>(rank)] = true;
    last_joined_ = rank;
    // The others have announced all outstanding names, which this rank's bits now complete.
    if (rank == rank_) requests_.stir();
  }
}

void EngineCore::take_table(std::vector<Ready>& ready) {
  for (Table::Complete& complete : table_.take_complete(joined_)) {
    PendingPtr own = requests_.take_described(complete.name);
    auto agreed = match(complete.name, complete.brought);
    if (!agreed) {
      if (own) requests_.finish(std::span(&own, 1), agreed.error());
      continue;
    }
    std::vector<bool> lacking(complete.brought.size());
    bool all = true;
    for (std::size_t rank = 0; rank < lacking.size(); ++rank) {
      lacking[rank] = !complete.brought[rank].has_value();
      all = all && !lacking[rank];
    }
    if (all && own && (*agreed)->common.kind != Kind::Group) requests_.remember(*agreed, *own);
    ready.push_back({*std::move(agreed), std::move(lacking), std::move(own)});
  }
}

// --- waiting too long ---

void EngineCore::take_census(const Contribution& own) {
  const bool joined = joined_[static_cast<std::size_t>(rank_)];
  Census mine;
  if (!joined) mine.words.assign(own.words.begin() + 1, own.words.end());
  mine.stalled = own.stalled;
  mine.stalled.resize(std::min(own.stalled.size(), kMostStalls));
  struct Case {
    std::int64_t waited = 0;
    bool expired = false;
  };
  std::map<std::string, Case> cases;
  std::vector<std::vector<std::uint64_t>> bits;
  for (const std::string& bytes : exchange(codec::encode(mine))) {
    auto theirs = value_or_throw(codec::decode<Census>(bytes));
    bits.push_back(std::move(theirs.words));
    for (const Stalled& one : theirs.stalled) {
      Case& known = cases[one.name];
      known.waited = std::max(known.waited, one.milliseconds);
      known.expired = known.expired || one.expired;
    }
  }
  std::vector<Stall> stalls_of_all;
  for (const auto& [name, one] : cases) {
    Stall stall;
    stall.name = name;
    stall.waited = std::chrono::milliseconds(one.waited);
    const auto slot = requests_.slot_of(name);
    for (int rank = 0; rank < size_; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      const bool present = table_.has(rank, name) || (slot && bit_of(bits[index], *slot));
      if (present) stall.present.push_back(rank);
      if (!present && !joined_[index]) stall.missing.push_back(rank);
    }
    if (stall.missing.empty() || stall.present.empty()) continue;  // the name has become ready in this round
    if (one.expired) {
      fail_expired(stall);
    } else {
      stalls_of_all.push_back(std::move(stall));
    }
  }
  if (stalls_of_all.empty()) return;
  if (options_.on_stall) return options_.on_stall(stalls_of_all);
  if (rank_ != 0) return;
  for (const Stall& stall : stalls_of_all) {
    log::warn("named", "'{}' has waited for {} s -- rank{} {} ha{} not asked for it, rank{} {} ha{}", stall.name,
              stall.waited.count() / 1000, stall.missing.size() > 1 ? "s" : "", list_ranks(stall.missing),
              stall.missing.size() > 1 ? "ve" : "s", stall.present.size() > 1 ? "s" : "", list_ranks(stall.present),
              stall.present.size() > 1 ? "ve" : "s");
  }
}

/// Removes the name on every rank; ranks that wait get the error.
void EngineCore::fail_expired(const Stall& stall) {
  const PendingPtr own = requests_.take_expired(stall.name);
  table_.erase(stall.name);
  if (!own) return;
  requests_.finish(
      std::span(&own, 1),
      Error(
          ErrorCode::Timeout,
          fmt::format("'{}' timed out after {} ms -- {} -- rank{} {} did not ask for it, rank{} {} did -- is it "
                      "slow, or in another branch of the program? other operations are not affected",
                      stall.name, stall.waited.count(), to_string(own->signature), stall.missing.size() > 1 ? "s" : "",
                      list_ranks(stall.missing), stall.present.size() > 1 ? "s" : "", list_ranks(stall.present))));
}

// --- join and end ---

void EngineCore::finish_join() {
  if (std::find(joined_.begin(), joined_.end(), false) != joined_.end()) return;
  joined_.assign(joined_.size(), false);
  requests_.finish_join(last_joined_);
}

Error EngineCore::why_ended() {
  const std::uint8_t own = stopping_ ? 1 : 0;
  std::vector<std::uint8_t> all(static_cast<std::size_t>(size_));
  AllGatherOptions options;
  options.timeout = executor_.timeout();
  comm_.all_gather(std::span(&own, 1), std::span(all), options).wait();
  std::vector<int> who;
  for (int rank = 0; rank < size_; ++rank) {
    if (all[static_cast<std::size_t>(rank)] != 0) who.push_back(rank);
  }
  return Error(
      ErrorCode::Aborted,
      fmt::format("the engine of named operations has been shut down by rank{} {} -- rank {} -- what was "
                  "outstanding is not carried out -- wait for operations before shutdown, or make a new engine",
                  who.size() > 1 ? "s" : "", list_ranks(who), rank_));
}

}  // namespace cohort::named
