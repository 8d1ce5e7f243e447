#include "base/log.h"
#include "cluster/host_identity.h"
#include "formats/checkpoint_folder.h"
#include "ps/keyed_sum.h"
#include "ps/link.h"
#include "ps/optimizer.h"
#include "ps/place.h"
#include "ps/placement.h"
#include "ps/snapshot.h"
#include "ps/sparse_table.h"
#include "sys/thread.h"

#include <cohort/ps.h>
#include <cohort/role.h>
#include <cohort/servers.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <random>
#include <shared_mutex>
#include <thread>
#include <utility>

namespace cohort::ps {
namespace {

// Bytes of a message: several are under way, and in shared memory they fill whole blocks (net/shared_calls.h). A server
// makes a change as a whole or not at all.
constexpr std::size_t kRead = std::size_t{250} << 10;
constexpr std::size_t kChange = std::size_t{1000} << 10;
constexpr std::int64_t kPiece = 16384;  // floats of a dense variable's row
constexpr std::chrono::milliseconds kFarewell(2000);
constexpr std::chrono::milliseconds kKeptAlive(500);

}  // namespace

struct Client::Impl {
  ClientOptions options;
  Placement placement;
  std::deque<Link> links;
  std::atomic<std::int64_t> clock{0};
  std::uint64_t barrier = 0;
  bool left = false;

  // With backup workers. A clock ends first at the first server, then at the others: pushes wait for that, so that all
  // servers take them for the same clock's.
  std::shared_mutex ending;
  std::atomic<bool> has_backup_workers{false};
  bool proposed = false;  // under the mutex: the first server knows that the clock has ended, and the others do not
  std::atomic<std::int64_t> late{0};

  void begin_with_backup_workers();
  std::int64_t end_clock_with_backup_workers();
  Concluded await(std::int64_t clock_ended);
  void conclude(std::size_t first_link, std::int64_t next, const Quorum& quorum);

  // Connections that break while nobody asks anything are made again, since servers take who is not connected for lost.
  std::mutex mutex;
  std::condition_variable stopping;
  bool stopped = false;
  std::thread keeper;
  pid_t process = ::getpid();

  void keep() {
    std::unique_lock lock(mutex);
    while (!stopping.wait_for(lock, kKeptAlive, [this] { return stopped; })) {
      lock.unlock();
      for (Link& link : links) {
        link.keep_alive();
        link.look_around();
      }
      lock.lock();
    }
  }
  ~Impl() {
    if (keeper.joinable() && ::getpid() != process) keeper.detach();  // a forked child has no such thread
    stop_keeping();
  }
  /// Servers end when all workers have left: connections that they close then are not to be made again.
  void stop_keeping() {
    if (!keeper.joinable()) return;
    {
      const std::lock_guard lock(mutex);
      stopped = true;
    }
    stopping.notify_all();
    keeper.join();
  }
};

Concluded Client::Impl::await(std::int64_t clock_ended) {
  Link& decides = links.front();
  const Heard heard = decides.finish(decides.send(Method::Await, pack(Await{clock_ended, decides.patience_ms()})));
  return value_or_throw(codec::decode<Concluded>(heard.payload()));
}

void Client::Impl::conclude(std::size_t first_link, std::int64_t next, const Quorum& quorum) {
  std::vector<Link::RequestPtr> told;
  for (std::size_t i = first_link; i < links.size(); ++i) {
    told.push_back(links[i].send_change(Method::Conclude, [&](const Order& order) {
      return pack(Conclude{order, next, quorum});
    }));
  }
  for (std::size_t i = 0; i < told.size(); ++i) links[first_link + i].finish(told[i]);
  clock = next;
}

/// After the first table has been opened: the others may be at work, and clocks have ended since it has come.
void Client::Impl::begin_with_backup_workers() {
  const std::unique_lock lock(ending);
  if (has_backup_workers) return;
  const Quorum quorum = await(-1).quorum;
  conclude(0, quorum.clocks, quorum);
  has_backup_workers = true;
}

std::int64_t Client::Impl::end_clock_with_backup_workers() {
  const std::unique_lock lock(ending);
  for (Link& link : links) link.drain();
  if (!proposed) {
    Link& decides = links.front();
    const auto told = decides.send_change(Method::Propose, [&](const Order& order) {
      return pack(Commit{order, clock});
    });
    proposed = true;
    decides.finish(told);
  }
  const Concluded ended = await(clock);
  conclude(1, ended.clock, ended.quorum);
  proposed = false;
  if (ended.late) ++late;
  return clock;
}

struct Table::Impl {
  std::shared_ptr<Client::Impl> client;
  std::string name;
  TableOptions options;
  std::int64_t elements = 0;
  std::vector<std::uint32_t> numbers;  // the table's, on each server
  std::mutex mutex;
  KeyedSum sum;  // under the mutex

