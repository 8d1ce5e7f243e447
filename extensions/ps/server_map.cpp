#include "ps/server_map.h"

#include "base/env.h"
#include "base/log.h"
#include "base/result.h"
#include "base/thread.h"
#include "net/interfaces.h"
#include "net/store.h"
#include "ps/protocol.h"
#include "rendezvous/detect.h"
#include "rendezvous/identity.h"
#include "rendezvous/init_plan.h"

#include <algorithm>
#include <random>
#include <utility>

namespace cohort::ps {

Result<std::string> own_endpoint() {
  const auto store = env::get(env::kStore);
  if (!store) return net::to_string(net::any_loopback_port());
  const auto place = net::parse_address(*store);
  if (!place) return tl::unexpected(place.error());
  auto own = net::address_towards(*place);
  if (!own) return tl::unexpected(own.error());
  // (If the job is only on this host, no process connects over a network.)
  if (!net::is_loopback_name(*own) && env::get(env::kNetwork)) {
    const auto offered = net::offered_addresses();
    if (!offered) return tl::unexpected(offered.error());
    if (!offered->empty()) own = offered->front();
  }
  return net::to_string(net::Address{*own, 0});
}

Result<net::Endpoint> parse_endpoint(const std::string& text) {
  net::Endpoint endpoint;
  if (text.size() > 1 && text.size() <= 101 && text.front() == '@') {
    endpoint.unix_name = text.substr(1);
    return endpoint;
  }
  if (!text.empty() && text.front() == '@') {
    return fail(ErrorCode::InvalidArgument, "'{}' is no endpoint: a name on this host has 1 to 100 letters after the @",
                text);
  }
  auto address = net::parse_address(text);
  if (!address) return tl::unexpected(address.error());
  endpoint.tcp = *std::move(address);
  return endpoint;
}

Result<net::RpcPlace> place_of(const std::string& endpoint, const std::string& secret_file) {
  auto parsed = parse_endpoint(endpoint);
  if (!parsed) return tl::unexpected(parsed.error());
  net::RpcPlace place;
  place.endpoints.push_back(*std::move(parsed));
  place.secure = {.purpose = kPurpose, .longest_message = kLongestMessage};
  if (place.endpoints.front().is_unix()) return place;
  InitOptions options;
  options.secret_file = secret_file;
  auto secret = rendezvous::find_secret(options, rendezvous::current_environment(), rendezvous::InitPlan::Place::Rank0);
  if (!secret) return tl::unexpected(secret.error());
  const auto trusted = env::flag(env::kTrustNetwork);
  if (!trusted) return tl::unexpected(trusted.error());
  const net::Address at = place.endpoints.front().tcp;
  if (!*secret && !*trusted && net::is_loopback_name(at.host) && at.port != 0) {
    // As for ranks, a Unix name accepts only processes of this user.
    place.endpoints.front().unix_name = fmt::format("cohort-server-{}", at.port);
    return place;
  }
  if (!*secret && !*trusted) {
    return fail(
        ErrorCode::InvalidArgument,
        "a parameter server at {} needs a secret -- run under `cohort run`, or name a file of `cohort secret` by "
        "COHORT_SECRET_FILE; or, if everybody on that network may come, COHORT_TRUST_NETWORK=1 says so",
        endpoint);
  }
  place.secret = *secret ? **secret : rendezvous::secret_of_trusted_network();
  return place;
}

Placement Placement::even(std::uint32_t servers) {
  if (servers < 1 || servers > kShards) {
    raise(ErrorCode::InvalidArgument, "a placement over {} parameter servers -- 1 to {} are possible", servers,
          kShards);
  }
  Placement placement;
  placement.version_ = 1;
  placement.servers_ = servers;
  placement.owners_.resize(kShards);
  for (std::uint32_t shard = 0; shard < kShards; ++shard)
    placement.owners_[shard] = static_cast<std::uint16_t>(std::uint64_t{shard} * servers / kShards);
  return placement;
}

std::uint32_t Placement::server_of_row(std::uint64_t key, std::int64_t elements, std::int64_t dim) const noexcept {
  if (elements == 0) return server_of(key);
  __extension__ using Wide = unsigned __int128;
  const auto pieces = static_cast<std::uint64_t>(elements / dim + (elements % dim != 0 ? 1 : 0));
  return static_cast<std::uint32_t>(static_cast<Wide>(std::min(key, pieces - 1)) * servers_ / pieces);
}

bool ServerMap::lives(const Holder& holder) const noexcept {
  return holder.life != 0 && members[holder.server].life == holder.life;
}

namespace {

/// Gives rows to the latest process of the server that had them last, since its journal has all that was acknowledged.
void give_back(const ServerMap& map, Serving& rows) {
  const std::uint32_t server = rows.primary.server;
  rows = {rows.epoch + 1, {server, map.members[server].life}, {}};
}

}  // namespace

Outcome enter(ServerMap& map, std::uint32_t servers, std::uint32_t number, const Member& member,
              std::uint32_t replicas) {
  if (map.members.empty()) {
    map.members.resize(servers);
    map.replicas = servers < 2 ? 0 : replicas;
  }
  if (map.members.size() != servers || number >= servers) return Outcome::Refused;
  if (map.members[number].life == member.life) return Outcome::Already;
  map.members[number] = member;
  if (!map.formed()) {
    const auto all =
        std::all_of(map.members.begin(), map.members.end(), [](const Member& one) { return one.life != 0; });
    if (!all) return Outcome::Made;
    for (std::uint32_t i = 0; i < servers; ++i) map.rows.push_back({1, {i, map.members[i].life}, {}});
    return Outcome::Made;
  }
  for (Serving& rows : map.rows) {
    if (!map.lives(rows.primary) && !map.lives(rows.backup)) give_back(map, rows);
  }
  return Outcome::Made;
}

Outcome promote(ServerMap& map, std::uint32_t rows, const Holder& backup) {
  Serving& serving = map.rows[rows];
  if (serving.primary == backup) return Outcome::Already;
  if (serving.backup != backup || !map.lives(backup)) return Outcome::Refused;
  serving = {serving.epoch + 1, backup, {}};
  return Outcome::Made;
}

Outcome drop(ServerMap& map, std::uint32_t rows, const Holder& primary, const Holder& backup) {
  Serving& serving = map.rows[rows];
  if (serving.primary != primary || !map.lives(primary) || (serving.backup.life != 0 && serving.backup != backup))
    return Outcome::Refused;
  // The epoch is raised even if there is no backup: an earlier change that adds this one may still be under way.
  serving = {serving.epoch + 1, primary, {}};
  return Outcome::Made;
}

Outcome add(ServerMap& map, std::uint32_t rows, const Holder& primary, const Holder& backup) {
  Serving& serving = map.rows[rows];
  if (serving.primary != primary || !map.lives(backup) || backup.server == primary.server) return Outcome::Refused;
  if (serving.backup == backup) return Outcome::Already;
  if (serving.backup.life != 0) return Outcome::Refused;
  serving = {serving.epoch + 1, primary, backup};
  return Outcome::Made;
}

Outcome resign(ServerMap& map, std::uint32_t rows, const Holder& backup, std::uint64_t epoch) {
  Serving& serving = map.rows[rows];
  if (serving.backup != backup || serving.epoch != epoch) return Outcome::Already;
  give_back(map, serving);
  return Outcome::Made;
}

std::optional<std::uint32_t> turn_of(const ServerMap& map, std::uint32_t rows, std::uint32_t server) {
  const Holder& primary = map.rows[rows].primary;
  if (server == primary.server) return std::nullopt;
  const auto count = static_cast<std::uint32_t>(map.members.size());
  const auto key = [&](std::uint32_t one) {
    return std::pair(map.members[one].host == map.members[primary.server].host, (one + count - primary.server) % count);
  };
  std::uint32_t before = 0;
  for (std::uint32_t one = 0; one < count; ++one) {
    if (one != primary.server && key(one) < key(server)) ++before;
  }
  return before;
}

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLookForTasks(200);
constexpr milliseconds kStore(2000);  // longest call, before connecting to the store again

// Each restart of a job has a map of its own.
std::string key_of_job() { return fmt::format("ps/{}/map", env::number(env::kRestart).value_or(0)); }

std::uint64_t new_life() {
  std::random_device random;
  return (std::uint64_t{random()} << 32 | random()) | 1;
}

}  // namespace

