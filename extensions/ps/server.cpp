#include "base/env.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/result.h"
#include "base/thread.h"
#include "net/rpc.h"
#include "ps/journal.h"
#include "ps/primary.h"
#include "ps/replication.h"
#include "ps/server_map.h"
#include "rendezvous/identity.h"
#include "rendezvous/place.h"
#include "telemetry/last_words.h"

#include <cohort/ps.h>
#include <cohort/role.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>

namespace cohort::ps {
namespace {

using net::RpcServer;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kCopyAgain(300);   // pause after a copy that was given up
constexpr milliseconds kFirstCopy(3000);  // longest time that workers wait for it at the start
constexpr milliseconds kTurn(1000);       // a server's wait for each one before it (turn_of) when rows need a backup
constexpr milliseconds kLookForWorkers(50);
constexpr std::chrono::milliseconds kRecoverAgain{5000};
// A child of the previous process that has its files open may still be about to exit.
constexpr auto kLeftAfter = std::chrono::seconds(10);

}  // namespace

// A server process: the rows that it serves (Primary) and those that it has copies of (Follower), by the number of
// their server. Without replicas a process serves one server's rows, and does not know that server's number.
class Server::Impl final : RpcServer::Service {
 public:
  /// `begins_anew`: an existing journal is of an earlier job.
  Impl(const ServerOptions& options, bool begins_anew)
      : options_(checked(options)),
        replicated_(replicas_of(options) > 0),
        limit_(options.memory != 0 ? options.memory : sys::available_memory() / 10 * 9),
        room_(limit_),
        number_(replicated_ ? static_cast<std::uint32_t>(options.number ? *options.number : role_number()) : 0),
        rows_(remember(begins_anew)),
        server_(served_at(options), *this),
        endpoint_(net::to_string(server_.endpoint())) {
    Membership::Options as;
    as.number = number_;
    if (!replicated_) {
      if (role() != Role::Server || num_servers() < 2 || !env::get(env::kStore)) return;
      as.number = static_cast<std::uint32_t>(role_number());
      require_same_options(*store::connect_job_store(net::deadline_in(std::chrono::seconds(30))), as);
      return;
    }
    as.servers = static_cast<std::uint32_t>(options.servers ? *options.servers : num_servers());
    as.replicas = replicas_of(options);
    as.journals = !options.journal.empty();
    as.endpoint = endpoint_;
    auto membership = std::make_unique<Membership>(as);
    on_thread([&] { membership_ = std::move(membership); });  // workers may already be connected
    membership_->start([this](const ServerMap& map) { server_.post([this, map] { on_map(map); }); });
  }

  ~Impl() override {
    // Objects whose threads post to the server are destroyed before the server.
    on_thread([&] {
      stopping_ = true;
      turns_.clear();
      followers_.clear();
      const auto primaries = std::exchange(primaries_, {});
    });
    for (auto& [done, thread] : aside_) thread.join();
    membership_.reset();
  }

  const std::string& endpoint() const noexcept { return endpoint_; }
  bool workers_gone() const noexcept { return workers_gone_; }

 private:
  using ClientPtr = RpcServer::ClientPtr;
  struct Task {
    std::shared_ptr<std::atomic<bool>> done;
    std::thread thread;
  };

  void on_thread(const std::function<void()>& task) {
    std::promise<void> done;
    server_.post([&] {
      task();
      done.set_value();
    });
    done.get_future().wait();
  }

  static std::uint32_t replicas_of(const ServerOptions& options) {
    if (options.replicas) return static_cast<std::uint32_t>(*options.replicas);
    return options.journal.empty() && env::get(env::kServerRestart) ? 1 : 0;
  }

  static const ServerOptions& checked(const ServerOptions& options) {
    if (options.replicas && (*options.replicas < 0 || *options.replicas > 1))
      raise(ErrorCode::InvalidArgument, "{} replicas -- 0 or 1", *options.replicas);
    if (options.patience <= milliseconds(0))
      raise(ErrorCode::InvalidArgument, "a patience of {} ms -- above 0", options.patience.count());
    if (options.replicas.value_or(0) > 0 && !env::get(env::kStore)) {
      raise(ErrorCode::InvalidArgument,
            "replicas: servers find their copies through the store of `cohort run`, which has not started this process "
            "-- leave replicas out, or start servers by `cohort run --servers N`");
    }
    if (options.replicas.value_or(0) > 0 && (options.servers ? *options.servers : num_servers()) < 2) {
      raise(
          ErrorCode::InvalidArgument,
          "replicas: there is one server, and no other that could have its copy -- start two or more (--servers 2), or "
          "give it a journal");
    }
    return options;
  }

