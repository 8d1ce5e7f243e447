// Primary serves one server's rows: its workers' calls, their waits for each other, and lost workers. Runs on the
// thread of the RpcServer, from construction to destruction. Long work (files, clocks of many rows) is done on other
// threads. Meanwhile calls wait, except those of the backup, which would take silence for death.
#pragma once

#include "net/rpc.h"
#include "ps/backup.h"
#include "ps/protocol.h"
#include "ps/server_map.h"
#include "ps/settlement.h"
#include "ps/snapshot_writer.h"
#include "ps/state.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::ps {

class Primary {
 public:
  using ClientPtr = net::RpcServer::ClientPtr;
  using Call = net::RpcServer::Call;
  struct Options {
    std::chrono::milliseconds patience{3000};
    std::function<std::size_t()> room;  ///< returns the bytes that this process may still allocate
    Aside aside;                        ///< runs a task on a thread of its own
    /// Returns the address that serves another server's rows. Any thread.
    std::function<Result<net::RpcPlace>(const Hello& known, std::uint32_t server)> place_of;
    std::function<void()> changed = {};      ///< called when `workers_gone` may have changed
    std::optional<std::uint32_t> rows = {};  ///< number of the rows' server, if servers know their numbers
    Membership* membership = nullptr;        ///< set if there may be a backup
    std::uint64_t epoch = 0;                 ///< epoch of the rows in the map
  };

  Primary(net::RpcServer& rpc, Options options, Journaled rows);
  /// Closes the connections of its workers and of its backup.
  ~Primary();
  Primary(const Primary&) = delete;
  Primary& operator=(const Primary&) = delete;

  Result<void> hello(const ClientPtr& client, const Call& call, const Hello& greeting);
  Result<void> settle(const ClientPtr& client, const Call& call, const Settle& asked);
  /// Handles a call of a client that has said hello.
  Result<void> on_call(const ClientPtr& client, const Call& call);
  Result<void> follow(const ClientPtr& client, const Call& call, const Follow& asked) {
    return backup_.follow(client, call, asked, working_ ? nullptr : &state_);
  }
  Result<void> fetch(const ClientPtr& client, const Call& call, const Fetch& asked) {
    return backup_.fetch(client, call, asked);
  }
  void on_gone(const ClientPtr& client);
  /// Records what the map says about the rows.
  void told(const Serving& serving) noexcept { epoch_ = std::max(epoch_, serving.epoch); }

  bool has(const ClientPtr& client) const { return sessions_.count(client) > 0; }
  std::uint64_t epoch() const noexcept { return epoch_; }
  std::size_t bytes() const noexcept { return (working_ ? known_bytes_ : state_.tables().bytes()) + transient(); }
  /// Returns whether there have been workers, all of them have left or are lost, and the answers to those that left
  /// have been sent.
  bool workers_gone() const noexcept {
    return !working_ && !backup_.holds_answers() && state_.workers().count() > 0 && !state_.workers().least();
  }

 private:
  struct Session {
    std::uint32_t worker = 0;
    std::uint64_t incarnation = 0;
  };
  /// A call that waits for other workers.
  struct Parked {
    ClientPtr client;
    std::uint64_t id = 0;
    Method method = Method::Pull;
    std::string body;
    std::shared_ptr<void> limit;
  };
  /// A worker that has come again, and waits until a Settlement knows what its earlier process has done.
  struct Waiting {
    ClientPtr client;
    std::uint64_t id = 0;
    Hello hello;
  };
  /// A call that waits until the state, or memory, is free.
  struct Late {
    ClientPtr client;
    std::uint8_t method = 0;
    std::uint64_t id = 0;
    std::string body;
    std::function<Result<void>(const Call&)> serve;
  };