void require_same_options(store::Store& store, const Membership::Options& options) {
  const std::string own = options.replicas == 0 ? "no replicas"
                                                : fmt::format("{} replicas and {}", options.replicas,
                                                              options.journals ? "a journal" : "no journal");
  const std::string key = fmt::format("ps/{}/options", env::number(env::kRestart).value_or(0));
  const auto first = store.compare_and_set(key, std::nullopt, own);
  if (first && *first != own)
    raise(ErrorCode::Mismatch, "parameter server {} has {} -- the first one has {}; all have the same options",
          options.number, own, *first);
}

Membership::Membership(Options options)
    : options_(std::move(options)),
      key_(key_of_job()),
      self_{options_.number, new_life()},
      member_{self_.life, options_.endpoint, rendezvous::host_identity().id},
      store_(store::connect_job_store(net::deadline_in(std::chrono::seconds(30)))) {
  require_same_options(*store_, options_);
  const auto entered = value_or_throw(
      change([this](ServerMap& map) { return enter(map, options_.servers, self_.server, member_, options_.replicas); },
             net::deadline_in(std::chrono::seconds(30))));
  if (entered == Outcome::Refused)
    raise(ErrorCode::Mismatch, "parameter server {} of {} -- the first one said that there are {}", self_.server,
          options_.servers, map().members.size());
}