  static RpcServer::Options served_at(const ServerOptions& options) {
    const std::string at = options.endpoint.empty() ? value_or_throw(own_endpoint()) : options.endpoint;
    const net::RpcPlace place = value_or_throw(place_of(at, options.secret_file));
    return {.name = "parameter server",
            .endpoint = place.endpoints.front(),
            .secret = place.secret,
            .secure = place.secure,
            .shared_memory = options.shared_memory,
            .host = rendezvous::host_identity().id};
  }

  /// Sets journals of an earlier job aside. Returns the journal's rows; none if the map decides who has the rows.
  Journaled remember(bool begins_anew) {
    if (options_.journal.empty()) return {};
    const auto servers = static_cast<std::uint32_t>(options_.servers ? *options_.servers : num_servers());
    for (std::uint32_t rows = 0; begins_anew && rows < (replicated_ ? servers : 1); ++rows) {
      const std::string path = journal_of(rows);
      if (rows == number_ || std::filesystem::exists(path)) value_or_throw(Journal::set_aside(path));
    }
    if (replicated_) return {};
    return value_or_throw(read_journal(number_));
  }

  /// Each process has journals of its own: one that was taken for lost may still write.
  std::string journal_of(std::uint32_t rows) const {
    return rows == number_ ? options_.journal : fmt::format("{}.rows-{}", options_.journal, rows);
  }

  Result<Journaled> read_journal(std::uint32_t rows) const {
    Journaled read;
    auto journal = Journal::open(journal_of(rows), read.state, options_.journal_tail);
    if (!journal) return tl::unexpected(journal.error());
    read.journal = *std::move(journal);
    return read;
  }

  // ---- calls ----

  Result<void> on_call(const ClientPtr& client, const RpcServer::Call& call) override {
    if (!is_call(static_cast<Method>(call.method)))
      return fail(ErrorCode::Corrupt, "a call of unknown kind {}", call.method);
    switch (static_cast<Method>(call.method)) {
      case Method::Hello: return hello(client, call);
      case Method::Locate: return locate(client, call);
      case Method::Settle:
        return to_primary<Settle>(
            client, call, [&](Primary& primary, const Settle& asked) { return primary.settle(client, call, asked); });
      case Method::Follow:
        return to_primary<Follow>(
            client, call, [&](Primary& primary, const Follow& asked) { return primary.follow(client, call, asked); });
      case Method::Fetch:
        return to_primary<Fetch>(
            client, call, [&](Primary& primary, const Fetch& asked) { return primary.fetch(client, call, asked); });
      default: break;
    }
    for (const auto& [rows, primary] : primaries_) {
      if (primary->has(client)) return primary->on_call(client, call);
    }
    return fail(ErrorCode::Corrupt, "a call without a greeting");
  }

  void on_gone(const ClientPtr& client) override {
    for (const auto& [rows, primary] : primaries_) primary->on_gone(client);
  }

  Result<void> hello(const ClientPtr& client, const RpcServer::Call& call) {
    const auto opened = unpack<Hello>(call.body);
    if (!opened) return tl::unexpected(opened.error());
    const Hello& greeting = opened->record;
    Primary* primary = primary_of(greeting.server);
    if (primary != nullptr && greeting.epoch <= primary->epoch() && !awaits_first_copy(greeting.server))
      return primary->hello(client, call, greeting);
    if (const auto found = recovered_.find(greeting.server); found != recovered_.end() && found->second) {
      server_.answer(client, call.id, answer_of(*found->second));
      return {};
    }
    const Error error(ErrorCode::Unavailable,
                      fmt::format("the rows of parameter server {} are not served here", greeting.server));
    server_.answer(client, call.id, pack(Answer{.error = error}).append(codec::encode(located(greeting.server))));
    return {};
  }

  /// Returns whether workers have to wait for the first backup, since rows without a copy would be lost with this
  /// process. They wait kFirstCopy at most.
  bool awaits_first_copy(std::uint32_t rows) const {
    if (!membership_ || steady_clock::now() > served_since_ + kFirstCopy) return false;
    const ServerMap map = membership_->map();
    return map.replicas > 0 && map.rows[rows].epoch == 1 && map.rows[rows].backup.life == 0;
  }

