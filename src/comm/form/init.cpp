#include "base/env.h"
#include "base/log.h"
#include "base/parse.h"
#include "base/result.h"
#include "base/signals.h"
#include "comm/api/communicator_impl.h"
#include "comm/transport/mpi/endpoint.h"
#include "net/store.h"
#include "rendezvous/detect.h"
#include "rendezvous/epochs.h"
#include "rendezvous/identity.h"
#include "rendezvous/init_plan.h"
#include "rendezvous/meeting.h"
#include "rendezvous/membership.h"
#include "rendezvous/place.h"
#include "telemetry/last_words.h"
#include "telemetry/status_page.h"

#include <cohort/init.h>
#include <cohort/preemption.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

namespace cohort {
namespace {

using rendezvous::InitPlan;
using rendezvous::MeetingPlace;

// A process may form worlds at one place under one name again and again; each has a meeting of its own. All ranks
// number their meetings alike because they make the same calls. The numbers begin anew in each epoch of a job, so that
// members of an earlier epoch and new processes meet. Counted by rank, since ranks may be threads of one process.
std::string next_meeting(const InitPlan& plan, const std::string& group, int epoch) {
  static std::mutex mutex;
  static std::map<std::tuple<std::string, std::string, int, int>, int> meetings;
  const std::lock_guard lock(mutex);
  const auto earlier = meetings.lower_bound({plan.place_name, group, plan.rank, 0});
  const bool comes_again = earlier != meetings.end() && std::get<0>(earlier->first) == plan.place_name &&
                           std::get<1>(earlier->first) == group && std::get<2>(earlier->first) == plan.rank;
  const int started_in = env::number(env::kRestart).value_or(epoch);
  // In an elastic job the membership determines which processes are ranks, so the attempt is not checked.
  if (!comes_again && plan.place == InitPlan::Place::Job && !plan.worker && started_in < epoch) {
    raise(ErrorCode::Unavailable,
          "rank {} is refused: this process was started in attempt {} of the job, which is in attempt {} now -- it is "
          "left over from then: end it",
          plan.rank, started_in, epoch);
  }
  return fmt::format("{}#{}.{}", group, epoch, ++meetings[{plan.place_name, group, plan.rank, epoch}]);
}

// Adds this process's rank, host and meeting place to errors.
std::shared_ptr<MeetingPlace> reach(const InitPlan& plan, const std::string& meeting, net::Deadline deadline,
                                    const std::string& host) {
  try {
    return rendezvous::go_to(plan, meeting, deadline);
  } catch (const Error& error) {
    ErrorContext context;
    context.rank = plan.rank;
    context.host = host;
    context.operation = "init";
    throw Error(error.code(),
                fmt::format("rank {} of {} cannot form its world at {}: {}", plan.rank, plan.size, plan.place_name,
                            error.what()),
                std::move(context));
  }
}

std::vector<rendezvous::BackendChoice> known_backends(std::vector<std::string>& available) {
  std::vector<rendezvous::BackendChoice> known;
  for (const comm::Backend& backend : comm::backends()) {
    known.push_back({std::string(backend.name), backend.several_hosts});
    const comm::Availability availability = backend.probe();
    if (availability.available) {
      available.emplace_back(backend.name);
    } else {
      log::info("comm", "backend {} is not available: {}", backend.name, availability.reason);
    }
  }
  return known;
}

const comm::Backend& backend_named(std::string_view name) {
  for (const comm::Backend& backend : comm::backends()) {
    if (backend.name == name) return backend;
  }
  raise(ErrorCode::Mismatch,
        "init: the ranks chose the backend '{}', which this process does not have -- use the same build everywhere",
        name);
}

std::string make_nonce() {
  const net::Secret random = value_or_throw(net::Secret::generate());
  return {reinterpret_cast<const char*>(random.bytes().data()), 16};
}

/// Keeps local_rank() when ranks of a host leave and others come, so that no rank changes its GPU. Changes nothing if
/// one host stands for several nodes, each of which numbers its ranks from 0.
void keep_local_rank(const InitPlan& plan, rendezvous::Placement& placement) {
  if (plan.kept_local_rank && plan.local_size == placement.local_size) placement.local_rank = *plan.kept_local_rank;
}

Communicator form_alone(const InitPlan& plan) {
  std::vector<std::string> available;
  (void)known_backends(available);
  if (available.empty()) {
    std::string reasons;
    for (const comm::Backend& backend : comm::backends()) {
      reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", backend.name, backend.probe().reason);
    }
    raise(ErrorCode::Unavailable, "init: no backend is available in this process -- {}", reasons);
  }
  comm::FormOptions form;
  form.store = store::make_in_process_store();
  form.placement.host = rendezvous::host_identity().name;
  form.placement.source = plan.source;
  keep_local_rank(plan, form.placement);
  form.init_timeout = plan.init_timeout;
  form.timeout = plan.timeout;
  return Communicator(backend_named(available.front()).create(form));
}

void compare_with_launcher(const InitPlan& plan, const rendezvous::Placement& placement) {
  const bool differs = (plan.local_rank && *plan.local_rank != placement.local_rank) ||
                       (plan.local_size && *plan.local_size != placement.local_size);
  if (!differs) return;
  // A difference is legitimate if one host stands for several nodes; the placement found here is used. `cohort run`
  // allows that if asked to (--starter local), and itself reports which names are one host.
  const std::string text = fmt::format(
      "rank {}: the launcher says local rank {} of {}, but on this host (by boot id, name and namespaces) it is {} of "
      "{}; "
      "using the latter",
      placement.rank, plan.local_rank.value_or(-1), plan.local_size.value_or(-1), placement.local_rank,
      placement.local_size);
  if (plan.place == rendezvous::InitPlan::Place::Job)
    log::debug("comm", "{}", text);
  else
    log::warn("comm", "{}", text);
}

// Reports the wait to the launcher, since ranks wait here in vain if a rank that they wait for has ended.
class Forming {
 public:
  explicit Forming(int size) { status::StatusPage::own().begin_init(size); }
  ~Forming() { status::StatusPage::own().end_init(formed_, epoch_); }
  Forming(const Forming&) = delete;
  Forming& operator=(const Forming&) = delete;
  /// `epoch` is the epoch of an elastic job if this is the world of its members, else -1.
  void set_formed(std::int64_t epoch = -1) {
    formed_ = true;
    epoch_ = epoch;
  }