void Membership::start(OnMap on_map) {
  on_map_ = std::move(on_map);
  thread_ = sys::start_without_signals([this] { run(); });
}

Membership::~Membership() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

ServerMap Membership::map() const {
  const std::lock_guard lock(mutex_);
  return map_;
}

void Membership::later(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

Result<Outcome> Membership::change(const Edit& edit, net::Deadline deadline) {
  while (true) {
    std::shared_ptr<store::Store> store;
    {
      const std::lock_guard lock(store_mutex_);
      store = store_;
    }
    try {
      const auto before = store->try_get(key_);
      ServerMap map;
      if (before) map = value_or_throw(codec::decode<ServerMap>(*before, {.longest_text = 1024}));
      const Outcome outcome = edit(map);
      if (outcome != Outcome::Made) {
        found(map);
        return outcome;
      }
      ++map.version;
      std::string desired = codec::encode(map);
      const auto now =
          store->compare_and_set(key_, before ? std::optional<std::string_view>(*before) : std::nullopt, desired);
      if (now && *now == desired) {
        found(map);
        return Outcome::Made;
      }
    } catch (const Error& error) {
      if (error.code() == ErrorCode::Corrupt || error.code() == ErrorCode::InvalidArgument)
        return tl::unexpected(error);
      if (net::passed(deadline)) {
        return fail(ErrorCode::Timeout, "the job's store does not say who serves which rows: {}", error.what());
      }
      try {
        auto again = store::connect_job_store(std::min(deadline, net::deadline_in(kStore)));
        const std::lock_guard lock(store_mutex_);
        if (store_ == store) store_ = std::move(again);
      } catch (const Error& none) {
        log::debug("ps", "the job's store: {}", none.what());
      }
    }
  }
}

void Membership::found(const ServerMap& map) {
  const std::lock_guard lock(mutex_);
  if (map.version > map_.version) map_ = map;
}

void Membership::look() {
  const auto looked = change([](ServerMap&) { return Outcome::Already; }, net::deadline_in(kStore));
  if (!looked) log::warn("ps", "{}", looked.error().what());
}

void Membership::run() {
  std::uint64_t told = 0;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    while (!tasks_.empty() && !stopping_) {
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
    lock.unlock();
    look();
    lock.lock();
    if (map_.version != told) {
      told = map_.version;
      const ServerMap map = map_;
      lock.unlock();
      on_map_(map);
      lock.lock();
      continue;
    }
    changed_.wait_for(lock, kLookForTasks, [this] { return stopping_ || !tasks_.empty(); });
  }
}

}  // namespace cohort::ps