  Result<void> locate(const ClientPtr& client, const RpcServer::Call& call) {
    const auto opened = unpack<Locate>(call.body);
    if (!opened) return tl::unexpected(opened.error());
    server_.answer(client, call.id, answer_of(located(opened->record.server)));
    return {};
  }

  /// Returns which process serves the rows, as far as this process knows; epoch 0 if it does not.
  Located located(std::uint32_t rows) const {
    if (!membership_) return {};
    const ServerMap map = membership_->map();
    if (rows >= map.rows.size()) return {};
    return {map.rows[rows].epoch, map.endpoint_of(map.rows[rows].primary)};
  }

  template <class T, class Serve>
  Result<void> to_primary(const ClientPtr& client, const RpcServer::Call& call, Serve&& serve) {
    const auto opened = unpack<T>(call.body);
    if (!opened) return tl::unexpected(opened.error());
    if (Primary* primary = primary_of(opened->record.server)) return serve(*primary, opened->record);
    // Not Unavailable: the worker would try this process again.
    const Error error(ErrorCode::InvalidArgument,
                      fmt::format("the rows of parameter server {} are not served here", opened->record.server));
    server_.answer(client, call.id, answer_of(error));
    return {};
  }

  /// Returns the primary of the rows. Without replicas it is the only one, whatever the number.
  Primary* primary_of(std::uint32_t rows) {
    if (stopping_) return nullptr;
    if (!replicated_ && primaries_.empty()) serve(0, std::move(rows_), 0);
    const auto found = primaries_.find(replicated_ ? rows : 0);
    return found == primaries_.end() ? nullptr : found->second.get();
  }

  void serve(std::uint32_t rows, Journaled kept, std::uint64_t epoch) {
    Primary::Options options;
    options.patience = options_.patience;
    options.room = [this] { return room(); };
    options.aside = [this](std::function<void()> task) { aside(std::move(task)); };
    options.changed = [this] { server_.post([this] { count_workers(); }); };  // once the change's answer waits, too
    options.epoch = epoch;
    if (replicated_) {
      options.rows = rows;
      options.membership = membership_.get();
      options.place_of = [this](const Hello&, std::uint32_t server) {
        return place_of(located(server).endpoint, options_.secret_file);
      };
    } else {
      options.place_of = [this](const Hello& known, std::uint32_t server) {
        return place_of(known.servers[server], options_.secret_file);
      };
    }
    primaries_[rows] = std::make_unique<Primary>(server_, std::move(options), std::move(kept));
  }

  /// Serves rows that no process has. Another thread reads them from the journal; without a journal they begin anew.
  void recover(std::uint32_t rows, std::uint64_t epoch) {
    recovered_[rows] = std::nullopt;
    aside([this, rows, epoch] {
      const auto read = std::make_shared<Result<Journaled>>(Journaled());
      const auto limit = steady_clock::now() + kLeftAfter;
      while (!options_.journal.empty()) {
        auto anew = epoch == 1 ? Journal::set_aside(journal_of(rows)) : Result<void>();
        *read = anew ? read_journal(rows) : tl::unexpected(anew.error());
        if (*read || read->error().code() != ErrorCode::Unavailable || stopping_ || steady_clock::now() > limit) break;
        std::this_thread::sleep_for(kLookForWorkers);
      }
      server_.post([this, rows, epoch, read] { recovered(rows, epoch, std::move(*read)); });
    });
  }

  void recovered(std::uint32_t rows, std::uint64_t epoch, Result<Journaled> read) {
    recovered_.erase(rows);
    if (stopping_ || membership_->map().rows[rows].primary != membership_->self()) return;
    if (!read) {
      log::error("ps", "the rows of parameter server {} are not served: {}", rows, read.error().what());
      recovered_[rows] = read.error();
      // A lock that another process still has, or a disk's error, may be over later.
      if (const auto code = read.error().code(); code == ErrorCode::Unavailable || code == ErrorCode::Io)
        again_[rows] = server_.after(kRecoverAgain, [this, rows, epoch] { recover(rows, epoch); });
      return;
    }
    if (epoch > 1 && read->state.workers().count() > 0) {
      log::warn("ps", "the rows of parameter server {} are as this process's journal has them: who had them is gone",
                rows);
    } else if (epoch > 1) {
      log::error("ps", "the rows of parameter server {} are lost: who had them is gone; they begin anew", rows);
    }
    served_since_ = steady_clock::now();
    serve(rows, *std::move(read), epoch);
    count_workers();
  }

