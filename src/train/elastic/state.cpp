#include "base/env.h"
#include "base/log.h"
#include "base/records.h"
#include "base/result.h"
#include "net/address.h"
#include "net/store.h"
#include "rendezvous/epochs.h"
#include "telemetry/status_page.h"
#include "train/checkpoint/exchange.h"
#include "train/elastic/agreement.h"
#include "train/elastic/ledger.h"
#include "train/elastic/progress.h"

#include <cohort/elastic.h>
#include <cohort/init.h>
#include <cohort/preemption.h>
#include <cohort/track.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <span>
#include <thread>
#include <utility>

namespace cohort::elastic {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// A rank's notice to the others at a step's end; the highest one takes effect.
enum Notice : std::int32_t {
  kGoOn,
  kChange,  ///< another epoch has begun
  kLeave,   ///< this rank was told to end; if all ranks were, the job ends
  kEnd,     ///< the job was told to end
};

/// Time that a rank that was told to end waits to learn whether all were, since a signal may reach ranks before agents.
constexpr auto kToldApart = std::chrono::seconds(1);
/// Wait after which the job has too few members; longer than the 3 s after which the supervisor counts a host as lost.
constexpr auto kUntilSaved = std::chrono::seconds(10);
/// Exit status of a process that was told to end and cannot save, so that a restart would find no checkpoint.
constexpr int kToldToEnd = 128 + SIGTERM;
/// Time that the remaining ranks have to report how far they are.
constexpr auto kChoice = std::chrono::seconds(1);

}  // namespace

struct State::Impl {
  struct Kept {
    Value value;
    std::string copy;  ///< the value, serialised at the last step's end
  };

  Parts parts;
  std::map<std::string, Kept> values;
  std::map<std::string, std::function<SamplePosition()>> samplers;
  std::vector<std::function<void(const World&)>> on_change;
  std::vector<std::function<void()>> on_step, after_step;
  std::int64_t steps = 0;     ///< number of steps and of advances
  std::int64_t advances = 0;  ///< number of advances among `steps`
  bool fresh = true;
  bool interrupted = false;
  bool whole = true;
  std::int32_t first_size = 0;
  Ledger ledger;
  Progress progress;

  std::uint64_t version = 0;  ///< sum of the parts' versions at the last step's end
  std::int64_t entered_at = -1;
  DigestKey key{};
  std::vector<Digest> digests;  ///< digests with `key`, as of step `entered_at`

  // State of the current world.
  std::optional<std::uint64_t> epoch;
  int rank = 0, size = 1;  ///< rank and size in the current world
  int broken = 0;  ///< number of successive worlds of `broken_epoch` that ended because a peer was lost; see gives_up
  std::optional<std::uint64_t> broken_epoch;  ///< epoch of the worlds that `broken` counts
  std::optional<std::uint64_t> told_epoch;    ///< epoch in which this rank has reported the peer it lost
  std::int64_t broken_at = -1;                ///< steps at the end of the last of these worlds
  bool leads = false;                         ///< this rank reports the job's progress
  Communicator notices;                       ///< a separate communicator, since the program orders its own operations
  using Heard = std::array<std::int32_t, 2>;  ///< the highest notice, and the negated lowest
  std::array<Heard, 2> said{};
  std::int32_t own = kGoOn;  ///< this rank's notice in the exchange under way
  std::optional<Work> saying;
  int turn = 0;
  bool told_to_end = false, told_to_leave = false;
  std::optional<Preemption> preemption;
  std::optional<Clock::time_point> told_at;
  std::optional<std::uint64_t> chose_in;  ///< the epoch after which this rank asked who saves
  std::filesystem::path ledger_file;      ///< the ledger that this rank writes; empty: none

  /// Steps as the caller counts them, without advances.
  std::int64_t own_steps() const noexcept { return steps - advances; }

  void require_new(const std::string& name) const {
    if (parts.contains(name) || values.contains(name))
      raise(ErrorCode::InvalidArgument, "elastic::State::add: there is '{}' already", name);
  }

  std::uint64_t version_of_parts() const {
    std::uint64_t sum = 0;
    for (const auto& [name, part] : parts) sum += part->version();
    return sum;
  }

