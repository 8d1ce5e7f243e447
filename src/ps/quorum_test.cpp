// Backup workers: several servers' states, and workers whose messages arrive in any order, that die, come again or
// sleep at any moment. Each clock has on all servers exactly the pushes of its quorum, workers are told the truth, and
// nobody waits for more than all but the backup workers.
#include "ps/state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace cohort::ps {
namespace {

/// A command, as a journal has it.
struct Noted {
  Method method;
  std::uint32_t worker;
  std::uint64_t incarnation;
  std::string body;
  Command command() const { return {1, method, worker, incarnation, body}; }
};

struct Server {
  State state;
  std::vector<Noted> journal;

  void note(Noted noted) {
    journal.push_back(std::move(noted));
    const auto done = state.replay(journal.back().command());
    if (!done) ADD_FAILURE() << done.error().what();
  }
  /// Builds the state as a restarted server or a backup does.
  void begin_anew(bool from_image) {
    State again;
    if (from_image) {
      Image image(state.freeze());
      while (const auto piece = image.next()) ASSERT_TRUE(again.replay({.method = Method::Piece, .body = *piece}));
    } else {
      for (const Noted& noted : journal) ASSERT_TRUE(again.replay(noted.command()));
    }
    state = std::move(again);
  }
  const Worker* worker(std::uint32_t number) const {
    return state.workers().count() == 0 ? nullptr : &state.workers().at(number);
  }
  bool has(std::uint32_t number, std::uint64_t incarnation) const {
    const Worker* const known = worker(number);
    return known != nullptr && known->incarnation == incarnation &&
           (known->phase == Worker::Phase::Live || known->phase == Worker::Phase::Joined);
  }
};

class Schedule {
 public:
  explicit Schedule(unsigned seed) : random_(seed), servers_(1 + below(3)), workers_(2 + below(3)) {
    backup_ = 1 + below(workers_.size() - 1);
    for (std::uint32_t i = 0; i < workers_.size(); ++i) come(i);
  }

