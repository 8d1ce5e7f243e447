// Processes that serve rows and copy them, the job's store and workers, in one thread with a clock of its own: messages
// that are slow or lost, processes that are killed, stopped and started again, commands that take seconds, snapshots on
// slow disks, rows that are restored; with journals, too, and then all may be killed at once. Invariants: each push
// counts once, acknowledged changes are there, nobody reads less than was acknowledged before, and no process has a say
// after another one has taken its place. The decisions are those of the real parts (Replication, ServerMap, State); the
// sockets and threads of primary.cpp and a Follower are replaced by events here.
#include "ps/replication.h"
#include "ps/journal.h"
#include "ps/server_map.h"
#include "ps/state.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cohort::ps {
namespace {

using Time = Replication::Time;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::uint64_t kKey = 7;
constexpr int kProcesses = 3, kWorkers = 2;
constexpr int kRestorer = -1, kParts = 4, kFirstRestored = 100;

class Simulation {
 public:
  explicit Simulation(unsigned seed, bool journals = false) : random_(seed), journals_(journals), disks_(kProcesses) {
    for (int i = 0; i < kProcesses; ++i) begin_process(i);
    for (int i = 0; i < kWorkers; ++i) {
      workers_.push_back({});
      after(milliseconds(200 + below(50)), [this, i] { ask(i); });
    }
    trouble();
    after(milliseconds(1000), [this] { snapshot(); });
    after(milliseconds(500 + below(8000)), [this] { restore(); });
  }
  ~Simulation() {
    // Callbacks that a process waits for hold a reference to the process.
    for (const std::weak_ptr<Process>& made : all_) {
      if (const ProcessPtr process = made.lock()) {
        process->fetching.reset();
        process->changes.clear();
        process->late.clear();
      }
    }
  }
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  /// Empty: all was well.
  std::string run() {
    while (!events_.empty() && wrong_.empty()) {
      now_ = events_.begin()->first;
      troubled_ = now_ < kQuiet;
      if (now_ > kQuiet + kRecovery + long_commands_) return "somebody never gets an answer";
      const auto event = std::move(events_.begin()->second);
      events_.erase(events_.begin());
      event();
      if (!troubled_ && all_have_ended() && serving() != nullptr && !serving()->working) break;
    }
    if (!wrong_.empty()) return wrong_;
    const Process* const primary = serving();
    if (primary == nullptr) return "nobody serves the rows";
    const float expected = static_cast<float>(kWorkers * kPushes);
    const float value = value_of(primary->state);
    if (value != expected) return fmt::format("the counter is {} instead of {}", value, expected);
    if (!has_restored(primary->state)) return "rows that were restored are gone";
    return {};
  }
  int promotions() const noexcept { return promotions_; }
  int recoveries() const noexcept { return recoveries_; }
  int snapshots() const noexcept { return snapshots_; }

 private:
  static constexpr int kPushes = 40;
  static constexpr Time kQuiet = Time{} + std::chrono::seconds(12);
  static constexpr std::chrono::seconds kRecovery{48};  // and the rest of the pushes
  struct Owed {
    int worker;
    std::uint64_t asked;
    float value;
    std::string error = {};
  };
  /// One life of a process. Events that it has scheduled do nothing any more when it is dead, and wait while it is
  /// stopped.
  struct Process {
    int number = 0;
    Holder self;
    bool alive = true;
    Time stopped_until{};
    double speed = 1;  // of its clock
    // State of a primary.
    bool serves = false;
    std::uint64_t epoch = 0;
    int term = 0;  // counts promotions
    State state;
    Replication replication;
    int connection = 0;  // of the backup's that was heard last
    std::optional<Time> sent;
    std::optional<std::function<void(std::string, std::uint64_t)>> fetching;
    int fetches = 0;
    std::vector<std::pair<std::uint64_t, Owed>> held;
    bool working = false;                    // another thread carries out a command
    bool restoring = false;                  // rows are taken from files
    std::deque<std::function<void()>> late;  // calls that wait for that
    // State of a holder of a copy.
    bool copies = false;
    State copy;
    std::uint64_t copy_number = 0;
    std::uint64_t received = 0;
    std::deque<std::string> waiting;  // commands that have not run yet
    Time heard{};
    Holder primary;
    int connections = 0;
    bool asks_for_place = false;
    std::deque<std::pair<std::function<Outcome(ServerMap&)>, std::function<void(Outcome)>>> changes;
  };
  using ProcessPtr = std::shared_ptr<Process>;
  struct Pusher {
    int pushed = 0;  // and acknowledged
    std::uint64_t asked = 0;
    int at = 0;                   // where it believes the primary
    int acknowledged_before = 0;  // of all workers, when it asked
  };