  void keep() {
    for (auto& [name, kept] : values) kept.value.save(kept.copy);
    version = version_of_parts();
  }

  PartContents contents() const {
    PartContents contents;
    for (const auto& [name, part] : parts) contents[name] = part->contents();
    return contents;
  }

  Ledger::Positions positions() const {
    Ledger::Positions all;
    for (const auto& [name, position] : samplers) all[name] = position();
    return all;
  }

  Standing standing(const World& world) const {
    Standing mine{.steps = steps,
                  .fresh = fresh,
                  .whole = whole,
                  .interrupted = interrupted,
                  .first_size = first_size,
                  .host = world.communicator_.host()};
    for (const auto& [name, part] : parts) mine.names.push_back(name);
    for (const auto& [name, kept] : values) mine.names.push_back(name);
    mine.came_anew = status::StatusPage::own().layout().has_state.load() == 0;
    // In the job's first epoch nobody can have trained before.
    if (mine.came_anew && world.rank() == 0 && world.epoch_.value_or(0) > 0) {
      try {
        if (const auto found = reached()) mine.reached = found->steps, mine.checkpoint = found->checkpoint;
      } catch (const Error& error) {
        mine.not_asked = error.what();
      }
    }
    return mine;
  }

  std::int32_t notice() {
    const auto& page = status::StatusPage::own();
    const std::int32_t change = epoch && page.announced_epoch() > *epoch ? kChange : kGoOn;
    if (!preemption || preemption->received() == 0) return change;
    if (!epoch || page.job_ends()) return kEnd;
    if (!told_at) told_at = Clock::now();
    return Clock::now() - *told_at < kToldApart ? change : kLeave;
  }

  /// Aborts an exchange of notices that others have not joined, since nobody waits for its result.
  void end_notices() {
    if (saying && !saying->done()) notices.abort("this rank has left its world");
    try {
      if (saying) saying->wait();
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): nobody needs the result any more
    }
    saying.reset();
    notices = Communicator();
  }
  void take(const Received& received, const Agreement& agreement);
  void exchange_notices();
  bool gives_up(const Error& error);
  bool is_furthest();
  State::Wait choose(bool told);
};

void visit_fields(auto& m, auto& a, const Standing*) {
  a(m.steps, m.fresh, m.whole, m.interrupted, m.first_size, m.host, m.names, m.came_anew, m.reached, m.checkpoint,
    m.not_asked);
}

namespace {

std::vector<Standing> gather(Communicator& comm, const Standing& mine) {
  std::vector<Standing> standings;
  for (const std::string& bytes : checkpoint::gather(comm, codec::encode(mine)))
    standings.push_back(
        value_or_throw(codec::decode<Standing>(bytes, {.longest_text = bytes.size(), .what = "a rank's standing"})));
  return standings;
}

}  // namespace

State::State() : impl_(std::make_unique<Impl>()) {}
State::~State() {
  impl_->end_notices();
  finish();
}

State& State::add(const std::string& name, std::shared_ptr<Part> part) {
  impl_->require_new(name);
  impl_->parts.emplace(name, std::move(part));
  return *this;
}

State& State::add(const std::string& name, Value value) {
  impl_->require_new(name);
  impl_->values.emplace(name, Impl::Kept{std::move(value), {}});
  return *this;
}

void State::add_samples(const std::string& name, std::function<SamplePosition()> position) {
  impl_->samplers.insert_or_assign(name, std::move(position));
}

void State::on_change(std::function<void(const World&)> callback) { impl_->on_change.push_back(std::move(callback)); }
void State::on_step(std::function<void()> callback) { impl_->on_step.push_back(std::move(callback)); }
void State::after_step(std::function<void()> callback) {
  if (impl_->after_step.empty()) add("advances beside steps", impl_->advances);
  impl_->after_step.push_back(std::move(callback));
}
std::int64_t State::steps() const noexcept { return impl_->own_steps(); }
void State::set_steps(std::int64_t steps) { impl_->steps = steps + impl_->advances; }
void State::finish() { impl_->ledger.finish(); }
bool State::told_to_end() const noexcept { return impl_->told_to_end; }
bool State::told_to_leave() const noexcept { return impl_->told_to_leave; }