  /// Runs the task on a thread of its own. The destructor waits for tasks that still run.
  void aside(std::function<void()> task) {
    aside_.remove_if([](Task& one) {
      if (one.done->load()) one.thread.join();
      return !one.thread.joinable();
    });
    auto done = std::make_shared<std::atomic<bool>>(false);
    aside_.push_back({done, sys::start_without_signals([task = std::move(task), done] {
                        task();
                        *done = true;
                      })});
  }

  std::size_t room() {
    std::size_t taken = 0;
    for (const auto& [rows, primary] : primaries_) taken += primary->bytes();
    for (const auto& [rows, follower] : followers_) taken += follower->bytes();
    room_ = limit_ > taken ? limit_ - taken : 0;
    return room_;
  }

  void count_workers() {
    bool gone = !primaries_.empty() || !followers_.empty();
    for (const auto& [rows, primary] : primaries_) gone = gone && primary->workers_gone();
    for (const auto& [rows, follower] : followers_) gone = gone && follower->workers_gone();
    workers_gone_ = gone;
  }

  // ---- who serves what ----

  void on_map(const ServerMap& map) {
    if (stopping_) return;
    if (!map.lives(membership_->self())) {
      if (primaries_.empty() && followers_.empty()) return;
      log::error("ps", "another process has come as parameter server {}: this one serves nobody any more", number_);
      turns_.clear();
      followers_.clear();
      const auto primaries = std::exchange(primaries_, {});
      return;
    }
    for (std::uint32_t rows = 0; rows < map.rows.size(); ++rows) on_serving(map, rows);
    count_workers();
  }

  void on_serving(const ServerMap& map, std::uint32_t rows) {
    const Serving& serving = map.rows[rows];
    const Holder& self = membership_->self();
    if (const auto found = primaries_.find(rows); found != primaries_.end()) {
      if (serving.primary == self) {
        found->second->told(serving);
      } else if (serving.epoch > found->second->epoch()) {
        log::warn("ps", "the rows of parameter server {} are served by {} now: this process was taken for lost", rows,
                  map.endpoint_of(serving.primary));
        const auto deposed = std::move(found->second);
        primaries_.erase(found);
      }
    } else if (serving.primary == self && followers_.count(rows) == 0 && recovered_.count(rows) == 0) {
      recover(rows, serving.epoch);
    }
    if (serving.backup == self && followers_.count(rows) == 0) {
      membership_->later([this, rows, self, epoch = serving.epoch] {
        (void)membership_->change([&](ServerMap& now) { return resign(now, rows, self, epoch); },
                                  net::deadline_in(std::chrono::seconds(5)));
      });
    }
    const bool wanted = map.replicas > 0 && serving.backup.life == 0 && primaries_.count(rows) == 0 &&
                        followers_.count(rows) == 0 && damaged_.count(rows) == 0;
    if (!wanted) {
      turns_.erase(rows);
    } else if (turns_.count(rows) == 0) {
      if (const auto turn = turn_of(map, rows, number_)) take_turn(rows, kTurn * *turn);
    }
  }

  /// Begins to get a copy after `time`, unless another process has one by then.
  void take_turn(std::uint32_t rows, milliseconds time) {
    turns_[rows] = server_.after(time, [this, rows] {
      const auto timer = std::move(turns_[rows]);
      turns_.erase(rows);
      const Serving serving = membership_->map().rows[rows];
      if (serving.backup.life != 0 || serving.primary == membership_->self()) return;
      Follower::Options options;
      options.rows = rows;
      options.secret_file = options_.secret_file;
      options.room = [this] { return room_.load(); };
      options.changed = [this] { server_.post([this] { count_workers(); }); };
      if (!options_.journal.empty()) options.journal = journal_of(rows);
      options.journal_tail = options_.journal_tail;
      followers_[rows] = std::make_unique<Follower>(std::move(options), *membership_, [this, rows](Follower::End end) {
        server_.post([this, rows, end] { followed(rows, end); });
      });
    });
  }