  // ---- time and messages ----

  unsigned below(unsigned n) { return static_cast<unsigned>(random_()) % n; }
  void after(microseconds time, std::function<void()> event) { events_.emplace(now_ + time, std::move(event)); }
  /// On a process, by its own clock.
  void on(const ProcessPtr& process, microseconds time, std::function<void()> event) {
    const auto mine = microseconds(static_cast<std::int64_t>(static_cast<double>(time.count()) / process->speed));
    after(mine, [this, process, event = std::move(event)] { when_it_runs(process, event); });
  }
  void when_it_runs(const ProcessPtr& process, const std::function<void()>& event) {
    if (!process->alive) return;
    if (process->stopped_until > now_) {
      events_.emplace(process->stopped_until, [this, process, event] { when_it_runs(process, event); });
    } else {
      event();
    }
  }
  Time clock_of(const Process& process) const {
    return Time{} + std::chrono::duration_cast<Time::duration>((now_ - Time{}) * process.speed);
  }
  /// Calls may wait for all that began after the trouble, restores included.
  microseconds long_command(unsigned most_ms) {
    const milliseconds time(below(most_ms));
    if (!troubled_) long_commands_ += time;
    return time;
  }
  /// For long enough that nothing of before can matter.
  bool is_calm(const ProcessPtr& process, const Holder& as) const {
    return process->self == as && process->alive && now_ > kQuiet + std::chrono::seconds(10);
  }
  bool lost() { return troubled_ && below(60) == 0; }
  bool cut(int a, int b) const { return troubled_ && cut_until_ > now_ && (a == cut_) != (b == cut_); }
  microseconds delay() { return microseconds(100 + (below(20) == 0 ? below(150'000) : below(3'000))); }
  /// From one process to another; number 100: a worker or the store, which the one that is cut off does not reach.
  void send(int from, const ProcessPtr& to, std::function<void()> event) {
    if (lost() || cut(from, to->number)) return;
    on(to, delay(), std::move(event));
  }

  // ---- the store ----

  using Edit = std::function<Outcome(ServerMap&)>;
  using Done = std::function<void(Outcome)>;
  /// One after the other, as a process's Membership makes them.
  void change(const ProcessPtr& by, const Edit& edit, const Done& done) {
    by->changes.emplace_back(edit, done);
    if (by->changes.size() == 1) make_change(by);
  }
  void make_change(const ProcessPtr& by) {
    const auto again = [this, by] { on(by, milliseconds(50), [this, by] { make_change(by); }); };
    if (lost() || cut(by->number, 100)) return again();
    after(delay(), [this, by, again] {
      if (!by->alive && below(2) == 0) return;  // it died before its message arrived, or after
      const Outcome outcome = by->changes.front().first(map_);
      if (lost() || cut(by->number, 100)) return again();
      on(by, delay(), [this, by, outcome] {
        const Done done = std::move(by->changes.front().second);
        by->changes.pop_front();
        if (!by->changes.empty()) make_change(by);
        done(outcome);
      });
    });
  }

  // ---- a process ----