void State::Impl::take(const Received& received, const Agreement& agreement) {
  for (const auto& [name, contents] : received.contents) parts.at(name)->assign(contents);
  for (const auto& [name, copy] : received.values) values.at(name).value.load(copy);
  // From here on this rank has the whole state, even if the others are lost before they know.
  steps = agreement.steps;
  first_size = agreement.first_size;
  fresh = false;
  status::StatusPage::own().note_state();
  keep();
}

void State::enter(World& world, const std::filesystem::path& ledger) {
  Impl& self = *impl_;
  Communicator& comm = world.communicator_;
  const auto began = Clock::now();
  self.epoch = world.epoch_;
  self.rank = world.rank();
  self.size = world.size();
  self.leads = self.epoch && world.rank() == 0;
  if (!self.preemption) self.preemption.emplace();
  rendezvous::set_init_ends_with_job(false);
  if (self.fresh) self.keep();
  const std::vector<Standing> standings = gather(comm, self.standing(world));
  Agreement agreement = value_or_throw(agree_on_step(standings));
  std::vector<std::string> hosts;
  for (const Standing& one : standings) hosts.push_back(one.host);

  // Sources use their state of the last step's end; takers overwrite theirs.
  const auto is_in = [&comm](const std::vector<int>& ranks) {
    return std::find(ranks.begin(), ranks.end(), comm.rank()) != ranks.end();
  };
  DigestKey key = make_digest_key();
  checkpoint::share_bytes(comm, std::as_writable_bytes(std::span(key)));
  const bool has_it = is_in(agreement.sources);
  const PartContents contents = has_it ? self.contents() : PartContents();
  std::vector<Digest> digests = digests_of(contents, key);
  std::map<std::string, std::string> values;
  for (const auto& [name, kept] : self.values) {
    if (kept.value.scope == Value::Scope::World) values[name] = kept.copy;
  }
  std::vector<Digest> compared = digests;
  // Values are compared only at the beginning: later they may differ by rank, as BatchNorm's statistics do.
  for (const auto& [name, value] : values) {
    if (agreement.begins)
      compared.push_back(digest_of({value.data(), static_cast<std::int64_t>(value.size()), DType::UInt8}, key));
  }
  compare_sources(comm, agreement, contents, compared);
  const double compared_ms = milliseconds_since(began);

  self.ledger_file = ledger;
  self.ledger.open(comm.rank() == 0 ? ledger : std::filesystem::path());
  const auto sending = Clock::now();
  std::size_t bytes = 0;
  if (!agreement.takers.empty()) {
    Received received = send_state(comm, agreement, hosts, {contents, values, digests}, key);
    const bool takes = is_in(agreement.takers);
    // A rank with half of the state would be silently wrong: either all ranks continue, or none.
    std::optional<Error> problem;
    try {
      if (takes) self.take(received, agreement);
    } catch (const Error& error) {
      problem = error;
    } catch (const std::exception& error) {
      problem = Error(ErrorCode::Internal,
                      fmt::format("the state of rank {} does not fit: {}", agreement.sources.front(), error.what()));
    }
    checkpoint::agree(comm, problem);
    if (takes) digests = std::move(received.digests);
    for (const auto& [name, part] : takes ? received.contents : contents) {
      for (const Contents::Item& item : part.items) bytes += item.memory.bytes();
    }
  }
  const double sent_ms = milliseconds_since(sending);

  self.steps = agreement.steps;
  self.first_size = agreement.first_size;
  self.fresh = false;
  // Done even if all begin, since a rank may be lost after it has ended the first step, and the others then continue.
  status::StatusPage::own().note_state();
  self.whole = true;
  self.interrupted = true;  // until `step` resets it
  self.key = key;
  self.digests = std::move(digests);
  self.entered_at = self.steps;
  self.said = {};
  self.own = kGoOn;
  self.turn = 0;
  self.notices = comm.size() > 1 ? comm.split({}) : Communicator();
  world.first_size_ = agreement.first_size;
  for (const auto& callback : self.on_change) callback(world);
  self.keep();
  if (self.leads && self.own_steps() > 0) self.progress.note(self.own_steps());
  self.ledger.enter(world.epoch_.value_or(0), comm.size(), self.own_steps(), self.positions());
  if (comm.rank() != 0) return;
  if (!world.epoch_ && comm.size() > 1)
    log::info("elastic", "this job is not elastic (cohort run --min-np N): it ends when a rank is lost");
  if (agreement.begins) {
    if (world.epoch_.value_or(0) > 0 && standings.front().reached >= 0)
      log::info("elastic", "epoch {}: goes on after step {} of a checkpoint; those that are lost had reached step {}",
                *world.epoch_, self.own_steps(), standings.front().reached);
    return;
  }
  const std::string sent =
      agreement.takers.empty()
          ? std::string()
          : fmt::format("; {:.1f} MB sent to {} in {:.0f} ms ({:.2f} GB/s)", static_cast<double>(bytes) / 1e6,
                        agreement.takers.size() == 1 ? "1 rank" : fmt::format("{} ranks", agreement.takers.size()),
                        sent_ms, static_cast<double>(bytes) / 1e6 / std::max(sent_ms, 1e-3));
  log::info("elastic", "epoch {}: {} after step {}{}; compared in {:.0f} ms{}", world.epoch_.value_or(0),
            comm.size() == 1 ? "1 rank goes on" : fmt::format("{} ranks go on", comm.size()), self.own_steps(),
            agreement.interrupted ? ", the next one is done again" : "", compared_ms, sent);
}

