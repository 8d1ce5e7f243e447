// Times a parameter server: rows per second of pull and of push with row-wise Adagrad, and the time of a call of 100
// keys.
//   ps_bench [--where table|shared|unix|tcp] [--rows 1000000] [--dim 64] [--batch 4096] [--under-way 4] [--seconds 2]
//            [--workers 1] [--json]
//   ps_bench --dense 25000000 [--servers 4] [--workers 4] [--where ...] [--seconds 2] [--json]
// table: the table alone, on this thread. Else a server that is a process, and so many workers that are processes:
// shared: at a Unix name and through shared memory; unix, tcp: over sockets, those of TCP encrypted. Keys are uniform
// over rows that are all there before. All kinds are timed by turns, since the machine's speed drifts; the median of
// the rounds is printed. "Of a server core": by the processor's time of the server.
// --dense: so many floats that all workers push and pull at once; the time until the last one has done so.
#include "net/secret.h"
#include "ps/sparse_table.h"

#include <cohort/ps.h>

#include <sys/wait.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace cohort;
using Clock = std::chrono::steady_clock;

constexpr int kRounds = 7;
constexpr std::size_t kFew = 100;  // keys of a call whose time is taken

struct Settings {
  std::string where = "shared";
  std::uint64_t rows = 1'000'000;
  std::int64_t dim = 64;
  std::size_t batch = 4096;
  std::size_t under_way = 4;
  double seconds = 2;
  int workers = 1;
  int servers = 1;
  std::int64_t dense = 0;
  bool json = false;
};