  void begin_process(int number) {
    auto process = std::make_shared<Process>();
    all_.push_back(process);
    process->number = number;
    process->self = {static_cast<std::uint32_t>(number), ++lives_};
    process->speed = 0.96 + 0.001 * below(80);
    if (processes_.size() <= static_cast<std::size_t>(number)) processes_.resize(static_cast<std::size_t>(number) + 1);
    processes_[static_cast<std::size_t>(number)] = process;
    change(
        process,
        [process](ServerMap& map) {
          return enter(map, kProcesses, process->self.server, {process->self.life, "@", "host"}, 1);
        },
        [this, process](Outcome) { look_at_map(process); });
  }

  void look_at_map(const ProcessPtr& process) {
    on(process, milliseconds(200), [this, process] { look_at_map(process); });
    if (cut(process->number, 100) || lost() || !map_.formed()) return;
    const Serving serving = map_.rows[0];
    Process& p = *process;
    if (p.serves) {
      if (serving.primary == p.self) {
        p.epoch = std::max(p.epoch, serving.epoch);
      } else if (serving.epoch > p.epoch) {
        p.serves = false;
        p.held.clear();
      }
    } else if (serving.primary == p.self && !p.copies) {
      if (serving.epoch > 1 && !journals_)
        wrong_ = "rows begin anew though one of their holders has been there all the time";
      p.state = State();
      if (disk_of(p).empty() || serving.epoch == 1)
        introduce(p);
      else
        recover(p);
      serve(process, serving.epoch);
    } else if (serving.backup == p.self && !p.copies) {
      change(
          process, [self = p.self, epoch = serving.epoch](ServerMap& map) { return resign(map, 0, self, epoch); },
          [](Outcome) {});
    } else if (serving.primary != p.self && serving.backup.life == 0 && !p.copies) {
      const auto turn = turn_of(map_, 0, p.self.server);
      if (turn && (turn == 0U || below(4) == 0)) follow(process, serving.primary);
    }
  }

  static TableOptions table_options() {
    TableOptions options;
    options.dim = 1;
    options.optimizer = optim::Sgd{.lr = 1};
    options.consistency.mode = Mode::Async;
    return options;
  }
  /// As the journal has the rows, of whichever of its server's processes.
  void recover(Process& process) {
    ++recoveries_;
    for (const std::string& record : disk_of(process)) {
      std::string_view rest = record;
      if (const auto done = process.state.replay(*next_record(rest)); !done) wrong_ = done.error().what();
    }
    if (process.state.loading() || process.state.workers().count() == 0) wrong_ = "a journal without the rows";
  }
  std::vector<std::string>& disk_of(const Process& process) { return disks_[static_cast<std::size_t>(process.number)]; }
  void introduce(Process& process) {
    if (acknowledged() > 0 || restored_) wrong_ = "what was acknowledged is gone";
    State& state = process.state;
    const TableOptions options = table_options();
    for (std::uint32_t worker = 0; worker < kWorkers; ++worker) {
      Hello hello;
      hello.worker = worker;
      hello.workers = kWorkers;
      hello.incarnation = 1;
      hello.servers = {"@"};
      state.run({1, Method::Joined, worker, 1, pack(hello)});
      state.run({1, Method::Start, worker, 1, pack(Start{{1, 0}, 0})});
      state.run({1, Method::Open, worker, 1, pack(Open{{2, 1}, "t", options, 0})});
    }
    disk_of(process).clear();
    Image image(state.freeze());
    while (const auto piece = image.next())
      disk_of(process).push_back(record_head({.method = Method::Piece, .body = *piece}).append(*piece));
  }
  /// All that a primary makes of its rows.
  void append(Process& process, const Command& command) {
    const std::string head = record_head(command);
    disk_of(process).push_back(head + std::string(command.body));
    process.replication.append(head, command.body);
  }
  static float value_of(const State& state, std::uint64_t key = kKey) {
    float value = 0;
    state.tables().at(0).read(&key, 1, &value, 1);
    return value;
  }

  // ---- as the primary ----

  void serve(const ProcessPtr& process, std::uint64_t epoch) {
    Process& p = *process;
    p.serves = true;
    p.epoch = epoch;
    p.term = ++terms_;
    p.replication = Replication();
    p.held.clear();
    p.fetching.reset();
    p.working = p.restoring = false;
    p.late.clear();
  }