void State::Impl::exchange_notices() {
  std::int32_t mine = notice();
  Heard heard{mine, -mine};
  if (notices) {
    // A notice sent at a step's end takes effect at the next step's end. The exchange is likely to be over by then.
    heard = {};
    if (saying) {
      saying->wait();
      heard = said[static_cast<std::size_t>(1 - turn)];
    }
    std::swap(mine, own);
    if (heard[0] == kGoOn) {
      Heard& place = said[static_cast<std::size_t>(turn)];
      place = {own, -own};
      turn = 1 - turn;
      saying = notices.all_reduce(std::span(place), {.op = ReduceOp::Max});
    }
  }
  if (heard[0] == kGoOn) return;
  interrupted = false;
  told_to_end = heard[0] == kEnd || -heard[1] == kLeave;
  told_to_leave = !told_to_end && mine == kLeave;
  if (told_to_end)
    status::StatusPage::own().note_preemption(preemption->received() != 0 ? preemption->received() : SIGTERM);
  const char* const what = told_to_end     ? "the job was told to end"
                           : told_to_leave ? "this rank was told to end"
                                           : "the job's members change";
  throw MembershipChanged(ErrorCode::Aborted, fmt::format("{}, after step {}", what, own_steps()));
}

void State::step() {
  Impl& self = *impl_;
  for (const auto& callback : self.on_step) callback();
  ++self.steps;
  self.keep();
  if (self.leads) self.progress.note(self.own_steps());
  if (!self.samplers.empty()) self.ledger.step(self.own_steps(), self.positions());
  self.exchange_notices();
  for (const auto& callback : self.after_step) callback();
}

void State::advance() {
  ++impl_->steps;
  ++impl_->advances;
  impl_->keep();
}