  std::size_t dim() const noexcept { return static_cast<std::size_t>(options.dim); }
  std::uint32_t server_of(std::uint64_t key) const noexcept {
    return client->placement.server_of_row(key, elements, options.dim);
  }
};

namespace {

/// Some of the keys of a call: those of one server, in one message.
struct Part {
  std::uint32_t server;
  std::vector<std::uint32_t> places;  // of unique keys
};

/// Keys without duplicates by server, in messages of bounded size.
std::vector<Part> parts_of(const std::vector<std::uint64_t>& unique, std::size_t row_bytes, std::size_t bytes,
                           const std::function<std::uint32_t(std::uint64_t)>& server_of, std::size_t servers) {
  const std::size_t most = std::clamp<std::size_t>(bytes / (row_bytes + sizeof(std::uint64_t)), 1, kMostKeys);
  std::vector<Part> parts;
  std::vector<std::size_t> open(servers, ~std::size_t{0});
  for (std::uint32_t place = 0; place < unique.size(); ++place) {
    const std::uint32_t server = server_of(unique[place]);
    std::size_t& at = open[server];
    if (at == ~std::size_t{0} || parts[at].places.size() == most) {
      at = parts.size();
      parts.push_back({server, {}});
      parts.back().places.reserve(std::min(most, unique.size() / servers + 16));
    }
    parts[at].places.push_back(place);
  }
  return parts;
}

void append_keys(std::string& body, const Part& part, const std::vector<std::uint64_t>& unique) {
  const std::size_t at = body.size();
  body.resize(at + part.places.size() * sizeof(std::uint64_t));
  char* to = body.data() + at;
  for (const std::uint32_t place : part.places) {
    std::memcpy(to, &unique[place], sizeof(std::uint64_t));
    to += sizeof(std::uint64_t);
  }
}

}  // namespace

struct Work::State {
  struct Sent {
    Link* link;
    Link::RequestPtr request;
    std::vector<std::uint32_t> places = {};  // of the rows that it reads, among the unique keys
    bool reads = false;
  };

  std::shared_ptr<Client::Impl> client;
  std::int64_t clock = 0;
  std::vector<Sent> sent = {};
  std::vector<std::uint32_t> unique_of = {};  // of each input
  std::vector<std::uint32_t> first_of = {};   // input of each unique key
  std::span<float> rows = {};
  std::size_t dim = 0;
  std::vector<float> padded = {};  // of a variable whose last piece is not full: `rows` is here
  std::span<float> values = {};
  bool finished = false;
  Pulled pulled = {};
  std::optional<Error> failed = {};

  void finish() {
    if (finished) return;
    finished = true;
    std::optional<std::int64_t> least;
    for (const Sent& one : sent) {
      try {
        const Heard answer = one.link->finish(one.request);
        if (!one.reads) continue;
        least = std::min(least.value_or(answer.answer.clock), answer.answer.clock);
        pulled.version += answer.answer.version;
        take_rows(one, answer.payload());
      } catch (const Error& error) {
        if (!failed) failed = error;
      }
    }
    if (failed) return;
    pulled.clock = least.value_or(clock);
    pulled.behind = std::max<std::int64_t>(0, clock - pulled.clock);
    if (first_of.size() < unique_of.size()) {  // keys that stand several times
      for (std::size_t i = 0; i < unique_of.size(); ++i) {
        const std::size_t first = first_of[unique_of[i]];
        if (first != i) std::memcpy(rows.data() + i * dim, rows.data() + first * dim, dim * sizeof(float));
      }
    }
    if (!padded.empty()) std::copy_n(padded.begin(), values.size(), values.begin());
  }

