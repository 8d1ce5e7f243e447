#include "base/files.h"
#include "base/log.h"
#include "base/result.h"
#include "base/thread.h"
#include "ps/client_impl.h"
#include "ps/optimizer.h"
#include "ps/server_map.h"
#include "ps/snapshot.h"
#include "rendezvous/identity.h"
#include "train/formats/checkpoint_folder.h"

#include <cohort/ps.h>
#include <cohort/role.h>
#include <cohort/servers.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

namespace cohort::ps {
namespace {

constexpr std::int64_t kPieceFloats = 16384;  // floats in one row of a dense variable
constexpr std::int64_t kMostAhead = 16;       // clocks
constexpr std::chrono::milliseconds kFarewell(2000);
constexpr std::chrono::milliseconds kKeptAlive(500);

}  // namespace

void Client::Impl::keep() {
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

Client::Impl::~Impl() {
  if (keeper.joinable() && ::getpid() != process) keeper.detach();  // a forked child does not have the thread
  stop_keeping();
}

void Client::Impl::demand_here(const char* what) const {
  if (left)
    raise(ErrorCode::InvalidArgument, "{}: worker {} has left the servers -- connect anew", what, options.worker);
}

void Client::Impl::demand_one_rate(const Table::Impl& table, std::optional<double> lr) {
  if (table.options.consistency.mode != Mode::Sync) return;
  const double own = std::visit([](const auto& rule) { return rule.lr; }, table.options.optimizer);
  const std::pair<std::int64_t, double> now(clock, lr.value_or(own));
  const std::lock_guard lock(rates_mutex);
  const auto [at, fresh] = rates.emplace(table.numbers.front(), now);
  if (!fresh && at->second.first == now.first && at->second.second != now.second) {
    raise(ErrorCode::InvalidArgument,
          "push to table \"{}\": a learning rate of {}, and a push before it in clock {} said {} -- with Sync a clock "
          "has "
          "one step of each row: end the clock in between, or give rows of another rate a table of their own",
          table.name, now.second, now.first, at->second.second);
  }
  at->second = now;
}

void Client::Impl::stop_keeping() {
  if (!keeper.joinable()) return;
  {
    const std::lock_guard lock(mutex);
    stopped = true;
  }
  stopping.notify_all();
  keeper.join();
}

void Client::Impl::wait_for_slower() {
  const std::int64_t waits_for = clock - most_ahead;
  if (most_ahead == 0 || waits_for < ended_by_all) return;
  Link& first = links.front();
  const Heard heard = first.finish(first.send(Method::Await, pack(Await{waits_for, first.patience_ms()})));
  ended_by_all = value_or_throw(codec::decode<Ended>(heard.payload())).clocks;
}

void Client::Impl::ask_all(const std::function<Link::RequestPtr(std::size_t)>& ask, const Take& take) {
  std::vector<Link::RequestPtr> asked;
  for (std::size_t server = 0; server < links.size(); ++server) asked.push_back(ask(server));
  std::optional<Error> failed;
  for (std::size_t server = 0; server < links.size(); ++server) {
    try {
      const Heard heard = links[server].finish(asked[server]);
      if (take) take(server, heard);
    } catch (const Error& error) {
      if (!failed) failed = error;
    }
  }
  if (failed) throw *failed;
}

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
  hello.host = rendezvous::host_identity().name;
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
  impl->change_all(Method::Start, [&](const Order& order) { return pack(Start{order, impl->clock}); });
  impl->keeper = sys::start_without_signals([raw = impl.get()] { raw->keep(); });
  return Client(std::move(impl));
}

Client::~Client() {
  if (!impl_ || impl_->left || ::getpid() != impl_->process) return;
  const bool reported = std::ranges::any_of(impl_->links, &Link::has_reported);
  try {
    for (Link& link : impl_->links) link.hurry(kFarewell);
    leave();
  } catch (const std::exception& error) {
    if (!reported) log::warn("ps", "worker {} leaves: {}", impl_->options.worker, error.what());
  }
}

int Client::worker() const noexcept { return impl_->options.worker; }
int Client::workers() const noexcept { return impl_->options.workers; }
std::int64_t Client::now() const noexcept { return impl_->clock; }

namespace {

std::shared_ptr<Table::Impl> open(const std::shared_ptr<Client::Impl>& client, std::string_view name,
                                  const TableOptions& options, std::int64_t elements) {
  client->demand_here(elements == 0 ? "table" : "variable");
  if (auto ok = check(options); !ok) raise(ErrorCode::InvalidArgument, "table \"{}\": {}", name, ok.error().what());
  auto table = std::make_shared<Table::Impl>();
  table->client = client;
  table->name = name;
  table->options = options;
  table->elements = elements;
  client->change_all(
      Method::Open,
      [&](const Order& order) {
        return pack(Open{order, std::string(name), options, elements});
      },
      [&](std::size_t, const Heard& heard) {
        table->numbers.push_back(value_or_throw(codec::decode<Opened>(heard.payload())).table);
      });
  if (options.consistency.mode != Mode::Async)
    client->most_ahead = std::max({client->most_ahead.load(), kMostAhead, options.consistency.staleness + 1});
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
  rows.dim = std::min(options.elements, kPieceFloats);
  rows.initializer = Initializer::constant(options.initial);
  rows.optimizer = options.optimizer;
  rows.consistency = options.consistency;
  return Variable(Table(open(impl_, name, rows, options.elements)), options.elements);
}

std::int64_t Client::clock() {
  impl_->demand_here("clock");
  impl_->wait_for_slower();
  for (Link& link : impl_->links) link.drain();
  // Throws before any server ends the clock if one of them may lack pushes.
  for (Link& link : impl_->links) link.demand_alive();
  impl_->change_all(Method::Commit, [&](const Order& order) { return pack(Commit{order, impl_->clock}); });
  return ++impl_->clock;
}

void Client::barrier() {
  impl_->demand_here("barrier");
  Link& link = impl_->links.front();
  // After an error, the next call tries the same barrier again.
  link.finish(link.send(Method::Barrier, pack(Barrier{impl_->barrier + 1, link.patience_ms()})));
  ++impl_->barrier;
}

std::string Client::snapshot(const std::string& folder, const SnapshotOptions& options) {
  impl_->demand_here("snapshot");
  if (options.keep < 0) raise(ErrorCode::InvalidArgument, "snapshot: keep is {} -- from 0 on", options.keep);
  auto writer = value_or_throw(formats::CheckpointWriter::open(std::filesystem::absolute(folder).string()));
  formats::Manifest manifest;
  manifest.generation = writer.newest() + 1;
  manifest.step = impl_->clock;
  manifest.created = formats::utc_now();
  manifest.program = "cohort parameter servers";
  manifest.world_size = impl_->options.workers;
  manifest.place = "shared";
  value_or_throw(writer.begin(manifest.generation, manifest.step));
  const auto servers = static_cast<std::uint32_t>(impl_->links.size());
  const auto ask = [&](std::size_t i) {
    Link& link = impl_->links[i];
    return link.send(Method::Snapshot,
                     pack(Snapshot{writer.hidden(), snapshot_file(static_cast<std::uint32_t>(i), servers),
                                   manifest.step, link.patience_ms()}));
  };
  impl_->ask_all(ask, [&](std::size_t i, const Heard& heard) {
    auto written = value_or_throw(codec::decode<Written>(heard.payload()));
    if (!is_snapshot_file(written.file))
      raise(ErrorCode::Corrupt, "{} has written a snapshot to \"{}\"", impl_->links[i].name(), written.file);
    manifest.files[written.file] = {written.bytes, std::move(written.sha256), std::move(written.crc32)};
  });
  // Removes files begun by processes that no longer serve their rows.
  for (const std::string& name : value_or_throw(sys::list_folder(writer.hidden()))) {
    std::error_code none;
    if (manifest.files.count(name) == 0) std::filesystem::remove(std::filesystem::path(writer.hidden()) / name, none);
  }
  value_or_throw(writer.seal(manifest, [](const std::string&) { return true; }));
  const std::string made = value_or_throw(writer.publish()).folder;
  if (options.keep > 0) formats::keep_newest_checkpoints(std::filesystem::absolute(folder).string(), options.keep);
  return made;
}

namespace {

/// Reads the whole snapshot before any server takes a row, since half a snapshot is useless. Skips a damaged snapshot
/// with a warning. Does not skip one that cannot be checked: an older one would silently replace it.
const formats::StoredCheckpoint& newest_undamaged(const formats::CheckpointList& list) {
  for (const Error& error : list.damaged)
    log::warn("ps", "{}: the snapshot before is taken, if there is one", error.what());
  std::optional<Error> damaged;
  for (auto at = list.sound.rbegin(); at != list.sound.rend(); ++at) {
    if (const auto unjudged = list.unjudged_above(at->manifest.generation)) throw *unjudged;
    const auto whole = formats::check_checkpoint_files(*at);
    if (whole) return *at;
    if (whole.error().code() != ErrorCode::Corrupt) throw whole.error();
    log::warn("ps", "{}: the snapshot before is taken, if there is one", whole.error().what());
    if (!damaged) damaged = whole.error();
  }
  throw *damaged;
}

}  // namespace

std::int64_t Client::restore(const std::string& folder) {
  impl_->demand_here("restore");
  const auto list = value_or_throw(formats::list_checkpoints(std::filesystem::absolute(folder).string()));
  if (list.sound.empty()) {
    if (const auto unjudged = list.unjudged_above(0)) throw *unjudged;
    raise(ErrorCode::Unavailable, "restore from {}: there is no whole snapshot{}", folder,
          list.damaged.empty() ? std::string() : std::string(": ") + list.damaged.back().what());
  }
  const formats::StoredCheckpoint& newest = newest_undamaged(list);
  impl_->change_all(Method::Restore, [&](const Order& order) { return pack(Restore{order, newest.folder}); });
  return newest.manifest.step;
}

void Client::leave() {
  if (impl_->left.exchange(true)) return;
  for (Link& link : impl_->links) link.drain();
  impl_->stop_keeping();
  std::optional<Error> failed;
  for (Link& link : impl_->links) {  // each server gets the message, even if others fail
    try {
      link.finish(link.send_change(Method::Leave, [](const Order& order) { return pack(Leave{order}); }));
    } catch (const Error& error) {
      if (!failed) failed = error;
    }
  }
  if (failed) throw *failed;
}

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
  impl_->client->demand_here("stats");
  TableStats stats;
  const auto ask = [this](std::size_t i) {
    return impl_->client->links[i].send(Method::Stats, pack(Stats{impl_->numbers[i]}));
  };
  impl_->client->ask_all(ask, [&stats](std::size_t, const Heard& heard) {
    const TableCounts counts = value_or_throw(codec::decode<TableCounts>(heard.payload()));
    stats.rows += counts.rows;
    stats.bytes += counts.bytes;
    stats.created += counts.created;
    stats.evicted += counts.evicted;
    stats.dropped += counts.dropped;
    stats.steps += counts.steps;
    stats.rows_of_servers.push_back(counts.rows);
  });
  return stats;
}

// ---- Variable ----

namespace {

void demand_elements(const char* what, const std::string& name, std::size_t given, std::int64_t elements) {
  if (given == static_cast<std::size_t>(elements)) return;
  raise(ErrorCode::InvalidArgument, "{} of variable \"{}\": it has {} elements, and these are {}", what, name, elements,
        given);
}

}  // namespace

Variable::Variable(Table table, std::int64_t elements) : table_(std::move(table)), elements_(elements) {}
std::int64_t Variable::elements() const noexcept { return elements_; }

Work Variable::pull(std::span<float> values) {
  demand_elements("pull", table_.impl_->name, values.size(), elements_);
  Requests requests(*table_.impl_);
  requests.pull_pieces(values);
  return requests.take();
}

Work Variable::push(std::span<const float> gradients, const PushOptions& options) {
  demand_elements("push", table_.impl_->name, gradients.size(), elements_);
  Requests requests(*table_.impl_);
  requests.push_pieces(gradients, options.lr);
  return requests.take();
}

Work Variable::push_pull(std::span<const float> gradients, std::span<float> values, const PushOptions& options) {
  demand_elements("push_pull", table_.impl_->name, gradients.size(), elements_);
  demand_elements("push_pull", table_.impl_->name, values.size(), elements_);
  Requests requests(*table_.impl_);
  requests.push_pieces(gradients, options.lr);
  requests.pull_pieces(values);
  return requests.take();
}

Work Variable::assign(std::span<const float> values) {
  demand_elements("assign", table_.impl_->name, values.size(), elements_);
  Requests requests(*table_.impl_);
  requests.assign_pieces(values);
  return requests.take();
}

}  // namespace cohort::ps
