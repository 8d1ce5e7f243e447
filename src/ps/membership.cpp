#include "ps/membership.h"

#include "base/env.h"
#include "base/log.h"
#include "base/thread.h"
#include "net/store.h"
#include "rendezvous/identity.h"

#include <random>
#include <utility>

namespace cohort::ps {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLookForTasks(200);
constexpr milliseconds kStore(2000);  // until it is connected anew

// Servers of a job that is started again make a map of their own.
std::string key_of_job() { return fmt::format("ps/{}/map", env::number(env::kRestart).value_or(0)); }

std::uint64_t new_life() {
  std::random_device random;
  return (std::uint64_t{random()} << 32 | random()) | 1;
}

}  // namespace

Membership::Membership(Options options)
    : options_(std::move(options)),
      key_(key_of_job()),
      self_{options_.number, new_life()},
      member_{self_.life, options_.endpoint, rendezvous::host_identity().id},
      store_(store::connect_job_store(net::deadline_in(std::chrono::seconds(30)))) {
  const auto entered = value_or_throw(
      change([this](ServerMap& map) { return enter(map, options_.servers, self_.server, member_, options_.replicas); },
             net::deadline_in(std::chrono::seconds(30))));
  if (entered == Outcome::Refused) {
    raise(ErrorCode::Mismatch, "parameter server {} of {} -- the first one said that there are {}", self_.server,
          options_.servers, map().members.size());
  }
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