  void followed(std::uint32_t rows, Follower::End end) {
    const auto found = followers_.find(rows);
    if (found == followers_.end()) return;
    std::shared_ptr<Follower> follower = std::move(found->second);
    followers_.erase(found);
    switch (end) {
      case Follower::End::Promoted:
        log::warn("ps",
                  "this process serves the rows of parameter server {} now, since their primary is gone: nothing "
                  "that was acknowledged is lost",
                  rows);
        serve(rows, follower->take(), follower->epoch());
        break;
      case Follower::End::Away:
        if (!follower->workers_gone()) take_turn(rows, kCopyAgain);
        break;
      case Follower::End::Damaged: damaged_.insert(rows); break;
    }
    count_workers();
    // The follower's end may have to wait for the disk.
    aside([ended = std::move(follower)]() mutable { ended.reset(); });
  }

  const ServerOptions options_;
  const bool replicated_;
  const std::size_t limit_;
  std::atomic<std::size_t> room_;
  const std::uint32_t number_;
  Journaled rows_;  // rows from the journal, until a Primary takes them
  std::map<std::uint32_t, std::unique_ptr<Primary>> primaries_;
  std::map<std::uint32_t, std::unique_ptr<Follower>> followers_;
  std::map<std::uint32_t, std::shared_ptr<void>> turns_;
  // Rows that the map gives to this process, and that another thread is reading, or why they cannot be read.
  std::map<std::uint32_t, std::optional<Error>> recovered_;
  std::map<std::uint32_t, std::shared_ptr<void>> again_;  ///< timers for another attempt
  std::set<std::uint32_t> damaged_;
  std::list<Task> aside_;
  std::atomic<bool> stopping_{false};
  steady_clock::time_point served_since_{};
  std::atomic<bool> workers_gone_{false};
  std::unique_ptr<Membership> membership_;
  RpcServer server_;  // declared after everything that its thread uses
  const std::string endpoint_;
};

Server::Server(const ServerOptions& options) : Server(options, false) {}
Server::Server(const ServerOptions& options, bool begins_anew) : impl_(std::make_unique<Impl>(options, begins_anew)) {}
Server::~Server() = default;
const std::string& Server::endpoint() const noexcept { return impl_->endpoint(); }
bool Server::workers_gone() const { return impl_->workers_gone(); }

namespace {

std::unique_ptr<Server> start_again(const ServerOptions& options) {
  const auto limit = steady_clock::now() + kLeftAfter;
  for (;; std::this_thread::sleep_for(kLookForWorkers)) {
    try {
      return std::make_unique<Server>(options);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::Unavailable || steady_clock::now() > limit) throw;
    }
  }
}

}  // namespace

std::unique_ptr<Server> Server::of_job(ServerOptions options) {
  if (role() != Role::Server) {
    raise(ErrorCode::InvalidArgument, "serve: this process is no server but a {} -- see `cohort run --servers`",
          to_string(role()));
  }
  const int number = role_number();
  if (!options.journal.empty()) {
    if (std::filesystem::is_directory(options.journal)) {
      options.journal = (std::filesystem::path(options.journal) / fmt::format("server-{}.journal", number)).string();
    } else if (num_servers() > 1) {
      raise(ErrorCode::InvalidArgument,
            "journal {}: there are {} servers, which need a file each -- name a folder that exists", options.journal,
            num_servers());
    }
  }
  status::keep_last_words();
  status::show_lines_at_once();
  std::unique_ptr<Server> server;
  const auto listed = rendezvous::listed_servers();
  if (auto earlier = rendezvous::earlier_server_address()) {
    options.endpoint = *std::move(earlier);
    server = start_again(options);
  } else {
    if (options.endpoint.empty() && listed && static_cast<std::size_t>(number) < listed->size())
      options.endpoint = listed->at(static_cast<std::size_t>(number));
    server.reset(new Server(options, env::get(env::kStore).has_value()));
  }
  // Without a list or a store (DMLC_ROLE alone), the program itself passes the address to its workers.
  if (listed || env::get(env::kStore)) announce_server(server->endpoint());
  return server;
}

void serve(const ServerOptions& options) {
  const auto server = Server::of_job(options);
  while (!server->workers_gone()) std::this_thread::sleep_for(kLookForWorkers);
}

}  // namespace cohort::ps
