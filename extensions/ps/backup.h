// Backup: a primary's side of the copies of its rows, which get the same records: the journal, if there is one, and the
// process that gets or has a copy. Holds answers back until both have the commands that the answers depend on. Detects
// that the process is dead or silent, and changes the map then. Runs on the thread of the RpcServer, from construction
// to destruction, and changes the map on other threads.
#pragma once

#include "net/rpc.h"
#include "ps/journal.h"
#include "ps/protocol.h"
#include "ps/replication.h"
#include "ps/server_map.h"
#include "ps/state.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace cohort::ps {

class Backup {
 public:
  using ClientPtr = net::RpcServer::ClientPtr;
  using Call = net::RpcServer::Call;

  /// `membership`: null if there is never a process with a copy. `rows`: number of the rows' server. `changed`: called
  /// when the last held answer has gone out. `is_over`: returns whether all workers have gone, so that a loss is no
  /// warning.
  Backup(net::RpcServer& rpc, std::optional<Journal> journal, Membership* membership, std::uint32_t rows,
         std::function<void()> changed, std::function<bool()> is_over)
      : rpc_(rpc),
        journal_(std::move(journal)),
        membership_(membership),
        rows_(rows),
        changed_(std::move(changed)),
        is_over_(std::move(is_over)) {}

  Backup(const Backup&) = delete;

  /// `state`: null while another thread works on it.
  Result<void> follow(const ClientPtr& client, const Call& call, const Follow& asked, State* state);
  Result<void> fetch(const ClientPtr& client, const Call& call, const Fetch& asked);
  void on_gone(const ClientPtr& client) {
    if (client == client_) lose();
  }
  /// Forgets the connection of the process with the copy, and returns it; null if there is none.
  ClientPtr release() { return std::exchange(client_, nullptr); }

  /// Takes the journal, which is not written any more.
  std::optional<Journal> take_journal() { return std::exchange(journal_, std::nullopt); }

  /// Writes and sends a command that the state is about to run. Fails with Io if the journal cannot take it; then it is
  /// not sent either.
  Result<void> append(const Command& command);
  /// Called when the state has run all commands. From time to time, writes the journal anew, and has the copy compared
  /// with the state.
  Result<void> look_after(State& state);

  /// Answers a call, like `RpcServer::answer`, when the process with the copy has all commands so far.
  void answer(const ClientPtr& client, std::uint64_t id, std::string body);
  void answer(const ClientPtr& client, std::uint64_t id, const std::string& head, std::size_t bytes,
              const std::function<void(char*)>& fill);
  bool holds_answers() const noexcept { return !held_.empty(); }

  /// Bytes that the process with the copy may still allocate.
  std::size_t room() const noexcept { return room_; }
  /// Memory of commands and answers that are not sent yet.
  std::size_t bytes() const noexcept { return replication_.bytes() + held_bytes_; }
  bool is_behind() const noexcept { return replication_.is_behind(); }

 private:
  /// An answer that waits until the backup has the commands up to its position.
  struct Held {
    std::uint64_t position = 0;
    ClientPtr client;
    std::uint64_t id = 0;
    std::string body;
  };

  bool may_answer() const;
  void answer_held();
  void send_records();
  /// Called when the process that has, or gets, the copy has lost its connection.
  void lose();
  void look_for(std::chrono::steady_clock::time_point until);
  void watch();
  void give_up(const std::string& why);
  /// Changes the map on another thread, retrying until the store says whether it has been changed; then calls `done` on
  /// this thread.
  void tell_map(Membership::Edit edit, std::function<void(Outcome)> done);

  net::RpcServer& rpc_;
  std::optional<Journal> journal_;
  Membership* const membership_;
  const std::uint32_t rows_;
  const std::function<void()> changed_;
  const std::function<bool()> is_over_;
  Replication replication_;
  ClientPtr client_;                       // the connection of the process with the copy
  std::optional<std::uint64_t> fetching_;  // number of its call that waits for records
  std::shared_ptr<void> heartbeat_;        // answers that call
  std::shared_ptr<void> timer_;            // checks whether the process is silent
  std::optional<Replication::Time> sent_;  // when its latest call was answered
  std::size_t room_ = ~std::size_t{0};
  std::size_t takes_ = 0;  // most bytes of records in one answer
  std::uint64_t since_verified_ = 0, turn_ = 0;
  std::deque<Held> held_;
  std::size_t held_bytes_ = 0;
  const std::shared_ptr<void> alive_ = std::make_shared<char>();  // expires at the end, for other threads
};

}  // namespace cohort::ps