  void take_rows(const Sent& one, std::string_view payload) const {
    const std::size_t bytes = dim * sizeof(float);
    if (payload.size() != one.places.size() * bytes)
      raise(ErrorCode::Corrupt, "{} sent {} bytes for {} rows", one.link->name(), payload.size(), one.places.size());
    const char* from = payload.data();
    for (const std::uint32_t place : one.places) {
      std::memcpy(rows.data() + first_of[place] * dim, from, bytes);
      from += bytes;
    }
  }
};

Work::Work(std::unique_ptr<State> state) : state_(std::move(state)) {}
Work::Work(Work&&) noexcept = default;
Work::~Work() {
  if (!state_ || state_->finished) return;
  try {
    state_->finish();
  } catch (const std::exception& error) {
    log::warn("ps", "a request that nobody waited for: {}", error.what());
    return;
  }
  if (state_->failed) log::warn("ps", "a request that nobody waited for failed: {}", state_->failed->what());
}

Pulled Work::wait() {
  state_->finish();
  if (state_->failed) throw *state_->failed;
  return state_->pulled;
}

namespace {

/// Requests of one call on a table.
class Requests {
 public:
  explicit Requests(Table::Impl& table) : table_(table), state_(std::make_unique<Work::State>()) {
    state_->client = table.client;
    state_->clock = table.client->clock;
    state_->dim = table.dim();
  }

  void pull(std::span<const std::uint64_t> keys, std::span<float> rows) {
    demand_rows("pull", keys.size(), rows.size());
    std::vector<std::uint64_t> unique;
    state_->unique_of.resize(keys.size());
    {
      const std::lock_guard lock(table_.mutex);
      table_.sum.begin(0);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const std::uint32_t place = table_.sum.place_of(keys[i]);
        if (place == state_->first_of.size()) state_->first_of.push_back(static_cast<std::uint32_t>(i));
        state_->unique_of[i] = place;
      }
      unique = table_.sum.keys();
    }
    state_->rows = rows;
    for (Part& part : parts(unique, kRead)) {
      Link& link = table_.client->links[part.server];
      std::string body = pack(Pull{table_.numbers[part.server], static_cast<std::uint32_t>(part.places.size()),
                                   state_->clock, link.patience_ms()},
                              part.places.size() * sizeof(std::uint64_t));
      append_keys(body, part, unique);
      const std::size_t room = part.places.size() * table_.dim() * sizeof(float) + 256;
      state_->sent.push_back({&link, link.send(Method::Pull, std::move(body), room), std::move(part.places), true});
    }
  }

  /// Duplicates are added.
  void push(std::span<const std::uint64_t> keys, std::span<const float> gradients, std::optional<double> lr) {
    demand_rows("push", keys.size(), gradients.size());
    if (lr && !(*lr >= 0 && std::isfinite(*lr))) raise(ErrorCode::InvalidArgument, "push: a learning rate of {}", *lr);
    const std::lock_guard lock(table_.mutex);
    table_.sum.begin(table_.dim());
    for (std::size_t i = 0; i < keys.size(); ++i) table_.sum.add(keys[i], gradients.data() + i * table_.dim());
    const float* sums = table_.sum.sums();
    for (std::size_t at = 0; at < table_.sum.size() * table_.dim(); ++at) {
      if (std::isfinite(sums[at])) continue;
      raise(
          ErrorCode::NonFinite,
          "push to table \"{}\": the gradient of key {} is {} at element {} -- worker {} at clock {}; nothing was sent",
          table_.name, table_.sum.keys()[at / table_.dim()], sums[at], at % table_.dim(), table_.client->options.worker,
          state_->clock);
    }
    change(Method::Push, table_.sum.keys(), sums, lr);
  }

  /// Of duplicates the last one.
  void assign(std::span<const std::uint64_t> keys, std::span<const float> rows) {
    demand_rows("assign", keys.size(), rows.size());
    const std::lock_guard lock(table_.mutex);
    table_.sum.begin(0);
    std::vector<float> last;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::size_t at = table_.sum.place_of(keys[i]) * table_.dim();
      last.resize(std::max(last.size(), at + table_.dim()));
      std::copy_n(rows.data() + i * table_.dim(), table_.dim(), last.data() + at);
    }
    change(Method::Assign, table_.sum.keys(), last.data(), std::nullopt);
  }