double processor_seconds(pid_t process) {
  clockid_t clock = CLOCK_PROCESS_CPUTIME_ID;
  if (process != 0 && ::clock_getcpuclockid(process, &clock) != 0) return 0;
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double at(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

/// The operation that is timed: so many keys, pulled or pushed.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual void pull(std::span<const std::uint64_t> keys) = 0;
  virtual void push(std::span<const std::uint64_t> keys) = 0;
  /// Returns once all operations under way are over.
  virtual void finish() {}
  /// All workers are here.
  virtual void meet() {}
};

ps::TableOptions options_of(const Settings& settings) {
  ps::TableOptions options;
  options.dim = settings.dim;
  options.optimizer = ps::optim::RowAdagrad{};
  options.consistency = ps::Consistency::async();
  return options;
}

class InProcess final : public Subject {
 public:
  explicit InProcess(const Settings& settings)
      : table_("t", options_of(settings)),
        out_(settings.batch * table_.dim()),
        gradients_(settings.batch * table_.dim(), 1e-3F) {}
  void pull(std::span<const std::uint64_t> keys) override { table_.read(keys.data(), keys.size(), out_.data(), 1); }
  void push(std::span<const std::uint64_t> keys) override {
    table_.step({keys.data(), gradients_.data(), keys.size()}, 1);
  }

 private:
  ps::SparseTable table_;
  std::vector<float> out_, gradients_;
};

/// A server that is a process of its own, until this is destroyed.
class Server {
 public:
  Server(const Settings& settings, const std::string& secret_file) {
    int ends[2], said[2];
    if (::pipe(ends) != 0 || ::pipe(said) != 0) raise(ErrorCode::Io, "pipe: {}", errno_text(errno));
    process_ = ::fork();
    if (process_ < 0) raise(ErrorCode::Io, "fork: {}", errno_text(errno));
    if (process_ == 0) {
      ::close(ends[1]);
      ps::ServerOptions serving;
      serving.endpoint = settings.where == "tcp" ? "127.0.0.1:0" : "@cohort-ps-bench-" + std::to_string(::getpid());
      serving.secret_file = secret_file;
      serving.shared_memory = settings.where == "shared";
      {
        const ps::Server server(serving);
        (void)!::write(said[1], server.endpoint().data(), server.endpoint().size());
        ::close(said[1]);
        char byte = 0;
        (void)!::read(ends[0], &byte, 1);  // until the other end closes
      }
      ::_exit(0);
    }
    ::close(ends[0]);
    ::close(said[1]);
    end_ = ends[1];
    std::array<char, 256> name{};
    const ssize_t size = ::read(said[0], name.data(), name.size());
    ::close(said[0]);
    if (size <= 0) raise(ErrorCode::Unavailable, "the server has not started");
    endpoint_.assign(name.data(), static_cast<std::size_t>(size));
  }
  ~Server() {
    if (process_ <= 0 || owner_ != ::getpid()) return;
    ::close(end_);
    ::waitpid(process_, nullptr, 0);
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  const std::string& endpoint() const noexcept { return endpoint_; }
  pid_t process() const noexcept { return process_; }

 private:
  const pid_t owner_ = ::getpid();
  pid_t process_ = 0;
  int end_ = -1;
  std::string endpoint_;
};

class Served final : public Subject {
 public:
  Served(const Settings& settings, const ps::ClientOptions& connecting)
      : under_way_(settings.under_way), gradients_(settings.batch * static_cast<std::size_t>(settings.dim), 1e-3F) {
    client_.emplace(ps::Client::connect(connecting));
    table_.emplace(client_->table("t", options_of(settings)));
    outs_.resize(under_way_ + 1, std::vector<float>(gradients_.size()));
  }
  void meet() override { client_->barrier(); }
  void pull(std::span<const std::uint64_t> keys) override {
    std::vector<float>& out = outs_[next_++ % outs_.size()];
    add(table_->pull(keys, std::span(out).first(keys.size() * dim())));
  }
  void push(std::span<const std::uint64_t> keys) override {
    add(table_->push(keys, std::span<const float>(gradients_).first(keys.size() * dim())));
  }
  void finish() override {
    for (ps::Work& work : works_) work.wait();
    works_.clear();
  }

 private:
  std::size_t dim() const { return static_cast<std::size_t>(table_->options().dim); }
  void add(ps::Work work) {
    works_.push_back(std::move(work));
    if (works_.size() < under_way_) return;
    works_.front().wait();
    works_.pop_front();
  }

  const std::size_t under_way_;
  std::vector<float> gradients_;
  std::vector<std::vector<float>> outs_;
  std::size_t next_ = 0;
  std::optional<ps::Client> client_;
  std::optional<ps::Table> table_;
  std::deque<ps::Work> works_;
};

/// `server`: its process, 0: this one. `worker`: only the first one prints.
void run(const Settings& settings, Subject& subject, pid_t server, int worker) {
  std::mt19937_64 random(static_cast<unsigned>(worker) + 1);
  std::vector<std::uint64_t> keys(settings.batch);
  for (std::uint64_t row = 0; worker == 0 && row < settings.rows;) {  // so that the rows are there
    const std::size_t count = std::min<std::uint64_t>(keys.size(), settings.rows - row);
    for (std::size_t i = 0; i < count; ++i) keys[i] = row++;
    subject.push(std::span<const std::uint64_t>(keys).first(count));
    subject.finish();
  }
  const auto draw = [&](std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) keys[i] = random() % settings.rows;
    return std::span<const std::uint64_t>(keys).first(count);
  };
  const double share = settings.seconds / kRounds / 4;
  struct Rates {
    std::vector<double> by_clock, of_a_core;  // million rows per second
  };
  const auto rate = [&](Rates& rates, const std::function<void(std::span<const std::uint64_t>)>& call) {
    subject.meet();
    const auto begin = Clock::now();
    const double used = processor_seconds(server);
    std::uint64_t rows = 0;
    while (seconds_since(begin) < share) {
      call(draw(settings.batch));
      rows += settings.batch * static_cast<std::uint64_t>(settings.workers);  // as many by each of them, about
    }
    subject.finish();
    rates.by_clock.push_back(static_cast<double>(rows) / seconds_since(begin) / 1e6);
    rates.of_a_core.push_back(static_cast<double>(rows) / (processor_seconds(server) - used) / 1e6);
  };
  const auto time = [&](std::vector<double>& times, const std::function<void(std::span<const std::uint64_t>)>& call) {
    subject.meet();
    const auto begin = Clock::now();
    while (seconds_since(begin) < share) {
      const auto few = draw(std::min(kFew, settings.batch));
      const auto one = Clock::now();
      call(few);
      subject.finish();
      times.push_back(seconds_since(one) * 1e6);
    }
  };
  Rates pulls, pushes;
  std::vector<double> pull_times, push_times;
  const auto pull = [&](std::span<const std::uint64_t> some) { subject.pull(some); };
  const auto push = [&](std::span<const std::uint64_t> some) { subject.push(some); };
  for (int round = 0; round < kRounds; ++round) {
    rate(pulls, pull);
    rate(pushes, push);
    time(pull_times, pull);
    time(push_times, push);
  }
  subject.meet();
  if (worker != 0) return;
  if (settings.json) {
    const auto figures = [](const char* what, const Rates& rates, const std::vector<double>& times, const char* end) {
      std::printf("\"%s\": %.4f, \"%s_of_a_server_core\": %.4f, \"%s_us\": %.2f, \"%s_us_99\": %.2f%s", what,
                  at(rates.by_clock, 0.5), what, at(rates.of_a_core, 0.5), what, at(times, 0.5), what, at(times, 0.99),
                  end);
    };
    std::printf("{");
    figures("pull", pulls, pull_times, ", ");
    figures("push", pushes, push_times, "}\n");
    return;
  }
  std::printf("%s, %llu rows of %lld floats, %zu keys a call, %d workers\n", settings.where.c_str(),
              static_cast<unsigned long long>(settings.rows), static_cast<long long>(settings.dim), settings.batch,
              settings.workers);
  const auto print = [](const char* what, const Rates& rates, const std::vector<double>& times) {
    std::printf("  %s  %6.2f million rows/s, %6.2f of a server core   100 keys: %7.1f us, 99%%: %7.1f us\n", what,
                at(rates.by_clock, 0.5), at(rates.of_a_core, 0.5), at(times, 0.5), at(times, 0.99));
  };
  print("pull", pulls, pull_times);
  print("push", pushes, push_times);
}

void run_dense(const Settings& settings, const ps::ClientOptions& connecting) {
  ps::Client client = ps::Client::connect(connecting);
  ps::VariableOptions options;
  options.elements = settings.dense;
  options.consistency = ps::Consistency::async();
  ps::Variable variable = client.variable("dense", options);
  std::vector<float> gradients(static_cast<std::size_t>(settings.dense), 1e-3F), values(gradients.size());
  std::vector<double> times;
  const auto begin = Clock::now();
  // As often by all of them: the first says whether to go on, by a value that all read.
  ps::TableOptions of_flag;
  of_flag.dim = 1;
  of_flag.optimizer = ps::optim::Sgd{.lr = 1};
  of_flag.consistency = ps::Consistency::async();
  ps::Table flag = client.table("stop", of_flag);
  const std::vector<std::uint64_t> key{0};
  std::vector<float> stop(1, 0);
  while (stop[0] == 0) {
    client.barrier();
    const auto one = Clock::now();
    variable.push_pull(gradients, values).wait();
    client.barrier();
    times.push_back(seconds_since(one));
    const std::vector<float> over(1, -1);
    if (connecting.worker == 0 && seconds_since(begin) > settings.seconds) flag.push(key, over).wait();
    client.barrier();
    flag.pull(key, stop).wait();
  }
  if (connecting.worker != 0) return;
  times.erase(times.begin());  // the memory's first touch
  const double ms = times.empty() ? 0 : at(times, 0.5) * 1e3;
  if (settings.json) {
    std::printf("{\"dense_ms\": %.3f}\n", ms);
  } else {
    std::printf("%s, %lld floats by each of %d workers to %d servers and back: %.1f ms\n", settings.where.c_str(),
                static_cast<long long>(settings.dense), settings.workers, settings.servers, ms);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Times a parameter server.");
  app.add_option("--where", settings.where)->check(CLI::IsMember({"table", "shared", "unix", "tcp"}));
  app.add_option("--rows", settings.rows)->check(CLI::PositiveNumber);
  app.add_option("--dim", settings.dim)->check(CLI::Range(1, 65536));
  app.add_option("--batch", settings.batch)->check(CLI::Range(1, 1'000'000));
  app.add_option("--under-way", settings.under_way)->check(CLI::Range(1, 64));
  app.add_option("--workers", settings.workers)->check(CLI::Range(1, 64));
  app.add_option("--servers", settings.servers, "with --dense")->check(CLI::Range(1, 64));
  app.add_option("--dense", settings.dense)->check(CLI::PositiveNumber);
  app.add_flag("--json", settings.json);
  app.add_option("--seconds", settings.seconds)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  const std::string secret_file = "ps_bench-" + std::to_string(::getpid()) + ".secret";
  try {
    if (settings.where == "table") {
      settings.workers = 1;
      InProcess table(settings);
      run(settings, table, 0, 0);
      return 0;
    }
    const std::string secret = settings.where == "tcp" ? secret_file : std::string();
    if (!secret.empty()) value_or_throw(net::write_new_secret_file(secret));
    std::deque<Server> servers;
    ps::ClientOptions connecting;
    connecting.secret_file = secret;
    connecting.workers = settings.workers;
    for (int i = 0; i < (settings.dense > 0 ? settings.servers : 1); ++i)
      connecting.servers.push_back(servers.emplace_back(settings, secret).endpoint());
    std::vector<pid_t> others;
    for (int i = 1; i < settings.workers && connecting.worker == 0; ++i) {
      const pid_t process = ::fork();
      if (process == 0) connecting.worker = i;
      if (process > 0) others.push_back(process);
    }
    if (settings.dense > 0) {
      run_dense(settings, connecting);
    } else {
      Served served(settings, connecting);
      run(settings, served, servers.front().process(), connecting.worker);
    }
    if (connecting.worker != 0) ::_exit(0);
    for (const pid_t process : others) ::waitpid(process, nullptr, 0);
    while (!servers.empty()) servers.pop_back();  // the later ones hold the earlier ones' pipes
    ::unlink(secret_file.c_str());
  } catch (const std::exception& error) {
    ::unlink(secret_file.c_str());
    std::fprintf(stderr, "ps_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