 private:
  bool formed_ = false;
  std::int64_t epoch_ = -1;
};

// Rank 0 logs the process's first world. `cohort run` logs it itself if it has started the ranks.
void say_what_was_formed(const InitPlan& plan, std::string_view layout) {
  static std::atomic<bool> said{false};
  if (plan.rank != 0) return;
  const auto detected = rendezvous::detect(rendezvous::current_environment());
  const std::string launcher = detected ? detected->launcher : std::string();
  if (launcher == "cohort run" || (plan.size == 1 && launcher.empty()) || said.exchange(true)) return;
  log::info("world", "{} rank{} on {}{}", plan.size, plan.size == 1 ? "" : "s", layout,
            launcher.empty() ? "" : ", started by " + launcher);
}

/// The host that this rank reports. One machine may be divided into several fake hosts.
struct Here {
  rendezvous::HostIdentity host = rendezvous::host_identity();
  std::vector<int> fake;

  Here(int rank, int size) : fake(rendezvous::fake_hosts(size)) {
    if (fake.empty()) return;
    const std::string number = fmt::format("#{}", fake[static_cast<std::size_t>(rank)]);
    host.id += number;
    host.name += number;
  }
};

/// Meets the other ranks of the plan in `store` and forms the communicator with them.
Communicator form_at(MeetingPlace& place, const std::shared_ptr<store::MeetingStore>& store, const InitPlan& plan,
                     const Here& here, const std::string& meeting, net::Deadline deadline) {
  rendezvous::MemberInfo info;
  info.rank = plan.rank;
  info.size = plan.size;
  info.launcher_local_rank = plan.local_rank.value_or(-1);
  info.launcher_local_size = plan.local_size.value_or(-1);
  info.pid = ::getpid();
  info.nonce = make_nonce();
  info.host_id = here.host.id;
  info.host = here.host.name;
  info.build = rendezvous::this_build();
  info.program = plan.program.empty() ? rendezvous::own_executable() : plan.program;
  info.torch = rendezvous::loaded_torch();
  info.source = plan.source;
  info.transport = rendezvous::name_of(plan.transport);
  if (plan.transport == rendezvous::TransportKind::Mpi) {
    if (const auto plugin = mpi::plugin_of_process(); !plugin)
      info.no_transport = std::string_view(plugin.error().what()).substr(0, 4000);
  }
  rendezvous::MeetingOptions meet;
  meet.prefix = "init/" + meeting;
  meet.place = plan.place_name;
  meet.who_may_come = plan.who_may_come;
  meet.backends = known_backends(info.backends);
  meet.deadline = deadline;
  meet.store_ends = plan.place == InitPlan::Place::Rank0 || plan.place == InitPlan::Place::Exchange ||
                    plan.place == InitPlan::Place::Shared;
  const rendezvous::AgreedWorld agreed = rendezvous::hold_meeting(*store, info, meet);

  const rendezvous::AgreedPlace entry = agreed.place_of(plan.rank);
  comm::FormOptions form;
  form.store = store::make_prefix_store(meet.prefix, store);
  form.placement = {plan.rank,        plan.size,        entry.local_rank, entry.local_size,
                    entry.cross_rank, entry.cross_size, here.host.name,   plan.source};
  form.init_timeout =
      std::max(std::chrono::milliseconds(1),
               std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()));
  form.timeout = plan.timeout;
  form.secret = plan.secret;
  form.transport = plan.transport;
  form.one_machine = !here.fake.empty();
  if (entry.cross_size > 1) form.hosts = agreed.hosts;
  if (here.fake.empty()) compare_with_launcher(plan, form.placement);
  keep_local_rank(plan, form.placement);
  Communicator communicator(backend_named(agreed.backend).create(form));
  rendezvous::leave_meeting(*store, info, meet);
  if (place.server) place.server->close_listener();  // the world is complete
  say_what_was_formed(plan, agreed.layout);
  return communicator;
}

// --- elastic jobs ---

/// Why a process is no member of an epoch.
enum class Absent : std::uint8_t { Removed, MaybeNeeded, NotYet };

[[noreturn]] void raise_no_member(const InitPlan& plan, const rendezvous::Membership& membership, Absent absent) {
  ErrorContext context;
  context.host = rendezvous::host_identity().name;
  context.operation = "init";
  const std::size_t others = membership.members.size();
  const double seconds = std::chrono::duration<double>(plan.init_timeout).count();
  const std::string why =
      absent == Absent::Removed ? "is no member of the job any more: its supervisor has removed it"
      : absent == Absent::NotYet
          ? fmt::format("has not become a member of the job within {:g} s: its supervisor began no epoch with it",
                        seconds)
          : fmt::format("was removed, and the others have formed no world without it within {:g} s", seconds);
  const std::string text =
      fmt::format("init at {}: this process, worker {} on {}, {}, and epoch {} goes on with {} other{}{}{} -- end it",
                  plan.place_name, *plan.worker, context.host, why, membership.epoch, others, others == 1 ? "" : "s",
                  membership.cause.empty() ? "" : ": ", membership.cause);
  if (absent == Absent::Removed) throw rendezvous::Removed(text, context, membership.cause);
  throw Error(ErrorCode::Timeout, text, context);
}

/// Sets this process's rank in an epoch. Returns false if the process has no rank yet, or none any more.
bool become_member(InitPlan& plan, const rendezvous::Membership& membership) {
  const auto place = rendezvous::place_of(membership, *plan.worker);
  if (!place) return false;
  plan.rank = place->rank;
  plan.size = static_cast<int>(membership.members.size());
  plan.local_rank = place->local_rank;
  plan.local_size = place->local_size;
  if (const auto started_as = env::number(env::kLocalRank)) plan.kept_local_rank = *started_as;
  plan.source = fmt::format("worker {} in epoch {} of the job", *plan.worker, membership.epoch);
  return true;
}

/// Reaches the job's store, which ends when its launcher ends.
std::shared_ptr<MeetingPlace> reach_until(const rendezvous::JobEnds& ends, const InitPlan& plan, net::Deadline deadline,
                                          const std::string& host) {
  for (int tries = ends ? 10 : 0; tries > 0 && !ends(); --tries) {
    try {
      return reach(plan, {}, std::min(deadline, net::deadline_in(std::chrono::seconds(2))), host);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::Timeout || tries == 1) throw;
    }
  }
  if (ends && ends()) rendezvous::raise_job_ends();
  return reach(plan, {}, deadline, host);
}