  void erase(std::span<const std::uint64_t> keys) {
    const std::lock_guard lock(table_.mutex);
    table_.sum.begin(0);
    for (const std::uint64_t key : keys) table_.sum.place_of(key);
    change(Method::Erase, table_.sum.keys(), nullptr, std::nullopt);
  }

  Work take() { return Work(std::move(state_)); }
  Work::State& state() noexcept { return *state_; }

 private:
  void demand_rows(const char* what, std::size_t keys, std::size_t floats) const {
    if (floats == keys * table_.dim()) return;
    raise(ErrorCode::InvalidArgument, "{} of table \"{}\": {} keys need {} floats, rows of {}, and these are {}", what,
          table_.name, keys, keys * table_.dim(), table_.dim(), floats);
  }

  std::vector<Part> parts(const std::vector<std::uint64_t>& unique, std::size_t bytes) const {
    return parts_of(
        unique, table_.dim() * sizeof(float), bytes, [this](std::uint64_t key) { return table_.server_of(key); },
        table_.client->links.size());
  }

  void change(Method method, const std::vector<std::uint64_t>& unique, const float* rows, std::optional<double> lr) {
    const std::size_t bytes = rows == nullptr ? 0 : table_.dim() * sizeof(float);
    std::shared_lock ending(table_.client->ending, std::defer_lock);
    if (method == Method::Push && table_.client->has_backup_workers) {
      ending.lock();
      if (table_.client->proposed) {
        raise(
            ErrorCode::InvalidArgument,
            "push to table \"{}\": worker {} has not heard yet whether clock {} has ended -- call `clock` again first",
            table_.name, table_.client->options.worker, state_->clock);
      }
    }
    for (const Part& part : parts(unique, kChange)) {
      Link& link = table_.client->links[part.server];
      const std::size_t count = part.places.size();
      const auto build = [&](const Order& order) {
        std::string body = pack(Change{order, table_.numbers[part.server], static_cast<std::uint32_t>(count), lr},
                                count * (sizeof(std::uint64_t) + bytes));
        append_keys(body, part, unique);
        for (const std::uint32_t place : part.places)
          body.append(reinterpret_cast<const char*>(rows) + place * bytes, bytes);
        return body;
      };
      state_->sent.push_back({&link, link.send_change(method, build)});
    }
  }

  Table::Impl& table_;
  std::unique_ptr<Work::State> state_;
};

}  // namespace

// ---- Table ----

Table::Table(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
const TableOptions& Table::options() const noexcept { return impl_->options; }

Work Table::pull(std::span<const std::uint64_t> keys, std::span<float> rows) {
  Requests requests(*impl_);
  requests.pull(keys, rows);
  return requests.take();
}

Work Table::push(std::span<const std::uint64_t> keys, std::span<const float> gradients, const PushOptions& options) {
  Requests requests(*impl_);
  requests.push(keys, gradients, options.lr);
  return requests.take();
}

Work Table::push_pull(std::span<const std::uint64_t> keys, std::span<const float> gradients, std::span<float> rows,
                      const PushOptions& options) {
  Requests requests(*impl_);
  requests.push(keys, gradients, options.lr);
  requests.pull(keys, rows);
  return requests.take();
}

Work Table::assign(std::span<const std::uint64_t> keys, std::span<const float> rows) {
  Requests requests(*impl_);
  requests.assign(keys, rows);
  return requests.take();
}

Work Table::erase(std::span<const std::uint64_t> keys) {
  Requests requests(*impl_);
  requests.erase(keys);
  return requests.take();
}

TableStats Table::stats() {
  std::vector<Link::RequestPtr> asked;
  for (std::size_t i = 0; i < impl_->numbers.size(); ++i)
    asked.push_back(impl_->client->links[i].send(Method::Stats, pack(Stats{impl_->numbers[i]})));
  TableStats stats;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const Heard heard = impl_->client->links[i].finish(asked[i]);
    const TableCounts counts = value_or_throw(codec::decode<TableCounts>(heard.payload()));
    stats.rows += counts.rows;
    stats.bytes += counts.bytes;
    stats.created += counts.created;
    stats.evicted += counts.evicted;
    stats.dropped += counts.dropped;
    stats.steps += counts.steps;
    stats.rows_of_servers.push_back(counts.rows);
  }
  return stats;
}