  Result<void> serve(const ClientPtr& client, const Call& call);
  Result<void> greet(const ClientPtr& client, const Call& call, const Hello& greeting);
  Result<void> settle_now(const ClientPtr& client, const Call& call, const Settle& asked);
  Result<void> agrees(const Hello& greeting) const;
  void join(const ClientPtr& client, std::uint64_t id, const Hello& greeting);
  void expect_again();
  void begin_session(const ClientPtr& client, const Hello& greeting);
  void welcome(const ClientPtr& client, std::uint64_t id, const Hello& greeting);
  Result<void> pull(const ClientPtr& client, const Call& call);
  void answer_pull(const ClientPtr& client, std::uint64_t id, const Packed<Pull>& asked);
  Result<void> barrier(const ClientPtr& client, const Session& session, const Call& call);
  Result<void> await(const ClientPtr& client, const Call& call);
  Result<void> snapshot(const ClientPtr& client, const Call& call);
  void answer_snapshot(const ClientPtr& client, std::uint64_t id, const Snapshot& asked);
  void restore(const ClientPtr& client, const Call& call, const Command& command);
  std::optional<Result<void>> adopt(const std::string& body);
  void restored(const ClientPtr& client, std::uint64_t id, const Command& command, const Result<void>& done);
  Result<void> stats(const ClientPtr& client, const Call& call);
  Result<void> change(const ClientPtr& client, const Session& session, const Call& call);
  void answer_change(const ClientPtr& client, std::uint64_t id, const Command& command, const Order& order,
                     const Result<void>& may);
  std::string made(const Command& command, std::uint64_t sequence);
  /// Makes a change of the state: passes it to the journal and the backup, and runs it. All changes are made here. If
  /// `body` is empty, the command has its own.
  Result<void> note(Command command, const std::string& body);
  Result<void> kept(const Result<void>& done);
  void noted(Method method);
  void worked(Method method, const std::optional<Error>& failed);
  /// Calls `then` when the latest change has been made: now, or when the other thread is done with it.
  void afterwards(std::function<void()> then);
  /// Serves the call in its turn: now, or after the calls and work before it.
  Result<void> in_turn(const ClientPtr& client, const Call& call, std::function<Result<void>(const Call&)> serve);
  bool must_wait() const noexcept { return working_ || restoring_ || short_; }
  bool waits_for_memory(const Command& command, const Result<void>& checked);
  void go_on();
  /// Memory that will become free without a change of the state.
  std::size_t transient() const noexcept {
    return (working_ ? 0 : state_.tables().copied()) + backup_.bytes() + late_bytes_;
  }
  static constexpr std::chrono::milliseconds kStillWorking{10};
  void serve_or_park(const ClientPtr& client, const Call& call, std::uint32_t wait_ms);
  /// Answers a call that is due.
  void serve_due(const Parked& call);
  void limit_parked(std::list<Parked>::iterator at, std::chrono::milliseconds wait);
  std::string why_late(const Parked& late) const;
  /// Answers the parked calls that need not wait any more.
  void wake();
  std::size_t limit() const;

  // workers that are lost
  void be_patient(std::uint32_t number, std::uint64_t incarnation, std::chrono::milliseconds time);
  void decide(std::uint32_t number, std::uint64_t incarnation);
  void look_at_settlements();
  void lost(const Settle& question, std::int64_t ended);
  void let_in(std::uint32_t worker);
  std::vector<ClientPtr> clients_of(std::uint32_t worker) const;

  void answer(const ClientPtr& client, std::uint64_t id, std::string body) {
    backup_.answer(client, id, std::move(body));
  }

  net::RpcServer& rpc_;
  const Options options_;
  const std::shared_ptr<State> kept_;  // shared with work on other threads
  State& state_;
  std::optional<Error> broken_;  // set if no changes are made any more
  bool working_ = false;         // another thread works on the state: nothing else touches it
  std::size_t known_bytes_ = 0;
  Backup backup_;
  SnapshotWriter snapshots_;
  bool restoring_ = false;  // parts of the state are being read from files
  bool short_ = false;      // the first late call waits for memory
  std::function<void()> then_;
  std::deque<Late> late_;
  std::size_t late_bytes_ = 0;
  std::shared_ptr<void> looks_for_memory_;
  std::map<ClientPtr, Session> sessions_;
  std::list<Parked> parked_;
  std::list<Waiting> waiting_;
  std::map<std::uint32_t, std::shared_ptr<void>> patience_timers_;
  std::list<std::unique_ptr<Settlement>> settlements_;
  std::shared_ptr<void> looking_;
  bool met_ = false;
  std::uint64_t epoch_;
  const std::shared_ptr<Primary*> self_;  // for tasks on other threads; null after destruction
};

}  // namespace cohort::ps
