#include "rendezvous/init_plan.h"

#include "base/env.h"
#include "base/parse.h"
#include "net/secret.h"
#include "net/secure_connection.h"
#include "net/socket.h"
#include "rendezvous/exchange.h"
#include "rendezvous/launchers.h"

#include <cohort/init_options.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

namespace cohort::rendezvous {
namespace {

tl::unexpected<Error> bad_init_method(std::string_view text, std::string_view why) {
  return fail(ErrorCode::InvalidArgument,
              "init_method '{}': {} -- write env://, tcp://HOST:PORT, file:///PATH or unix://NAME", text, why);
}

Result<void> parse_query(std::string_view text, std::string_view query, InitMethod& method) {
  while (!query.empty()) {
    const std::size_t end = query.find('&');
    const std::string_view item = query.substr(0, end);
    query = end == std::string_view::npos ? std::string_view() : query.substr(end + 1);
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos) return bad_init_method(text, fmt::format("'{}' has no value", item));
    const std::string_view name = item.substr(0, equals);
    const auto value = parse_integer<int>(item.substr(equals + 1));
    const bool is_rank = name == "rank";
    if (!is_rank && name != "world_size")
      return bad_init_method(text, fmt::format("'{}' is neither rank nor world_size", name));
    if (!value || *value < (is_rank ? 0 : 1))
      return bad_init_method(text, fmt::format("'{}' is not a number from {}", item, is_rank ? 0 : 1));
    std::optional<int>& target = is_rank ? method.rank : method.world_size;
    if (target) return bad_init_method(text, fmt::format("{} is given twice", name));
    target = value;
  }
  return {};
}

}  // namespace

Result<InitMethod> parse_init_method(std::string_view text) {
  InitMethod method;
  const std::size_t scheme_end = text.find("://");
  if (scheme_end == std::string_view::npos) return bad_init_method(text, "there is no '://'");
  const std::string_view scheme = text.substr(0, scheme_end);
  std::string_view rest = text.substr(scheme_end + 3);
  const std::size_t question = rest.find('?');
  if (question != std::string_view::npos) {
    if (auto parsed = parse_query(text, rest.substr(question + 1), method); !parsed)
      return tl::unexpected(parsed.error());
    rest = rest.substr(0, question);
  }
  if (scheme == "env") {
    if (!rest.empty()) return bad_init_method(text, "env:// takes no place: it stands in MASTER_ADDR and MASTER_PORT");
    method.kind = InitMethod::Kind::Env;
    return method;
  }
  if (scheme == "tcp") {
    if (rest.ends_with('/')) rest.remove_suffix(1);
    auto address = net::parse_address(rest);
    if (!address) return tl::unexpected(address.error());
    if (address->port == 0) return bad_init_method(text, "the port is 0; all ranks have to know the same one");
    method.kind = InitMethod::Kind::Tcp;
    method.address = *std::move(address);
    return method;
  }
  if (scheme == "file") {
    if (!rest.starts_with('/')) return bad_init_method(text, "the path has to be absolute: file:///PATH");
    if (rest.ends_with('/')) return bad_init_method(text, "the path is a folder's");
    if (rest.find('\0') != std::string_view::npos) return bad_init_method(text, "the path contains a NUL");
    method.kind = InitMethod::Kind::File;
    method.path = rest;
    return method;
  }
  if (scheme == "unix") {
    if (rest.empty() || rest.size() > 200) return bad_init_method(text, "the name has to have 1 to 200 bytes");
    method.kind = InitMethod::Kind::Unix;
    method.name = rest;
    return method;
  }
  return bad_init_method(text, fmt::format("'{}' is not a way to meet", scheme));
}

namespace {

/// An empty text is tcp. `from`: where the text comes from, for errors.
Result<TransportKind> parse_transport(std::string_view text, std::string_view from) {
  if (text.empty() || text == "tcp") return TransportKind::Tcp;
  if (text == "mpi") return TransportKind::Mpi;
  return fail(ErrorCode::InvalidArgument, "{}='{}': there is no such transport -- give tcp or mpi", from, text);
}

std::mutex kept_mutex;
std::optional<net::Secret> kept;

}  // namespace

// Derives a new secret, so that a value seen in one meeting is useless in another.
void keep_launchers_secret(const net::Secret& of_the_meeting) {
  const net::Mac derived = net::hmac_sha256(of_the_meeting.bytes(), "worlds that are formed later");
  const std::lock_guard lock(kept_mutex);
  kept = net::Secret::from_bytes(derived);
}