/// Forms the world of the job's latest epoch. If a member is lost meanwhile, tries again in the next epoch, which the
/// supervisor begins without that member.
Communicator init_epoch(const InitOptions& options, InitPlan plan) {
  const std::string host = rendezvous::host_identity().name;
  rendezvous::JobEnds ends;
  if (rendezvous::init_ends_with_job()) ends = [] { return status::StatusPage::own().job_ends(); };
  for (std::uint64_t least = 0;;) {
    const net::Deadline deadline = net::deadline_in(plan.init_timeout);  // begins anew in each epoch
    const std::shared_ptr<MeetingPlace> place = reach_until(ends, plan, deadline, host);
    const rendezvous::Membership membership = rendezvous::current_membership(*place->store, least);
    // A new process reports in its status page that it is here; the supervisor then begins an epoch with it.
    const bool member = become_member(plan, membership);
    Forming forming(member ? plan.size : status::StatusLayout::kToBeMember);
    if (!member) {
      // A process that was removed becomes a member again if the others are lost before they have formed a world
      // without it.
      if (rendezvous::was_member(*place->store, membership.epoch, *plan.worker)) {
        const auto formed = rendezvous::await_formed(*place->store, membership.epoch, deadline, ends);
        if (!formed || *formed) raise_no_member(plan, membership, formed ? Absent::Removed : Absent::MaybeNeeded);
      } else if (!rendezvous::await_next_epoch(*place->store, membership.epoch, deadline, ends)) {
        raise_no_member(plan, membership, Absent::NotYet);
      }
      least = membership.epoch + 1;
      continue;
    }
    const auto epoch = static_cast<int>(membership.epoch);
    std::optional<Error> ended;
    try {
      Communicator communicator;
      if (plan.size == 1) {
        communicator = form_alone(plan);
      } else {
        const std::shared_ptr<store::MeetingStore> held(place, place->store.get());
        const std::string meeting = next_meeting(plan, options.group_name, epoch);
        communicator = form_at(*place, rendezvous::until_superseded(held, membership.epoch, ends), plan,
                               Here(plan.rank, plan.size), meeting, deadline);
        rendezvous::conclude(*place->store, "init/" + meeting, membership, plan.rank, deadline, ends);
      }
      if (plan.rank == 0) rendezvous::note_formed(*place->store, membership.epoch);
      forming.set_formed(epoch);
      rendezvous::record_formed(membership, options.group_name);
      log::info("world", "epoch {}: rank {} of {} (worker {})", membership.epoch, plan.rank, plan.size, *plan.worker);
      return communicator;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::PeerLost && error.code() != ErrorCode::Aborted) throw;
      ended = error;
    }
    if (!rendezvous::await_next_epoch(*place->store, membership.epoch, deadline, ends)) {
      throw Error(ended->code(),
                  fmt::format("epoch {}: {} -- the job's supervisor began no later epoch within {:g} s", epoch,
                              ended->what(), std::chrono::duration<double>(plan.init_timeout).count()),
                  ended->context());
    }
    log::debug("world", "epoch {} was not formed: {}", membership.epoch, ended->what());
    least = membership.epoch + 1;
  }
}

}  // namespace