  void run() {
    for (int i = 0; i < 400; ++i) {
      something();
      trouble();
    }
    // Backup workers sleep from now on, wherever they are; all others have to go on.
    std::vector<std::uint32_t> order(workers_.size());
    for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    for (std::size_t i = 0; i < order.size(); ++i) {
      Pusher& worker = workers_[order[i]];
      worker.sleeps = i < backup_;
      if (!worker.sleeps && !worker.alive) come(order[i]);
      worker.done = 0;
    }
    const auto all_done = [&] {
      return std::all_of(workers_.begin(), workers_.end(),
                         [](const Pusher& one) { return one.sleeps || one.done >= 5; });
    };
    for (int i = 0; i < 20'000 && !all_done(); ++i) something();
    EXPECT_TRUE(all_done()) << "somebody waits for a backup worker";
    for (const Server& server : servers_) {
      EXPECT_GE(server.state.settled() + 1, seen_);
      for (std::int64_t clock = 0; clock < server.state.settled(); ++clock) {
        const auto key = static_cast<std::uint64_t>(clock);
        float value = 0;
        server.state.tables().at(0).read(&key, 1, &value, 1);
        EXPECT_EQ(value, expected_[clock]) << "clock " << clock;
      }
    }
  }
  int late() const noexcept { return late_; }
  int lost() const noexcept { return lost_; }

 private:
  struct Step {
    int together;                   // messages of one number are under way at the same time; 0: is none
    std::function<bool()> attempt;  // false: not yet
  };
  struct Pusher {
    std::uint64_t incarnation = 0;
    bool alive = false, sleeps = false;
    std::int64_t clock = 0;
    std::vector<std::uint64_t> sequences;  // of changes to each server
    std::deque<Step> plan;
    int done = 0;
  };
  struct Asking {
    std::uint64_t incarnation = 0;
    std::vector<std::size_t> others = {};
    bool asked = false;
  };

  std::size_t below(std::size_t n) { return static_cast<std::size_t>(random_()) % n; }

  // ---- what a worker does ----

  static void then(Pusher& worker, std::function<bool()> step) { worker.plan.push_back({0, std::move(step)}); }
  void send(Pusher& worker, std::vector<std::function<bool()>> messages) {
    std::shuffle(messages.begin(), messages.end(), random_);
    ++together_;
    for (auto& one : messages) worker.plan.push_back({together_, std::move(one)});
  }
  /// A change of the worker, which may come twice. True also where nothing is taken from it any more.
  template <class Build>
  std::function<bool()> change(std::uint32_t number, std::size_t to, Method method, Build&& build) {
    const std::uint64_t incarnation = workers_[number].incarnation;
    const std::uint64_t sequence = ++workers_[number].sequences[to];
    return [=, this] {
      const Order order{sequence, sequence - 1};
      Server& server = servers_[to];
      for (std::size_t times = 1 + below(2); times > 0; --times) {
        const auto verdict = server.state.workers().judge({number, incarnation, order});
        if (!verdict || *verdict == Workers::Verdict::Made) break;
        server.note({method, number, incarnation, build(order)});
      }
      if (to == 0) look_at_quorum();
      return true;
    };
  }
  void look_at_quorum() {
    const State& first = servers_[0].state;
    for (; seen_ < first.settled(); ++seen_) {
      ASSERT_EQ(seen_ + 1, first.settled()) << "two decisions at once: the first would not be heard of";
      const auto quorum = first.concluded(0).quorum.workers;
      for (std::uint32_t other = 0; other < workers_.size() && quorum.size() < workers_.size() - backup_; ++other) {
        ASSERT_TRUE(!first.workers().holds_others(other) || std::count(quorum.begin(), quorum.end(), other) == 1)
            << "a clock has ended without worker " << other << ", and of " << workers_.size() << " only "
            << quorum.size() << " count";
      }
      for (const std::uint32_t member : quorum) {
        const std::uint64_t process = first.workers().at(member).incarnation;
        expected_[seen_] += value_of(member, process);
        quorums_[seen_][member] = process;
      }
    }
  }
  static float value_of(std::uint32_t worker, std::uint64_t incarnation) {
    return static_cast<float>((1 + incarnation % 3) << (3 * worker));
  }

  void come(std::uint32_t number) {
    Pusher& worker = workers_[number];
    worker.alive = true;
    worker.clock = 0;
    worker.sequences.assign(servers_.size(), 0);
    worker.plan.clear();
    const std::uint64_t mine = ++worker.incarnation;
    for (std::size_t to = 0; to < servers_.size(); ++to) {
      then(worker, [this, number, mine, to] {
        Server& server = servers_[to];
        const Worker* const known = server.worker(number);
        if (known != nullptr && server.has(number, known->incarnation)) {
          ask(to, number, known->incarnation);
          return false;
        }
        Hello hello;
        hello.worker = number;
        hello.workers = static_cast<std::uint32_t>(workers_.size());
        hello.incarnation = mine;
        hello.server = static_cast<std::uint32_t>(to);
        hello.servers.resize(servers_.size(), "@");
        server.note({Method::Joined, number, mine, pack(hello)});
        if (server.worker(number)->phase != Worker::Phase::Expected)
          workers_[number].clock = std::max(workers_[number].clock, server.state.next_clock());
        return true;
      });
    }
    for (std::size_t to = 0; to < servers_.size(); ++to) {
      send(worker, {change(number, to, Method::Start, [this, number](const Order& order) {
             return pack(Start{order, workers_[number].clock});
           })});
    }
    std::vector<std::function<bool()>> opens;
    for (std::size_t to = 0; to < servers_.size(); ++to) {
      opens.push_back(change(number, to, Method::Open, [this](const Order& order) {
        TableOptions options;
        options.dim = 1;
        options.optimizer = optim::Sgd{.lr = 1};
        options.consistency = Consistency::sync({.backup_workers = static_cast<std::int64_t>(backup_)});
        return pack(Open{order, "t", options, 0});
      }));
    }
    send(worker, std::move(opens));
    then(worker, [this, number] {
      const Quorum quorum = servers_[0].state.concluded(number).quorum;
      tell(number, 0, quorum.clocks, quorum);
      return true;
    });
  }
  void tell(std::uint32_t number, std::size_t first, std::int64_t next, const Quorum& quorum) {
    std::vector<std::function<bool()>> tells;
    for (std::size_t to = first; to < servers_.size(); ++to) {
      tells.push_back(change(number, to, Method::Conclude, [next, quorum](const Order& order) {
        return pack(Conclude{order, next, quorum});
      }));
    }
    send(workers_[number], std::move(tells));
    then(workers_[number], [this, number, next] {
      workers_[number].clock = next;
      begin_clock(number);
      return true;
    });
  }
  void begin_clock(std::uint32_t number) {
    Pusher& worker = workers_[number];
    std::vector<std::function<bool()>> pushes;
    for (std::size_t to = 0; to < servers_.size(); ++to) {
      pushes.push_back(change(number, to, Method::Push,
                              [clock = worker.clock, value = value_of(number, worker.incarnation)](const Order& order) {
                                const auto key = static_cast<std::uint64_t>(clock);
                                const float gradient = -value;
                                std::string body = pack(Change{order, 0, 1, {}});
                                body.append(reinterpret_cast<const char*>(&key), sizeof key);
                                return body.append(reinterpret_cast<const char*>(&gradient), sizeof gradient);
                              }));
    }
    send(worker, std::move(pushes));
    send(worker, {change(number, 0, Method::Propose, [clock = worker.clock](const Order& order) {
           return pack(Commit{order, clock});
         })});
    then(worker, [this, number, clock = worker.clock] {
      if (servers_[0].state.settled() <= clock) return false;
      const Concluded ended = servers_[0].state.concluded(number);
      const auto& quorum = quorums_[clock];
      const auto member = quorum.find(number);
      EXPECT_EQ(ended.late, member == quorum.end() || member->second != workers_[number].incarnation);
      EXPECT_GT(ended.clock, clock);
      late_ += ended.late ? 1 : 0;
      ++workers_[number].done;
      tell(number, 1, ended.clock, ended.quorum);
      return true;
    });
  }

  // ---- what happens ----

  void something() {
    const std::size_t what = below(10);
    if (what == 0 && !under_way_.empty()) {
      const std::size_t at = below(under_way_.size());
      const auto message = under_way_[at];
      under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(at));
      (void)message();
    } else if (what < 4 && !asking_.empty()) {
      auto at = asking_.begin();
      std::advance(at, static_cast<std::ptrdiff_t>(below(asking_.size())));
      go_on_asking(at->first.first, at->first.second, at->second);
    } else {
      const auto number = static_cast<std::uint32_t>(below(workers_.size()));
      Pusher& worker = workers_[number];
      if (!worker.alive || worker.sleeps || worker.plan.empty()) return;
      const auto attempt = worker.plan.front().attempt;  // which may add to the plan
      if (attempt()) worker.plan.pop_front();
    }
  }
  void trouble() {
    const auto number = static_cast<std::uint32_t>(below(workers_.size()));
    Pusher& worker = workers_[number];
    switch (below(40)) {
      case 0: servers_[below(servers_.size())].begin_anew(below(2) == 0); break;
      case 1:
        if (worker.alive) die(number);
        break;
      case 2:
      case 3:
        if (!worker.alive) come(number);
        break;
      default: break;
    }
  }
  /// Messages it has sent may still arrive later, or never.
  void die(std::uint32_t number) {
    Pusher& worker = workers_[number];
    ++lost_;
    worker.alive = false;
    for (const Step& step : worker.plan) {
      if (step.together == 0 || step.together != worker.plan.front().together) break;
      if (below(2) == 0) under_way_.push_back(step.attempt);
    }
    worker.plan.clear();
    for (std::size_t server = 0; server < servers_.size(); ++server) ask(server, number, worker.incarnation);
  }
  void ask(std::size_t server, std::uint32_t number, std::uint64_t incarnation) {
    if (!servers_[server].has(number, incarnation)) return;
    auto& asking = asking_[{server, number}];
    if (asking.incarnation == incarnation) return;
    asking = {incarnation};
    for (std::size_t other = 0; other < servers_.size(); ++other) {
      if (other != server) asking.others.push_back(other);
    }
  }
  void go_on_asking(std::size_t server, std::uint32_t number, Asking& asking) {
    const Settle question{number, asking.incarnation};
    if (!asking.asked) {
      asking.asked = true;
      servers_[server].note({Method::Settle, number, 0, pack(question)});
    } else if (!asking.others.empty()) {
      const std::size_t other = asking.others.back();
      if (servers_[other].state.workers().count() == 0) return;
      servers_[other].note({Method::Settle, number, 0, pack(question)});
      asking.others.pop_back();
      ask(other, number, asking.incarnation);
    } else {
      servers_[server].note({Method::Lost, number, asking.incarnation, pack(Settled{0})});
      asking_.erase({server, number});
      if (server == 0) look_at_quorum();
    }
  }

  std::mt19937 random_;
  std::vector<Server> servers_;
  std::vector<Pusher> workers_;
  std::size_t backup_ = 1;
  std::vector<std::function<bool()>> under_way_;  // of processes that are dead
  std::map<std::pair<std::size_t, std::uint32_t>, Asking> asking_;
  std::int64_t seen_ = 0;
  std::map<std::int64_t, float> expected_;
  std::map<std::int64_t, std::map<std::uint32_t, std::uint64_t>> quorums_;
  int together_ = 0, late_ = 0, lost_ = 0;
};

TEST(Quorum, EachClockHasItsPushesAloneInAnySchedule) {
  int late = 0, lost = 0;
  for (unsigned seed = 0; seed < 3000 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Schedule schedule(seed);
    schedule.run();
    late += schedule.late();
    lost += schedule.lost();
  }
  EXPECT_GT(late, 1000);
  EXPECT_GT(lost, 1000);
}

}  // namespace
}  // namespace cohort::ps