// ---- Variable ----

namespace {

std::vector<std::uint64_t> pieces(std::int64_t elements, std::int64_t dim) {
  std::vector<std::uint64_t> keys(static_cast<std::size_t>((elements + dim - 1) / dim));
  std::iota(keys.begin(), keys.end(), std::uint64_t{0});
  return keys;
}

}  // namespace

Variable::Variable(Table table, std::int64_t elements) : table_(std::move(table)), elements_(elements) {}
std::int64_t Variable::elements() const noexcept { return elements_; }

namespace {

void demand_elements(const char* what, const std::string& name, std::size_t given, std::int64_t elements) {
  if (given == static_cast<std::size_t>(elements)) return;
  raise(ErrorCode::InvalidArgument, "{} of variable \"{}\": it has {} elements, and these are {}", what, name, elements,
        given);
}

/// Filled up with zeros to whole pieces.
std::vector<float> whole(std::span<const float> values, std::size_t floats) {
  std::vector<float> padded(floats);
  std::copy(values.begin(), values.end(), padded.begin());
  return padded;
}

}  // namespace

Work Variable::pull(std::span<float> values) {
  demand_elements("pull", table_.impl_->name, values.size(), elements_);
  const auto keys = pieces(elements_, table_.impl_->options.dim);
  Requests requests(*table_.impl_);
  Work::State& state = requests.state();
  state.padded.resize(keys.size() * table_.impl_->dim());
  state.values = values;
  requests.pull(keys, state.padded);
  return requests.take();
}

Work Variable::push(std::span<const float> gradients, const PushOptions& options) {
  demand_elements("push", table_.impl_->name, gradients.size(), elements_);
  const auto keys = pieces(elements_, table_.impl_->options.dim);
  return table_.push(keys, whole(gradients, keys.size() * table_.impl_->dim()), options);
}

Work Variable::push_pull(std::span<const float> gradients, std::span<float> values, const PushOptions& options) {
  demand_elements("push_pull", table_.impl_->name, gradients.size(), elements_);
  demand_elements("push_pull", table_.impl_->name, values.size(), elements_);
  const auto keys = pieces(elements_, table_.impl_->options.dim);
  Requests requests(*table_.impl_);
  Work::State& state = requests.state();
  state.padded.resize(keys.size() * table_.impl_->dim());
  state.values = values;
  requests.push(keys, whole(gradients, state.padded.size()), options.lr);
  requests.pull(keys, state.padded);
  return requests.take();
}

Work Variable::assign(std::span<const float> values) {
  demand_elements("assign", table_.impl_->name, values.size(), elements_);
  const auto keys = pieces(elements_, table_.impl_->options.dim);
  return table_.assign(keys, whole(values, keys.size() * table_.impl_->dim()));
}

// ---- Client ----