Communicator init_part(const std::string& world, const InitOptions& options) {
  const auto epoch = rendezvous::formed_epoch(world);
  if (!epoch) raise(ErrorCode::InvalidArgument, "init_part: this process is in no world '{}' of an elastic job", world);
  InitOptions of_world = options;
  of_world.rank = of_world.world_size = -1;
  InitPlan plan = value_or_throw(rendezvous::plan_init(of_world, rendezvous::current_environment()));
  plan.rank = options.rank;
  plan.size = options.world_size;
  plan.local_rank = plan.local_size = std::nullopt;
  plan.source = fmt::format("group of {} in epoch {} of the job", plan.size, *epoch);
  Forming forming(plan.size);
  const net::Deadline deadline = net::deadline_in(options.init_timeout);
  const Here here(plan.rank, plan.size);
  const std::shared_ptr<MeetingPlace> place = reach(plan, {}, deadline, here.host.name);
  const std::shared_ptr<store::MeetingStore> held(place, place->store.get());
  Communicator part = form_at(*place, rendezvous::until_superseded(held, *epoch, {}), plan, here,
                              next_meeting(plan, options.group_name, static_cast<int>(*epoch)), deadline);
  forming.set_formed();
  return part;
}

Communicator init(const InitOptions& options) {
  status::keep_last_words();
  status::tell_stacks_when_asked();
  status::show_lines_at_once();
  const InitPlan plan = value_or_throw(rendezvous::plan_init(options, rendezvous::current_environment()));
  if (!plan.note.empty()) log::warn("comm", "{}", plan.note);
  if (plan.worker) return init_epoch(options, plan);
  Forming forming(plan.size);
  if (plan.place == InitPlan::Place::None) {
    if (!options.alone) say_what_was_formed(plan, "this host");
    Communicator alone = form_alone(plan);
    forming.set_formed();
    return alone;
  }
  const net::Deadline deadline = net::deadline_in(plan.init_timeout);
  const Here here(plan.rank, plan.size);
  const bool of_job = plan.place == InitPlan::Place::Job;
  std::string meeting = of_job ? std::string() : next_meeting(plan, options.group_name, 0);
  const std::shared_ptr<MeetingPlace> place = reach(plan, meeting, deadline, here.host.name);
  if (of_job) {
    const auto epoch = place->store->try_get(store::kEpochKey);
    meeting = next_meeting(plan, options.group_name, parse_integer<int>(epoch.value_or("")).value_or(0));
  }
  Communicator communicator =
      form_at(*place, std::shared_ptr<store::MeetingStore>(place, place->store.get()), plan, here, meeting, deadline);
  forming.set_formed();
  return communicator;
}