/// Members that cannot reach each other would form worlds of their epoch for ever. So the member that most others have
/// lost has to end (of several, the highest rank), and the others go on. Returns true if this rank is that member.
bool State::Impl::gives_up(const Error& error) {
  constexpr int kMostBroken = 5;
  const ErrorContext& context = error.context();
  if (error.code() != ErrorCode::PeerLost || context.peer < 0 || context.peer >= size) return false;
  const bool lost_one = context.cause == error.what();  // (other ranks' errors only quote it)
  if (!lost_one && context.peer != rank) return false;
  if (broken_epoch != epoch || broken_at != own_steps()) broken = 0;
  broken_epoch = epoch;
  broken_at = own_steps();
  if (++broken < kMostBroken) return false;
  int worst = -1;
  try {
    const auto store = store::connect_job_store(net::deadline_in(std::chrono::seconds(2)));
    const auto lost = [&](int peer, int more) {
      return store->add(fmt::format("elastic/lost/{}/{}", *epoch, peer), more);
    };
    if (lost_one && std::exchange(told_epoch, epoch) != epoch) (void)lost(context.peer, 1);
    std::this_thread::sleep_for(kChoice);
    std::int64_t most = 0;
    for (int peer = 0; peer < size; ++peer) {
      if (const std::int64_t times = lost(peer, 0); times > 0 && times >= most) most = times, worst = peer;
    }
  } catch (const Error& unreachable) {
    log::debug("elastic", "who has been lost by most cannot be asked: {}", unreachable.what());
  }
  if (worst != rank) return false;
  log::error(
      "elastic",
      "epoch {}: this rank and others have lost each other {} times in a row, before a step and although all are "
      "members; this one ends, so that the others can go on -- can the hosts reach each other on all ports "
      "(cables, firewalls, COHORT_NETWORK)? The last time: {}",
      *epoch, broken, error.what());
  return true;
}

bool State::leave(const Error& error) {
  Impl& self = *impl_;
  self.end_notices();
  const bool planned = dynamic_cast<const MembershipChanged*>(&error) != nullptr;
  const bool lost = error.code() == ErrorCode::PeerLost || error.code() == ErrorCode::Aborted;
  if (!self.epoch || self.told_to_end || self.told_to_leave || (!planned && !lost)) return false;
  if (self.gives_up(error)) return false;
  self.whole = self.version_of_parts() == self.version ||
               (self.steps == self.entered_at && digests_of(self.contents(), self.key) == self.digests);
  for (auto& [name, kept] : self.values) kept.value.load(kept.copy);
  if (!planned) log::debug("elastic", "after step {}: {}", self.own_steps(), error.what());
  return true;
}

// Returns true on one of the ranks that wait after an epoch: the one with most steps, the oldest of several.
bool State::Impl::is_furthest() {
  const auto store = store::connect_job_store(net::deadline_in(std::chrono::seconds(2)));
  const std::string place = fmt::format("elastic/saves-after/{}", *epoch);
  const std::string mine = fmt::format("{:020} {:010}", steps, 9'999'999'999 - env::number(env::kWorker).value_or(0));
  for (auto best = store->try_get(place); whole && (!best || *best < mine);) {
    auto now = store->compare_and_set(place, best, mine);
    if (now == mine) break;
    best = std::move(now);
  }
  std::this_thread::sleep_for(kChoice);
  return store->try_get(place) == mine;
}

/// Decides whether this rank, which is in no world, saves its state. `told`: true if the job ends.
State::Wait State::Impl::choose(bool told) {
  chose_in = epoch;
  const auto saves = [this] {
    ledger.open(ledger_file);  // perhaps no other rank knows which samples the last steps have used
    return Wait::Save;
  };
  try {
    // The ranks that go on without this rank have its state, and save a later one.
    if (rendezvous::is_removed(status::StatusPage::own().announced_epoch())) return told ? Wait::End : Wait::Over;
    return is_furthest() ? saves() : told ? Wait::End : Wait::Over;
  } catch (const Error& error) {
    if (!told) throw;
    // Ranks that cannot reach their launcher do not know which rank saves, so the first rank of their last world does.
    if (leads && whole) return saves();
    log::warn("elastic",
              "step {} is not saved by this rank but by the first of its world, if that is there: the job's launcher "
              "is not reached: {}",
              own_steps(), error.what());
    return Wait::End;
  }
}

bool State::ends_without_world(const Error& error) {
  Impl& self = *impl_;
  if (!self.epoch || !self.preemption) return false;
  if (error.code() != ErrorCode::Unavailable && error.code() != ErrorCode::PeerLost &&
      error.code() != ErrorCode::Timeout)
    return false;
  // The store vanishes with the launcher, shortly before ranks are told to end.
  const auto ends = [&self] { return self.preemption->received() != 0 && status::StatusPage::own().job_ends(); };
  for (const auto until = Clock::now() + kToldApart; !ends() && Clock::now() < until;)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return ends();
}

State::Wait State::await_members() {
  Impl& self = *impl_;
  rendezvous::set_init_ends_with_job(true);  // `ends_without_world` then says who saves
  auto& page = status::StatusPage::own();
  // After a rank has ended with 0, the job gets new members when all remaining ranks say that they wait.
  struct Waiting {
    status::StatusPage& page;
    explicit Waiting(status::StatusPage& own) : page(own) { page.begin_init(status::StatusLayout::kToBeMember); }
    ~Waiting() { page.end_init(false); }
  } const waiting(page);
  const auto since = Clock::now();
  std::shared_ptr<store::Store> store;
  const auto waits = [&] {
    const auto announced = page.announced_epoch();
    return announced <= *self.epoch || !rendezvous::is_settled(store, announced);  // unsettled: may need this rank
  };
  while (self.epoch && page.fd() >= 0) {
    const bool told = self.preemption->received() != 0 && page.job_ends();
    if (!told && !waits()) break;
    if (told) page.note_preemption(self.preemption->received());  // this rank ends because the job does
    const bool late = Clock::now() - since > kUntilSaved;
    if ((told || late) && self.chose_in != self.epoch) {
      if (const Wait chosen = self.choose(told); chosen != Wait::Over) return chosen;
    } else if (told) {
      return Wait::End;
    } else if (late) {
      break;  // `init` keeps waiting, or all ranks are present and form this epoch's world again
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(page.announced_epoch() <= *self.epoch ? 2 : 20));
    }
  }
  return Wait::Over;
}