Client::Client(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::Client(Client&&) noexcept = default;

Client Client::connect(ClientOptions options) {
  const auto deadline = net::deadline_in(options.connect_timeout);
  if (options.servers.empty()) {
    options.servers = server_addresses(options.connect_timeout);
    if (options.servers.empty()) {
      raise(ErrorCode::InvalidArgument,
            "connect: this job has no servers -- start it by `cohort run --servers N`, or name them");
    }
    options.worker = role_number();
    options.workers = num_workers();
  }
  if (options.workers < 1 || options.worker < 0 || options.worker >= options.workers ||
      static_cast<std::uint32_t>(options.workers) > kMostWorkers)
    raise(ErrorCode::InvalidArgument, "worker {} of {} has no meaning", options.worker, options.workers);
  if (options.timeout <= std::chrono::milliseconds(0) || options.timeout > std::chrono::hours(24))
    raise(ErrorCode::InvalidArgument, "a timeout of {} ms -- above 0, and at most a day", options.timeout.count());
  auto impl = std::make_shared<Impl>();
  impl->options = options;
  impl->placement = Placement::even(static_cast<std::uint32_t>(options.servers.size()));
  std::random_device random;
  Hello hello;
  hello.worker = static_cast<std::uint32_t>(options.worker);
  hello.workers = static_cast<std::uint32_t>(options.workers);
  hello.nonce = std::uint64_t{random()} << 32 | random();
  hello.placement = impl->placement.version();
  hello.servers = options.servers;
  hello.host = cluster::host_identity().name;
  for (const std::string& endpoint : options.servers) {
    (void)value_or_throw(place_of(endpoint, options.secret_file));
    impl->links.emplace_back(hello, options.secret_file, options.timeout);
    ++hello.server;
  }
  std::uint64_t incarnation = 0;
  for (Link& link : impl->links) incarnation = std::max(incarnation, link.ask(deadline).incarnation);
  for (Link& link : impl->links) {
    const Welcome welcome = link.come(incarnation + 1, deadline);
    impl->clock = std::max(impl->clock.load(), welcome.clock);
    impl->barrier = std::max(impl->barrier, welcome.barrier);
  }
  for (Link& link : impl->links) {
    link.finish(link.send_change(Method::Start, [&](const Order& order) { return pack(Start{order, impl->clock}); }));
  }
  impl->keeper = sys::start_without_signals([raw = impl.get()] { raw->keep(); });
  return Client(std::move(impl));
}

Client::~Client() {
  if (!impl_ || impl_->left || ::getpid() != impl_->process) return;
  try {
    for (Link& link : impl_->links) link.hurry(kFarewell);
    leave();
  } catch (const std::exception& error) {
    log::warn("ps", "worker {} leaves: {}", impl_->options.worker, error.what());
  }
}

int Client::worker() const noexcept { return impl_->options.worker; }
int Client::workers() const noexcept { return impl_->options.workers; }
std::int64_t Client::now() const noexcept { return impl_->clock; }
std::int64_t Client::late_clocks() const noexcept { return impl_->late; }

namespace {

std::shared_ptr<Table::Impl> open(const std::shared_ptr<Client::Impl>& client, std::string_view name,
                                  const TableOptions& options, std::int64_t elements) {
  if (auto ok = check(options); !ok) raise(ErrorCode::InvalidArgument, "table \"{}\": {}", name, ok.error().what());
  auto table = std::make_shared<Table::Impl>();
  table->client = client;
  table->name = name;
  table->options = options;
  table->elements = elements;
  std::vector<Link::RequestPtr> asked;
  for (Link& link : client->links) {
    asked.push_back(link.send_change(Method::Open, [&](const Order& order) {
      return pack(Open{order, std::string(name), options, elements});
    }));
  }
  std::optional<Error> failed;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    try {
      const Heard heard = client->links[i].finish(asked[i]);
      table->numbers.push_back(value_or_throw(codec::decode<Opened>(heard.payload())).table);
    } catch (const Error& error) {
      if (!failed) failed = error;
    }
  }
  if (failed) throw *failed;
  if (options.consistency.backup_workers > 0) client->begin_with_backup_workers();
  return table;
}

}  // namespace

Table Client::table(std::string_view name, const TableOptions& options) { return Table(open(impl_, name, options, 0)); }

Variable Client::variable(std::string_view name, const VariableOptions& options) {
  if (options.elements < 1)
    raise(ErrorCode::InvalidArgument, "variable \"{}\": {} elements -- at least one", name, options.elements);
  if (std::holds_alternative<optim::RowAdagrad>(options.optimizer))
    raise(ErrorCode::InvalidArgument, "variable \"{}\": RowAdagrad is for rows -- Adagrad is the same by element",
          name);
  TableOptions rows;
  rows.dim = std::min(options.elements, kPiece);
  rows.initializer = Initializer::constant(options.initial);
  rows.optimizer = options.optimizer;
  rows.consistency = options.consistency;
  return Variable(Table(open(impl_, name, rows, options.elements)), options.elements);
}

std::int64_t Client::clock() {
  if (impl_->has_backup_workers) return impl_->end_clock_with_backup_workers();
  for (Link& link : impl_->links) link.drain();
  std::vector<Link::RequestPtr> told;
  for (Link& link : impl_->links) {
    told.push_back(link.send_change(Method::Commit, [&](const Order& order) {
      return pack(Commit{order, impl_->clock});
    }));
  }
  for (std::size_t i = 0; i < told.size(); ++i) impl_->links[i].finish(told[i]);
  return ++impl_->clock;
}