struct Preemption::State {
  State(PreemptionOptions given, sys::SignalLatch signals) : options(std::move(given)), latch(std::move(signals)) {}
  PreemptionOptions options;
  sys::SignalLatch latch;
  std::int64_t calls = 0;
  int signal = 0;  ///< the signal on which the ranks have agreed; 0: none
};

Preemption::Preemption(PreemptionOptions options) {
  if (options.every < 1) {
    raise(ErrorCode::InvalidArgument, "Preemption: every is {} -- at every call is 1", options.every);
  }
  auto latch = sys::SignalLatch::create(options.signals);
  if (!latch) raise(latch.error().code(), "Preemption: {}", latch.error().what());
  state_ = std::make_unique<State>(std::move(options), *std::move(latch));
  status::StatusPage::own().announce_saving();
}

Preemption::~Preemption() { status::StatusPage::own().withdraw_saving(); }

bool Preemption::requested(Communicator& comm) {
  State& state = *state_;
  if (state.signal != 0) return true;
  if (++state.calls % state.options.every != 0) return false;
  std::int32_t signal = state.latch.received();
  if (comm && comm.size() > 1) {
    status::called("Preemption::requested", [&] {
      comm.all_reduce(std::span(&signal, 1), {.op = ReduceOp::Max, .timeout = state.options.timeout}).wait();
    });
  }
  if (signal == 0) return false;
  state.signal = signal;
  state.latch.keep_handlers();
  status::StatusPage::own().note_preemption(signal);
  return true;
}

int Preemption::signal() const noexcept { return state_->signal; }
int Preemption::received() const noexcept {
  const int signal = state_->latch.received();
  if (signal != 0) state_->latch.keep_handlers();
  return signal;
}

}  // namespace cohort