namespace {

World form(const Options& options) {
  Communicator communicator = init(options.init);
  return {std::move(communicator), rendezvous::formed_epoch()};
}

/// Returns false if the job has to end.
bool await_members(State& state, const Options& options) {
  while (true) {
    const State::Wait wait = state.await_members();
    if (wait != State::Wait::Save) return wait == State::Wait::Over;
    if (!options.save) continue;
    World alone(form_thread_world(1).front(), std::nullopt);
    log::info("elastic", "there are no other members: this rank saves, after step {}", state.steps());
    options.save(alone);
  }
}

std::filesystem::path ledger_of(const Options& options) {
  if (options.ledger) return *options.ledger;
  const std::filesystem::path folder = env::get(env::kRunDir).value_or("");
  if (folder.empty()) return {};
  return folder / fmt::format("samples-{}.jsonl", env::number(env::kWorker).value_or(0));
}

}  // namespace

int run(State& state, const std::function<void(World&)>& train, const Options& options) {
  const std::filesystem::path ledger = ledger_of(options);
  while (true) {
    std::optional<World> formed;
    try {
      formed = form(options);
    } catch (const rendezvous::Removed& removed) {
      log::info("elastic", "this process leaves the job after step {}: {}", state.steps(),
                removed.cause().empty() ? removed.what() : removed.cause());
      return kRequeueStatus;
    } catch (const Error& error) {
      if (!state.ends_without_world(error)) throw;
      if (await_members(state, options)) continue;
      return options.save ? kRequeueStatus : kToldToEnd;
    }
    World& world = *formed;
    bool goes_on = false;
    try {
      state.enter(world, ledger);
      train(world);
      state.finish();  // before the others can learn that this rank has ended
      // If a rank is lost here, nobody has to wait for it, since all ranks have ended the last step.
      world.communicator().barrier().wait();
      return 0;
    } catch (const Error& error) {
      goes_on = state.leave(error);
      if (!goes_on) state.finish();
      const bool planned = dynamic_cast<const MembershipChanged*>(&error) != nullptr;
      if (!goes_on && (!planned || (!state.told_to_end() && !state.told_to_leave()))) throw;
    } catch (...) {
      state.finish();
      throw;
    }
    if (goes_on) {
      formed.reset();
      if (await_members(state, options)) continue;
    } else if (state.told_to_leave()) {
      return kRequeueStatus;  // the other ranks have the whole state
    } else if (options.save) {
      options.save(world);
    }
    return options.save ? kRequeueStatus : kToldToEnd;
  }
}

}  // namespace cohort::elastic