namespace {

std::optional<net::Secret> launchers_secret() {
  const std::lock_guard lock(kept_mutex);
  return kept;
}

}  // namespace
}  // namespace cohort::rendezvous

namespace cohort {

RendezvousMethod rendezvous_method(int rank, int size) {
  const rendezvous::Environment given = rendezvous::current_environment();
  if (rendezvous::find(given, env::kInit) != nullptr) return RendezvousMethod::None;
  const auto environment = rendezvous::with_pmix_keys(given);
  if (!environment) return RendezvousMethod::None;
  const auto said = rendezvous::detect(*environment);
  const bool torchrun = said && said->launcher == "torchrun";
  if (size < 0 && torchrun && said->size > 1 && said->local_size != said->size) return RendezvousMethod::TorchsStore;
  if (const auto secret = rendezvous::find_secret({}, *environment, rendezvous::InitPlan::Place::Shared);
      secret && *secret) {
    return RendezvousMethod::Secret;
  }
  const bool is_launchers = said && said->meeting == rendezvous::Meeting::Launcher && said->local_size != said->size &&
                            (size < 0 || (said->rank == rank && said->size == size));
  if (!is_launchers) return RendezvousMethod::None;
  const auto exchange = rendezvous::find_exchange(*said, *environment);
  return exchange && (*exchange)->rank() == said->rank && (*exchange)->size() == said->size ? RendezvousMethod::Launcher
                                                                                            : RendezvousMethod::None;
}

}  // namespace cohort