void Client::barrier() {
  Link& link = impl_->links.front();
  link.finish(link.send(Method::Barrier, pack(Barrier{++impl_->barrier, link.patience_ms()})));
}

std::string Client::snapshot(const std::string& folder) {
  auto writer = value_or_throw(formats::CheckpointWriter::open(std::filesystem::absolute(folder).string()));
  formats::Manifest manifest;
  manifest.generation = writer.newest() + 1;
  // With backup workers others may have gone on meanwhile.
  manifest.step = impl_->has_backup_workers ? impl_->await(-1).quorum.clocks : impl_->clock.load();
  manifest.created = formats::utc_now();
  manifest.program = "cohort parameter servers";
  manifest.world_size = impl_->options.workers;
  manifest.place = "shared";
  value_or_throw(writer.begin(manifest.generation, manifest.step));
  const auto servers = static_cast<std::uint32_t>(impl_->links.size());
  std::vector<Link::RequestPtr> asked;
  for (std::uint32_t i = 0; i < servers; ++i) {
    Link& link = impl_->links[i];
    asked.push_back(link.send(Method::Snapshot, pack(Snapshot{writer.hidden(), snapshot_file(i, servers), manifest.step,
                                                              link.patience_ms()})));
  }
  for (std::uint32_t i = 0; i < servers; ++i) {
    const Heard heard = impl_->links[i].finish(asked[i]);
    auto written = value_or_throw(codec::decode<Written>(heard.payload()));
    if (!is_snapshot_file(written.file))
      raise(ErrorCode::Corrupt, "{} has written a snapshot to \"{}\"", impl_->links[i].name(), written.file);
    manifest.files[written.file] = {written.bytes, std::move(written.sha256), std::move(written.crc32)};
  }
  value_or_throw(writer.seal(manifest, [](const std::string&) { return true; }));
  return value_or_throw(writer.publish()).folder;
}

namespace {

/// All of it is read before any server takes a row: half of a snapshot is none. What is damaged is passed over.
const formats::StoredCheckpoint& newest_undamaged(const std::vector<formats::StoredCheckpoint>& sound) {
  std::optional<Error> damaged;
  for (auto at = sound.rbegin(); at != sound.rend(); ++at) {
    const auto whole = formats::check_checkpoint_files(*at);
    if (whole) return *at;
    log::warn("ps", "{}: the snapshot before is taken, if there is one", whole.error().what());
    if (!damaged) damaged = whole.error();
  }
  throw *damaged;
}

}  // namespace

std::int64_t Client::restore(const std::string& folder) {
  const auto list = value_or_throw(formats::list_checkpoints(std::filesystem::absolute(folder).string()));
  if (list.sound.empty()) {
    raise(ErrorCode::Unavailable, "restore from {}: there is no whole snapshot{}", folder,
          list.damaged.empty() ? std::string() : std::string(": ") + list.damaged.back().what());
  }
  const formats::StoredCheckpoint& newest = newest_undamaged(list.sound);
  std::vector<Link::RequestPtr> asked;
  for (Link& link : impl_->links) {
    asked.push_back(link.send_change(Method::Restore, [&](const Order& order) {
      return pack(Restore{order, newest.folder});
    }));
  }
  std::optional<Error> failed;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    try {
      impl_->links[i].finish(asked[i]);
    } catch (const Error& error) {
      if (!failed) failed = error;
    }
  }
  if (failed) throw *failed;
  return newest.manifest.step;
}

void Client::leave() {
  if (std::exchange(impl_->left, true)) return;
  for (Link& link : impl_->links) link.drain();
  impl_->stop_keeping();
  std::optional<Error> failed;
  for (Link& link : impl_->links) {
    try {
      link.finish(link.send_change(Method::Leave, [](const Order& order) { return pack(Leave{order}); }));
    } catch (const Error& error) {
      if (!failed) failed = error;
    }
  }
  if (failed) throw *failed;
}

}  // namespace cohort::ps