  /// Some commands take long: another thread carries them out, and calls wait, but for the backup's.
  void note(const ProcessPtr& process, const Command& command, const std::function<void()>& then) {
    Process& p = *process;
    append(p, command);
    send_records(process);
    if (below(30) > 0) {
      p.state.run(command);
      noted(process);
      return then();
    }
    p.working = true;
    on(process, long_command(6000),
       [this, process, command = command, body = std::string(command.body), term = p.term, then]() mutable {
         if (!process->serves || process->term != term) return;
         command.body = body;
         process->state.run(command);
         process->working = false;
         noted(process);
         then();
         go_on(process);
       });
  }
  void noted(const ProcessPtr& process) {
    Process& p = *process;
    const auto rows = p.state.tables().some_rows(0);
    if (!rows || p.replication.phase() == Replication::Phase::Alone) return;
    const std::string body = pack(*rows);
    append(p, {.method = Method::Verify, .body = body});
    send_records(process);
  }
  void in_turn(const ProcessPtr& process, const std::function<void()>& serve) {
    process->late.push_back(serve);
    go_on(process);
  }
  static void go_on(const ProcessPtr& process) {
    while (!process->working && !process->restoring && !process->late.empty()) {
      const auto serve = std::move(process->late.front());
      process->late.pop_front();
      serve();
    }
  }

  void on_push(const ProcessPtr& process, int worker, std::uint64_t asked, int number) {
    if (!process->serves) return;
    in_turn(process, [this, process, worker, asked, number] { push(process, worker, asked, number); });
  }
  void push(const ProcessPtr& process, int worker, std::uint64_t asked, int number) {
    Process& p = *process;
    const auto sequence = static_cast<std::uint64_t>(3 + number);
    std::string body = pack(Change{{sequence, sequence - 1}, 0, 1, {}});
    const float gradient = -1;
    body.append(reinterpret_cast<const char*>(&kKey), sizeof kKey);
    body.append(reinterpret_cast<const char*>(&gradient), sizeof gradient);
    const auto mine = static_cast<std::uint32_t>(worker);
    const auto verdict = p.state.workers().judge({mine, 1, {sequence, sequence - 1}});
    const auto answer = [this, process, worker, asked, error = verdict ? std::string() : verdict.error().what()] {
      // Even a refusal of the push is void if another process has taken its place.
      process->held.push_back({process->replication.position(), {worker, asked, value_of(process->state), error}});
      answer_held(process);
    };
    if (!verdict || *verdict != Workers::Verdict::New) return answer();
    note(process, {1, Method::Push, mine, 1, body}, answer);
  }