namespace cohort::rendezvous {
namespace {

using rendezvous::Environment;
using rendezvous::InitMethod;
using std::chrono::milliseconds;

// Longest wait for rank 0, to report to it that this rank has no secret.
constexpr std::chrono::seconds kTellingTime{5};

// Time for ranks to form their world, beyond COHORT_ELASTIC_TIMEOUT.
constexpr std::chrono::seconds kAfterHosts{60};

constexpr milliseconds kLookAgain{200};

constexpr std::string_view kHowToGiveASecret =
    "to meet over a network, give all ranks one secret: `cohort secret FILE` makes it, COHORT_SECRET_FILE=FILE or "
    "InitOptions::secret_file names it (a file of mode 0600 that belongs to you, the same on all hosts). Or, if "
    "everybody on that network may be a rank, COHORT_TRUST_NETWORK=1 says so. `cohort run` needs neither";

// Returns the Unix name at which the ranks of one host meet without a port, made from the address and the run. With a
// secret, no other user can compute and take it. (Without one, another user's rank finds the name, and is refused.)
std::string unix_name(const InitPlan& plan, std::string all) {
  if (plan.secret) {
    const net::Mac mac = net::hmac_sha256(plan.secret->bytes(), all);
    all.assign(mac.begin(), mac.end());
  }
  return "cohort-" + net::sha256_hex(all).substr(0, 24);
}
std::string unix_name(const InitPlan& plan, std::string_view kind, const net::Address& address,
                      const Environment& environment) {
  const std::string host = net::is_loopback_name(address.host) ? "localhost" : address.host;
  return unix_name(
      plan, fmt::format("{}\n{}\n{}\n{}", kind, host, address.port, env::text("TORCHELASTIC_RUN_ID", environment)));
}

// In a pod, waits until the pod with that name runs, since only then the name is known. Elsewhere it is an error.
void wait_for_name(const net::Address& address, const Environment& environment, net::Deadline deadline) {
  if (!env::get("KUBERNETES_SERVICE_HOST", environment)) return;
  while (!net::resolve(address, deadline) && !net::passed(deadline)) std::this_thread::sleep_for(kLookAgain);
}

// Sets the place for tcp:// and env://: with a secret, ranks meet by TCP at the address. Ranks that are surely on one
// host meet at a Unix name, which needs no port (under torchrun, MASTER_PORT belongs to its agent).
Result<void> settle_place(InitPlan& plan, std::string_view kind, const net::Address& address, bool surely_one_host,
                          const Environment& environment, net::Deadline deadline) {
  plan.place = InitPlan::Place::Rank0;
  plan.place_name = fmt::format("{}{}", kind, net::to_string(address));
  if (!surely_one_host) wait_for_name(address, environment, deadline);
  if (!plan.secret && !surely_one_host && plan.trusts_network) {
    // Uses a secret that everybody can compute, so that everything else works like with a real one.
    plan.secret = secret_of_trusted_network();
    if (plan.rank == 0) {
      plan.note = fmt::format("the network is trusted (COHORT_TRUST_NETWORK=1): whoever reaches {} can be a rank",
                              net::to_string(address));
    }
  }
  if (!plan.secret && !surely_one_host) {
    const auto local = net::is_local_host(address.host, deadline);
    if (!local) return tl::unexpected(local.error());
    if (!*local) {
      // Also reports that to rank 0, if rank 0 may be listening there. (torchrun's agent has its own place.)
      if (!env::get("TORCHELASTIC_USE_AGENT_STORE", environment) || kind != "env://")
        net::tell_of_no_secret(address, std::min(deadline, net::deadline_in(kTellingTime)));
      return fail(ErrorCode::Unavailable,
                  "{}{}: without a secret only processes of the same user on the same host are let in, and '{}' is not "
                  "this host -- {}",
                  kind, net::to_string(address), address.host, kHowToGiveASecret);
    }
  }
  if (!plan.secret && !surely_one_host)
    plan.who_may_come =
        fmt::format("This rank has no secret, so only ranks of this host can come -- {}", kHowToGiveASecret);
  if (!plan.secret || surely_one_host) {
    plan.endpoint.unix_name = unix_name(plan, kind, address, environment);
  } else {
    plan.endpoint.tcp = address;
  }
  return {};
}

// Sets the place for unix://, a name that the program chooses, for processes of one host and one user.
void settle_name(InitPlan& plan, const std::string& name) {
  plan.place = InitPlan::Place::Rank0;
  plan.endpoint.unix_name = unix_name(plan, "unix://\n" + name);
  plan.place_name = "unix://" + name;
}

Result<void> settle_master(InitPlan& plan, const Environment& environment, net::Deadline deadline) {
  const std::string host = env::text(env::kMasterAddr, environment);
  if (host.empty() || !env::get(env::kMasterPort, environment)) {
    return fail(ErrorCode::InvalidArgument,
                "{} are set, but {} is not: ranks have to know where to meet -- set MASTER_ADDR and MASTER_PORT to the "
                "same values for all",
                plan.source, host.empty() ? "MASTER_ADDR" : "MASTER_PORT");
  }
  const auto port = env::number(env::kMasterPort, environment);
  if (!port) return tl::unexpected(port.error());
  const bool surely_one_host = net::is_loopback_name(host) || (plan.local_size && *plan.local_size == plan.size);
  return settle_place(plan, "env://", {host, static_cast<std::uint16_t>(*port)}, surely_one_host, environment,
                      deadline);
}

Result<void> settle_job(InitPlan& plan, const Environment& environment) {
  auto address = net::parse_address(env::text(env::kStore, environment));
  if (!address) {
    return fail(ErrorCode::InvalidArgument, "COHORT_STORE: {}", address.error().what());
  }
  if (!plan.secret) {
    return fail(ErrorCode::Unavailable,
                "COHORT_STORE is set but neither COHORT_SECRET_FD nor COHORT_SECRET_FILE: the job's store lets nobody "
                "in without its secret -- "
                "keep COHORT_SECRET_FD in the environment and its descriptor open, or start by `cohort run`");
  }
  plan.place = InitPlan::Place::Job;
  plan.place_name = fmt::format("the job's store {}", net::to_string(*address));
  plan.endpoint.tcp = *std::move(address);
  return {};
}

// Sets the place for Open MPI, PMI, Slurm and the like: on one host a name that only this job's ranks can compute; on
// several the launcher's own meeting place.
Result<void> settle_launcher(InitPlan& plan, const rendezvous::Detected& said, const Environment& environment) {
  if (said.local_size != said.size && said.nodes != 1) {
    Environment usable = environment;
    // Slurm lets a process begin PMI once, which MPI has to do here. So MUNGE carries the secret instead.
    if (plan.transport == TransportKind::Mpi && said.launcher == "Slurm") usable.erase("PMI_FD");
    auto exchange = find_exchange(said, usable);
    if (!exchange) return tl::unexpected(exchange.error());
    if ((*exchange)->rank() != said.rank || (*exchange)->size() != said.size) {
      return fail(ErrorCode::InvalidArgument,
                  "{} says rank {} of {}, but its {} says {} of {} -- they contradict each other", said.source,
                  said.rank, said.size, (*exchange)->name(), (*exchange)->rank(), (*exchange)->size());
    }
    plan.place = InitPlan::Place::Exchange;
    plan.place_name = fmt::format("{}'s meeting place ({})", said.launcher, (*exchange)->name());
    plan.exchange = *std::move(exchange);
    return {};
  }
  std::string job = said.job;
  if (job.empty()) job = rendezvous::launcher_process().value_or("");
  if (job.empty()) {
    return fail(ErrorCode::Unavailable,
                "{}: nothing says which job this is, and other jobs of yours may run here -- set COHORT_INIT to "
                "unix://NAME, with a new name for each job",
                plan.source);
  }
  plan.place = InitPlan::Place::Rank0;
  plan.endpoint.unix_name = unix_name(plan, fmt::format("{}\n{}", said.launcher, job));
  plan.place_name = fmt::format("{}'s job on this host", said.launcher);
  return {};
}

// Sets rank and world size for an explicit address: from the options, else from its query, else from the launcher.
Result<void> settle_rank(InitPlan& plan, const InitOptions& options, const InitMethod& method,
                         const Environment& environment) {
  const auto choose = [](int option, const std::optional<int>& query) {
    return option >= 0 ? std::optional<int>(option) : query;
  };
  if (options.rank >= 0 && method.rank && *method.rank != options.rank) {
    return fail(ErrorCode::InvalidArgument, "InitOptions::rank is {} but init_method says rank={} -- give one of them",
                options.rank, *method.rank);
  }
  if (options.world_size >= 0 && method.world_size && *method.world_size != options.world_size) {
    return fail(ErrorCode::InvalidArgument,
                "InitOptions::world_size is {} but init_method says world_size={} -- give one of them",
                options.world_size, *method.world_size);
  }
  const std::optional<int> rank = choose(options.rank, method.rank);
  const std::optional<int> size = choose(options.world_size, method.world_size);
  if (rank && size) {
    plan.rank = *rank;
    plan.size = *size;
    plan.source = fmt::format("rank={}, world_size={} given by the program", *rank, *size);
    return {};
  }
  auto detected = rendezvous::detect_rank(environment);
  if (!detected) return tl::unexpected(detected.error());
  if (detected->launcher.empty()) {
    return fail(ErrorCode::InvalidArgument,
                "'{}' needs rank and world_size, and {} is given -- set InitOptions::rank and world_size, or write "
                "?rank=R&world_size=N behind the address",
                options.init_method.empty() ? env::text(env::kInit, environment) : options.init_method,
                rank   ? "only the rank"
                : size ? "only the world size"
                       : "neither");
  }
  plan.rank = rank.value_or(detected->rank);
  plan.size = size.value_or(detected->size);
  plan.local_rank = detected->local_rank;
  plan.local_size = detected->local_size;
  plan.source = detected->source;
  return {};
}

// Makes the program's own channel an Exchange, for the rest of an init.
class SharedByTheProgram final : public Exchange {
 public:
  SharedByTheProgram(ShareFunction share, std::string name, int rank, int size)
      : share_(std::move(share)), name_(std::move(name)), rank_(rank), size_(size) {}
  std::string_view name() const override { return name_; }
  std::size_t longest_value() const override { return 4000; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Result<std::string> share(const std::string& key, const std::optional<std::string>& mine,
                            net::Deadline deadline) override {
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    return share_(key, mine, std::max(milliseconds(1), left));
  }

 private:
  const ShareFunction share_;
  const std::string name_;
  const int rank_;
  const int size_;
};

void settle_share(InitPlan& plan, const InitOptions& options) {
  plan.place = InitPlan::Place::Shared;
  plan.exchange = std::make_shared<SharedByTheProgram>(options.share, options.share_name, plan.rank, plan.size);
  plan.place_name = options.share_name;
  if (plan.secret || plan.rank != 0) return;
  static std::mutex mutex;
  static std::set<std::string> said;  // shared by all worlds
  const std::lock_guard lock(mutex);
  if (!said.insert(options.share_name).second) return;
  plan.note = fmt::format(
      "the secret of this world of {} ranks goes through {}: whoever can read that can be a rank. `cohort run` and "
      "COHORT_SECRET_FILE have a safer way",
      plan.size, options.share_name);
}

}  // namespace

net::Secret secret_of_trusted_network() {
  return *net::Secret::from_digits(net::sha256_hex("no secret: the network is trusted"));
}

Result<std::optional<net::Secret>> find_secret(const InitOptions& options, const Environment& environment,
                                               InitPlan::Place place) {
  // The job's store knows the launcher's secret and no other.
  const bool inherited =
      env::get(env::kSecretFd, environment) && (place == InitPlan::Place::Job || options.secret_file.empty());
  const std::string file =
      !options.secret_file.empty() ? options.secret_file : env::text(env::kSecretFile, environment);
  Result<net::Secret> secret = fail(ErrorCode::Unavailable, "no secret");
  if (inherited && (place == InitPlan::Place::Job || file.empty())) {
    const auto descriptor = env::number(env::kSecretFd, environment);
    if (!descriptor) return tl::unexpected(descriptor.error());
    secret = net::Secret::from_sealed_memfd(*descriptor);
    // Outside of a job, the variable was left by an earlier one.
    if (!secret && place != InitPlan::Place::Job) return std::optional<net::Secret>();
    if (!secret && env::get(env::kRank, environment)) {
      return fail(
          secret.error().code(),
          "this process has the variables of rank {} of a job of `cohort run`, and not the rank's secret: it may "
          "be a program that the rank has started -- if it is no rank, start it with COHORT_ALONE=1; {}",
          env::text(env::kRank, environment), secret.error().what());
    }
  } else if (!file.empty()) {
    secret = net::Secret::from_file(file);
  } else {
    return place == InitPlan::Place::Shared ? launchers_secret() : std::nullopt;
  }
  if (!secret) return tl::unexpected(secret.error());
  return std::optional<net::Secret>(*secret);
}

Result<InitPlan> plan_init(const InitOptions& options, const Environment& given) {
  Environment environment = given;
  InitPlan plan;
  plan.init_timeout = options.init_timeout;
  if (options.init_timeout <= milliseconds(0) || options.timeout < milliseconds(0)) {
    return fail(ErrorCode::InvalidArgument, "init: a timeout of {} ms has no meaning -- give one above 0",
                options.init_timeout <= milliseconds(0) ? options.init_timeout.count() : options.timeout.count());
  }
  if (options.group_name.empty() || options.group_name.size() > 200) {
    return fail(ErrorCode::InvalidArgument, "init: group_name has {} bytes; it takes 1 to 200",
                options.group_name.size());
  }
  // Checks all variables now, since some are read later, when errors cannot be reported any more.
  if (const auto good = env::check(environment); !good) return tl::unexpected(good.error());
  const net::Deadline deadline = net::deadline_in(options.init_timeout);
  plan.timeout = options.timeout == milliseconds(0) ? *env::seconds(env::kTimeout, environment) : options.timeout;
  const auto transport =
      parse_transport(options.transport.empty() ? env::text(env::kTransport, environment) : options.transport,
                      "InitOptions::transport");
  if (!transport) return tl::unexpected(transport.error());
  plan.transport = *transport;
  plan.program = !options.program.empty() ? options.program : env::text(env::kProgram, environment);
  plan.trusts_network = options.trust_network || *env::flag(env::kTrustNetwork, environment);
  if (options.alone || *env::flag(env::kAlone, environment)) {
    plan.source = options.alone ? "InitOptions::alone" : "COHORT_ALONE=1";
    return plan;
  }
  auto completed = with_pmix_keys(std::move(environment));
  if (!completed) return tl::unexpected(completed.error());
  environment = *std::move(completed);
  const std::string init = !options.init_method.empty() ? options.init_method : env::text(env::kInit, environment);
  std::optional<InitMethod> method;
  if (!init.empty()) {
    auto parsed = rendezvous::parse_init_method(init);
    if (!parsed) return tl::unexpected(parsed.error());
    method = *std::move(parsed);
  }
  if (options.share && !options.init_method.empty()) {
    return fail(ErrorCode::InvalidArgument, "init: '{}' and InitOptions::share both say where to meet -- give one",
                options.init_method);
  }
  if (options.share && (options.rank < 0 || options.world_size < 0)) {
    return fail(ErrorCode::InvalidArgument, "init: InitOptions::share needs rank and world_size -- set both");
  }
  const bool from_launcher = !options.share && (!method || method->kind == InitMethod::Kind::Env);
  rendezvous::Detected said;
  const bool rank_is_given =
      options.rank >= 0 || options.world_size >= 0 || (method && (method->rank || method->world_size));
  if (!method && !options.share && rank_is_given) {
    return fail(ErrorCode::InvalidArgument,
                "init: rank or world_size is given without an init_method -- say where to meet, as in tcp://HOST:PORT");
  }
  if (options.share) {
    plan.rank = options.rank;
    plan.size = options.world_size;
    plan.source = fmt::format("rank={}, world_size={} given by the program", plan.rank, plan.size);
  } else if (from_launcher && !rank_is_given) {
    auto detected = rendezvous::detect_rank(environment);
    if (!detected) return tl::unexpected(detected.error());
    said = *std::move(detected);
    const bool named = env::get(env::kRank, environment) && env::get(env::kWorldSize, environment);
    if (method && !named) {
      return fail(ErrorCode::InvalidArgument,
                  "env:// needs RANK and WORLD_SIZE, and neither is set{} -- start by `cohort run` or torchrun, set "
                  "them for each process, or leave the init_method empty to go by the launcher",
                  said.launcher.empty() ? "" : fmt::format(" ({} started this process)", said.launcher));
    }
    plan.rank = said.rank;
    plan.size = said.size;
    plan.local_rank = said.local_rank;
    plan.local_size = said.local_size;
    plan.source = said.source;
    plan.note = said.note;
  } else {
    if (auto settled = settle_rank(plan, options, *method, environment); !settled)
      return tl::unexpected(settled.error());
    if (from_launcher) said.meeting = rendezvous::Meeting::Master;
  }
  if (plan.size < 1 || plan.rank < 0 || plan.rank >= plan.size) {
    return fail(ErrorCode::InvalidArgument, "init: there is no rank {} in a world of {} ({}) -- ranks count from 0",
                plan.rank, plan.size, plan.source);
  }
  const bool job = from_launcher && said.meeting == rendezvous::Meeting::JobStore;
  if (job && env::get(env::kWorker, environment)) {
    const auto worker = env::number(env::kWorker, environment);
    if (!worker) return tl::unexpected(worker.error());
    plan.worker = static_cast<int>(*worker);
    // A job that has lost too many hosts waits for new ones, and its ranks wait for the epoch with those.
    plan.init_timeout = std::max(plan.init_timeout, *env::seconds("COHORT_ELASTIC_TIMEOUT", environment) + kAfterHosts);
  }
  if (plan.size == 1 && !plan.worker) {
    auto meant = rendezvous::refuse_unmeant_world_of_one(environment, plan.size, plan.source);
    if (!meant) return tl::unexpected(meant.error());
    return plan;
  }
  if (!options.share && !from_launcher && method->kind == InitMethod::Kind::File) {
    plan.place = InitPlan::Place::File;
    plan.path = method->path;
    plan.place_name = "file://" + plan.path;
    return plan;  // the file's owner and mode decide who may come
  }
  auto secret = find_secret(options, environment,
                            job             ? InitPlan::Place::Job
                            : options.share ? InitPlan::Place::Shared
                                            : InitPlan::Place::Rank0);
  if (!secret) return tl::unexpected(secret.error());
  plan.secret = *std::move(secret);
  if (options.share) {
    settle_share(plan, options);
    return plan;
  }
  if (!from_launcher && method->kind == InitMethod::Kind::Unix) {
    settle_name(plan, method->name);
    return plan;
  }
  const auto settle = [&]() -> Result<void> {
    if (!from_launcher) return settle_place(plan, "tcp://", method->address, false, environment, deadline);
    switch (said.meeting) {
      case rendezvous::Meeting::JobStore: return settle_job(plan, environment);
      case rendezvous::Meeting::Launcher: {
        auto settled = settle_launcher(plan, said, environment);
        // Variables that repeat the launcher's numbers also name a meeting place, usable with a secret.
        const bool other_place = plan.secret && env::get(env::kMasterAddr, environment);
        if (settled || settled.error().code() != ErrorCode::Unavailable || !other_place) return settled;
        break;
      }
      case rendezvous::Meeting::Address:
        return settle_place(plan, said.launcher + " at ", said.address, plan.local_size == plan.size, environment,
                            deadline);
      case rendezvous::Meeting::None:
      case rendezvous::Meeting::Master: break;
    }
    return settle_master(plan, environment, deadline);
  };
  const auto settled = settle();
  if (!settled) return tl::unexpected(settled.error());
  return plan;
}

}  // namespace cohort::rendezvous