  /// The snapshot, on a disk that may be slow, has the state of the moment it began.
  void snapshot() {
    after(milliseconds(300 + below(2000)), [this] { snapshot(); });
    for (const ProcessPtr& process : processes_) {
      if (!process->alive || !process->serves || process->working) continue;
      on(process, milliseconds(below(10'000)),
         [this, frozen = process->state.freeze(), value = value_of(process->state)]() mutable {
           State written;
           Image image(std::move(frozen));
           while (const auto piece = image.next()) {
             if (!written.replay({.method = Method::Piece, .body = *piece})) wrong_ = "a snapshot that is none";
           }
           if (value_of(written) != value) wrong_ = "a snapshot of another moment";
           ++snapshots_;
         });
    }
  }

  /// A worker asks for it until the answer says that all rows are there.
  void restore() {
    if (restored_) return;
    after(milliseconds(500), [this] { restore(); });
    const ProcessPtr process = processes_[below(kProcesses)];
    if (!process->alive || !process->serves || lost() || cut(100, process->number)) return;
    in_turn(process, [this, process] {
      process->restoring = true;
      take_part(process, 0, process->term);
    });
  }
  void take_part(const ProcessPtr& process, int part, int term) {
    on(process, long_command(800), [this, process, part, term] {
      Process& p = *process;
      if (!p.serves || p.term != term) return;
      if (p.working) return take_part(process, part, term);
      if (part == kParts) {
        p.restoring = false;
        p.held.push_back({p.replication.position(), {kRestorer, 0, value_of(p.state)}});
        answer_held(process);
        return go_on(process);
      }
      const RowHeader row{static_cast<std::uint64_t>(kFirstRestored + part), 1, 1};
      const float value = 1;
      std::string body = pack(Adopt{"t", table_options(), 0, 1, 0});
      body.append(reinterpret_cast<const char*>(&row), sizeof row);
      body.append(reinterpret_cast<const char*>(&value), sizeof value);
      note(process, {1, Method::Adopt, 0, 0, body}, [] {});
      take_part(process, part + 1, term);
    });
  }
  static bool has_restored(const State& state) {
    for (int part = 0; part < kParts; ++part) {
      if (value_of(state, static_cast<std::uint64_t>(kFirstRestored + part)) != 1) return false;
    }
    return true;
  }

  void answer_held(const ProcessPtr& process) {
    Process& p = *process;
    while (p.serves && !p.held.empty() && p.replication.may_answer(p.held.front().first, clock_of(p))) {
      const Owed answer = p.held.front().second;
      p.held.erase(p.held.begin());
      if (!answer.error.empty()) wrong_ = answer.error;
      if (p.term < latest_term_) wrong_ = "a process answers after another one has answered in its place";
      latest_term_ = std::max(latest_term_, p.term);
      if (lost() || cut(p.number, 100)) continue;
      after(delay(), [this, answer] { answered(answer); });
    }
  }

  bool on_follow(const ProcessPtr& process, const Holder& other, int connection) {
    Process& p = *process;
    if (!p.serves || p.working || !p.replication.may_begin(other, static_cast<std::uint64_t>(connection))) return false;
    p.replication.begin(
        other, static_cast<std::uint64_t>(connection),
        [image = std::make_shared<Image>(p.state.freeze())]() -> std::optional<std::string> {
          const auto piece = image->next();
          if (!piece) return std::nullopt;
          return record_head({.method = Method::Piece, .body = *piece}).append(*piece);
        },
        clock_of(p));
    p.connection = connection;
    p.sent.reset();
    p.fetching.reset();
    look_at_backup(process, other);
    return true;
  }

  using Reply = std::function<void(std::string records, std::uint64_t count)>;
  bool on_fetch(const ProcessPtr& process, const Holder& other, int connection, std::uint64_t copy,
                std::uint64_t position, const Reply& reply) {
    Process& p = *process;
    if (!p.serves || !p.replication.wants(other.life, copy)) return false;
    if (connection < p.connection) return true;  // it has ended
    if (connection != p.connection) {
      p.connection = connection;
      p.sent.reset();
    }
    if (!p.replication.fetch(position, clock_of(p), p.sent)) {
      wrong_ = "records that it cannot have had";
      return false;
    }
    p.fetching = reply;
    on(process, kHeartbeat, [this, process, mine = ++p.fetches] {
      if (!process->fetching || process->fetches != mine) return;
      process->sent = clock_of(*process);
      (*std::exchange(process->fetching, std::nullopt))({}, 0);
    });
    answer_held(process);
    send_records(process);
    if (p.replication.join()) {
      change(
          process, [self = p.self, other](ServerMap& map) { return add(map, 0, self, other); },
          [this, process, other](Outcome outcome) {
            if (outcome == Outcome::Refused) return lose_backup(process, other);
            (void)process->replication.joined(other);
          });
    }
    return true;
  }

  void send_records(const ProcessPtr& process) {
    Process& p = *process;
    if (!p.fetching || !p.replication.has_records()) return;
    std::uint64_t count = 0;
    std::string records = p.replication.records(300, count);
    p.sent = clock_of(p);
    (*std::exchange(p.fetching, std::nullopt))(std::move(records), count);
  }

  void look_at_backup(const ProcessPtr& process, const Holder& other) {
    Process& p = *process;
    if (!p.serves || !p.replication.is_watched() || p.replication.other() != other) return;
    if (p.replication.is_silent(clock_of(p))) {
      if (is_calm(processes_[other.server], other) && is_calm(process, p.self))
        wrong_ = "a copy was given up though nothing was wrong with it";
      return lose_backup(process, other);
    }
    on(process, milliseconds(300), [this, process, other] { look_at_backup(process, other); });
  }

  /// Its connection has ended, and nobody listens there.
  void lose_backup(const ProcessPtr& process, const Holder& other) {
    Process& p = *process;
    if (!p.serves || p.replication.other() != other) return;
    if (!p.replication.lose()) return answer_held(process);
    dropping_.insert(process);
    change(
        process, [self = p.self, other](ServerMap& map) { return drop(map, 0, self, other); },
        [this, process, other](Outcome outcome) {
          dropping_.erase(process);
          if (outcome == Outcome::Refused || !process->serves) return;
          if (process->replication.dropped(other)) answer_held(process);
        });
  }

  // ---- as who has a copy ----

  void follow(const ProcessPtr& process, const Holder& primary) {
    Process& p = *process;
    p.copies = true;
    disk_of(p).clear();
    p.copy = State();
    p.received = 0;
    p.waiting.clear();
    p.primary = primary;
    p.heard = clock_of(p);
    const int connection = ++p.connections * kProcesses + p.number;
    p.copy_number = static_cast<std::uint64_t>(connection);
    const ProcessPtr to = processes_[primary.server];
    const auto gives_up = [process, connection] {
      if (process->connections * kProcesses + process->number == connection && process->received == 0)
        process->copies = false;
    };
    on(process, milliseconds(500), gives_up);
    if (to->self != primary || !to->alive) return;
    send(p.number, to, [this, to, process, connection] {
      if (on_follow(to, process->self, connection))
        send(to->number, process, [this, process, connection] { fetch(process, connection); });
    });
  }

  void fetch(const ProcessPtr& process, int connection) {
    Process& p = *process;
    if (!p.copies || p.asks_for_place || p.connections * kProcesses + p.number != connection) return;
    const ProcessPtr to = processes_[p.primary.server];
    on(process, milliseconds(400), [this, process, connection, at = p.heard] {
      if (process->heard == at) contact(process, connection);
    });
    if (to->self != p.primary || !to->alive) return;
    send(p.number, to, [this, to, process, connection, position = p.received, copy = p.copy_number] {
      const bool taken = on_fetch(to, process->self, connection, copy, position,
                                  [this, to, process, connection](std::string records, std::uint64_t count) {
                                    send(to->number, process, [this, process, connection, records, count] {
                                      fetched(process, connection, records, count);
                                    });
                                  });
      if (!taken) send(to->number, process, [this, process, connection] { disowned(process, connection); });
    });
  }

  void fetched(const ProcessPtr& process, int connection, const std::string& records, std::uint64_t count) {
    Process& p = *process;
    // A process that asks for the primary's place hears nothing more from it: a Follower does one after the other.
    if (!p.copies || p.asks_for_place || p.connections * kProcesses + p.number != connection) return;
    p.heard = clock_of(p);
    p.received += count;
    fetch(process, connection);
    if (records.empty()) return;
    p.waiting.push_back(records);
    if (p.waiting.size() == 1) carry_out(process, p.copy_number);
  }
  /// On a thread of its own, and now and then it takes long.
  void carry_out(const ProcessPtr& process, std::uint64_t copy) {
    on(process, below(40) > 0 ? microseconds(below(300)) : long_command(5000), [this, process, copy] {
      Process& p = *process;
      if (!p.copies || p.copy_number != copy) return;
      std::string_view rest = p.waiting.front();
      while (const auto command = next_record(rest)) {
        disk_of(p).push_back(record_head(*command) + std::string(command->body));
        if (const auto done = p.copy.replay(*command); !done) wrong_ = done.error().what();
      }
      p.waiting.pop_front();
      if (!p.waiting.empty()) carry_out(process, copy);
    });
  }

  /// The connection is made anew, until it is known that the primary is gone.
  void contact(const ProcessPtr& process, int connection) {
    Process& p = *process;
    if (!p.copies || p.asks_for_place || p.connections * kProcesses + p.number != connection) return;
    const ProcessPtr to = processes_[p.primary.server];
    const bool refused = (to->self != p.primary || !to->alive) && !cut(p.number, to->number);
    const auto silent = clock_of(p) - p.heard;
    if (silent >= kSilence || (refused && silent >= kLease + kLeaseMargin)) return take_place(process);
    ++p.connections;
    fetch(process, p.connections * kProcesses + p.number);
  }

  void disowned(const ProcessPtr& process, int connection) {
    Process& p = *process;
    if (!p.copies || p.asks_for_place || p.connections * kProcesses + p.number != connection) return;
    const auto silent = clock_of(p) - p.heard;
    if (silent >= kLease + kLeaseMargin) return take_place(process);
    on(process, milliseconds(20), [this, process, connection] { disowned(process, connection); });
  }

  void take_place(const ProcessPtr& process) {
    Process& p = *process;
    if (!p.waiting.empty()) {  // once it has all
      const int connection = p.connections * kProcesses + p.number;
      on(process, milliseconds(20), [this, process, connection] { contact(process, connection); });
      return;
    }
    if (p.copy.loading() || p.received == 0) {
      p.copies = false;
      return;
    }
    p.asks_for_place = true;
    change(
        process, [self = p.self](ServerMap& map) { return promote(map, 0, self); },
        [this, process](Outcome outcome) {
          process->asks_for_place = false;
          process->copies = false;
          if (outcome == Outcome::Refused) return;
          ++promotions_;
          if (const ProcessPtr& before = processes_[process->primary.server]; is_calm(before, process->primary))
            wrong_ = "a process lost its place though nothing was wrong with it";
          process->state = std::move(process->copy);
          process->copy = State();
          serve(process, map_.rows[0].epoch);
        });
  }

  // ---- workers: each pushes, and asks again until it has been acknowledged ----

  void ask(int number) {
    Pusher& worker = workers_[static_cast<std::size_t>(number)];
    if (worker.pushed == kPushes) return;
    const std::uint64_t asked = ++worker.asked;
    worker.acknowledged_before = acknowledged();
    const ProcessPtr to = processes_[static_cast<std::size_t>(worker.at)];
    if (to->alive && !lost() && !cut(100, to->number))
      on(to, delay(), [this, to, number, asked, push = worker.pushed] { on_push(to, number, asked, push); });
    after(milliseconds(300), [this, number, asked] {
      Pusher& again = workers_[static_cast<std::size_t>(number)];
      if (again.asked != asked) return;
      again.at = static_cast<int>(below(kProcesses));
      ask(number);
    });
  }

  void answered(const Owed& answer) {
    if (answer.worker == kRestorer) {
      restored_ = true;
      const Process* const primary = serving();
      if (primary != nullptr && !primary->working && !has_restored(primary->state))
        wrong_ = "rows are not there that have been restored";
      return;
    }
    Pusher& worker = workers_[static_cast<std::size_t>(answer.worker)];
    if (worker.asked != answer.asked) return;
    // All that had been acknowledged when it asked, and its own, is in what it reads.
    if (static_cast<int>(answer.value) < worker.acknowledged_before + 1)
      wrong_ = fmt::format("it reads {} after {} had been acknowledged", answer.value, worker.acknowledged_before);
    ++worker.pushed;
    ++worker.asked;
    after(milliseconds(below(500)), [this, number = answer.worker] { ask(number); });
  }

  int acknowledged() const {
    int all = 0;
    for (const Pusher& worker : workers_) all += worker.pushed;
    return all;
  }
  bool all_have_ended() const { return acknowledged() == kWorkers * kPushes && restored_; }

  // ---- what happens to them ----

  const Process* serving() const {
    for (const ProcessPtr& process : processes_) {
      if (process->alive && process->serves && map_.rows[0].primary == process->self) return process.get();
    }
    return nullptr;
  }

  void trouble() {
    after(milliseconds(100 + below(900)), [this] {
      if (!troubled_) return;
      trouble();
      const int number = static_cast<int>(below(kProcesses));
      const ProcessPtr process = processes_[static_cast<std::size_t>(number)];
      switch (below(4)) {
        case 0: kill(process); break;
        case 1: process->stopped_until = now_ + milliseconds(below(5000)); break;
        case 2:
          cut_ = number;
          cut_until_ = now_ + milliseconds(below(5000));
          break;
        default: break;
      }
    });
  }

  /// Without journals never both who have the rows, or who is about to be the only one: what is lost then is lost.
  void kill(const ProcessPtr& process) {
    if (!map_.formed() || !process->alive) return;
    if (!journals_ && (dropping_.count(process) > 0 || process->asks_for_place)) return;
    const Serving& serving = map_.rows[0];
    // The process that the map names as the backup may have given up its copy, and be about to get another one.
    const auto there = [&](const Holder& holder) {
      if (holder.life == 0 || holder == process->self) return false;
      const Process& other = *processes_[holder.server];
      return other.self == holder && other.alive &&
             (other.serves || (other.copies && other.received > 0 && !other.copy.loading()));
    };
    if (!journals_ && (serving.primary == process->self || serving.backup == process->self) &&
        !there(serving.primary == process->self ? serving.backup : serving.primary))
      return;
    process->alive = false;
    for (const ProcessPtr& other : processes_) {
      if (!other->alive || !other->serves || other->replication.other() != process->self) continue;
      on(other, delay(), [this, other, gone = process->self] { lose_backup(other, gone); });
    }
    after(milliseconds(below(1500)), [this, number = process->number] { begin_process(number); });
  }

  std::mt19937 random_;
  const bool journals_;
  std::vector<std::vector<std::string>> disks_;  // records of each server's journal, which its processes leave behind
  Time now_{};
  std::multimap<Time, std::function<void()>> events_;
  bool troubled_ = true;
  milliseconds long_commands_{};
  int cut_ = -1;
  Time cut_until_{};
  ServerMap map_;
  std::set<ProcessPtr> dropping_;
  std::vector<ProcessPtr> processes_;
  std::vector<std::weak_ptr<Process>> all_;  // those that have ended, too
  std::vector<Pusher> workers_;
  std::uint64_t lives_ = 0;
  bool restored_ = false;
  int terms_ = 0, latest_term_ = 0, promotions_ = 0, recoveries_ = 0, snapshots_ = 0;
  std::string wrong_;
};

void count_in_any_schedule(bool journals) {
  // More by hand: COHORT_PS_SCHEDULES=100000; COHORT_PS_FIRST=N begins with that one.
  const auto number = [](const char* name, unsigned standard) {
    const char* const wanted = std::getenv(name);
    return wanted != nullptr ? static_cast<unsigned>(std::atoi(wanted)) : standard;
  };
  const unsigned first = number("COHORT_PS_FIRST", 0), schedules = number("COHORT_PS_SCHEDULES", 400);
  int promotions = 0, recoveries = 0, snapshots = 0;
  for (unsigned seed = first; seed < first + schedules; ++seed) {
    Simulation simulation(seed, journals);
    const std::string wrong = simulation.run();
    ASSERT_EQ(wrong, "") << "schedule " << seed;
    promotions += simulation.promotions();
    recoveries += simulation.recoveries();
    snapshots += simulation.snapshots();
  }
  EXPECT_GT(snapshots, static_cast<int>(schedules));
  EXPECT_GT(promotions, static_cast<int>(schedules / 2));
  EXPECT_EQ(recoveries > static_cast<int>(schedules / 2), journals) << recoveries;
  ::testing::Test::RecordProperty("promotions", promotions);
  ::testing::Test::RecordProperty("recoveries", recoveries);
}

TEST(Replication, CountsEachPushOnceInAnySchedule) { count_in_any_schedule(false); }
TEST(Replication, WithJournalsCountsEachPushOnceWhoeverIsKilled) { count_in_any_schedule(true); }

}  // namespace
}  // namespace cohort::ps
