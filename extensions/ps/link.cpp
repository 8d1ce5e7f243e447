#include "ps/client_impl.h"

#include "base/env.h"
#include "base/log.h"
#include "net/socket.h"
#include "ps/server_map.h"
#include "rendezvous/identity.h"
#include "rendezvous/place.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

namespace cohort::ps {
namespace {

using std::chrono::milliseconds;

// Time limits of attempts to reach one process before the others are asked: kTry, doubled each time.
constexpr milliseconds kFirstTry(2000);  // the first limit while it is not known whether there are replicas
constexpr milliseconds kTry(150);
constexpr milliseconds kLongestTry(10'000);
constexpr milliseconds kAsk(200);
constexpr milliseconds kNearer(5000);  // longest time to connect to its Unix name

bool refuses(const std::string& endpoint) {
  const auto socket = net::connect_once(value_or_throw(parse_endpoint(endpoint)), net::deadline_in(kAsk));
  return !socket && socket.error().kind == net::ConnectFailure::Refused;
}

/// Returns the address to which a worker connects, with shared memory allowed.
net::RpcPlace sharing_place_of(const std::string& endpoint, const std::string& secret_file) {
  net::RpcPlace place = value_or_throw(place_of(endpoint, secret_file));
  place.secure.descriptors = true;
  return place;
}

}  // namespace

Route::Route(const Hello& hello, std::string secret_file)
    : servers_(hello.servers),
      rows_(hello.server),
      secret_file_(std::move(secret_file)),
      place_{hello.servers[hello.server], 0} {}

Route::Place Route::place() const {
  const std::lock_guard lock(mutex_);
  return place_;
}

void Route::set(const Place& place) {
  const std::lock_guard lock(mutex_);
  if (place.epoch >= place_.epoch) place_ = place;
}

Route::Met Route::meet(Hello hello, net::Deadline deadline) {
  const bool in_job = env::get(env::kStore).has_value();
  const auto begun = std::chrono::steady_clock::now();
  bool again = false;
  // The last attempt's error reports only that attempt's time.
  const auto give_up = [&](const Error& last) {
    if (!again) throw last;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begun;
    raise(ErrorCode::Timeout, "nobody has served its rows for {:.1f} s; at last {}", waited.count(), last.what());
  };
  for (milliseconds limit = place().epoch > 0 ? kTry : kFirstTry;;
       limit = std::min(2 * limit, kLongestTry), again = true) {
    const Place now = place();
    hello.epoch = now.epoch;
    Met met;
    Place elsewhere;
    std::optional<Error> late;
    // If no process listens there any more, the other servers are asked without an attempt.
    if (now.epoch == 0 || !refuses(now.endpoint)) {
      try {
        met = greet(sharing_place_of(now.endpoint, secret_file_), hello,
                    servers_.size() > 1 || in_job ? std::min(deadline, net::deadline_in(limit)) : deadline, elsewhere);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::Timeout) throw;
        if (net::passed(deadline)) give_up(error);
        late = error;
      }
    }
    if (met.rpc) {
      set({now.endpoint, met.welcome.epoch});
      if (hello.incarnation != 0) share_memory(met, sharing_place_of(now.endpoint, secret_file_), hello, deadline);
      return met;
    }
    if (elsewhere.epoch == 0) elsewhere = ask_others(kAsk);
    if (elsewhere.epoch > 0 && elsewhere.epoch >= now.epoch && elsewhere.endpoint != now.endpoint) {
      set(elsewhere);
      continue;
    }
    if (now.epoch == 0 && in_job) demand_that_it_runs(now.endpoint);
    if (net::passed(deadline)) {
      if (late) give_up(*late);
      raise(ErrorCode::Timeout,
            "nobody serves the rows of parameter server {}: the process at {} does not any more, and no other one says "
            "that it does -- is a server still running?",
            rows_, now.endpoint);
    }
    std::this_thread::sleep_for(milliseconds(10));
  }
}

/// Throws if the server is known to have ended, and no other process has its rows: waiting would be in vain.
void Route::demand_that_it_runs(const std::string& endpoint) const {
  std::optional<std::string> how;
  try {
    how = rendezvous::how_server_ended(static_cast<int>(rows_), endpoint);
  } catch (const Error& error) {
    log::debug("ps", "the job's store: {}", error.what());
  }
  if (!how) return;
  raise(ErrorCode::PeerLost,
        "it has ended ({}), though workers need it -- its program has to go on until all have left, as ps.serve does",
        *how);
}

Route::Met Route::greet(const net::RpcPlace& at, const Hello& hello, net::Deadline deadline, Place& elsewhere) const {
  Met met;
  net::rpc_connect(at, deadline, [&](net::SecureConnection connection, const std::string& peer, net::Deadline limit) {
    auto rpc = std::make_shared<net::RpcClient>(std::move(connection), "parameter", peer);
    const std::string answer = rpc->call(static_cast<std::uint8_t>(Method::Hello), pack(hello), limit);
    const auto opened = value_or_throw(unpack<Answer>(answer));
    if (opened.record.error && !opened.payload.empty()) {  // another process serves the rows, and the answer names it
      const auto located = value_or_throw(codec::decode<Located>(opened.payload));
      elsewhere = {located.endpoint, located.epoch};
      return;
    }
    if (opened.record.error) throw *opened.record.error;
    met = {std::move(rpc), value_or_throw(codec::decode<Welcome>(opened.payload))};
  });
  return met;
}

void Route::share_memory(Met& met, net::RpcPlace place, const Hello& hello, net::Deadline deadline) const {
  const auto none = [this](std::string_view why) { log::debug("ps", "server {}: no shared memory: {}", rows_, why); };
  try {
    const std::string host = rendezvous::host_identity().id;
    auto shared = met.rpc->share_memory(host, deadline);
    if (shared && *shared) {
      place.endpoints = {**shared};
      Place elsewhere;
      Met nearer = greet(place, hello, std::min(deadline, net::deadline_in(kNearer)), elsewhere);
      if (!nearer.rpc) return none("it serves the rows no more");
      met = std::move(nearer);
      shared = met.rpc->share_memory(host, deadline);
    }
    if (!shared) none(shared.error().what());
  } catch (const Error& error) {  // if the connection is broken, the next request notices
    none(error.what());
  }
}

Route::Place Route::ask_others(milliseconds each) const {
  const Place now = place();
  Place newest;
  for (std::uint32_t i = 1; i <= servers_.size(); ++i) {
    const std::string& endpoint = servers_[(rows_ + i) % servers_.size()];
    if (endpoint == now.endpoint) continue;
    if (newest.epoch > now.epoch) break;
    try {
      const auto limit = net::deadline_in(each);
      net::rpc_connect(value_or_throw(place_of(endpoint, secret_file_)), limit,
                       [&](net::SecureConnection connection, const std::string& at, net::Deadline until) {
                         net::RpcClient rpc(std::move(connection), "parameter", at);
                         const std::string answer =
                             rpc.call(static_cast<std::uint8_t>(Method::Locate), pack(Locate{rows_}), until);
                         const auto opened = value_or_throw(unpack<Answer>(answer));
                         if (opened.record.error) throw *opened.record.error;
                         const auto located = value_or_throw(codec::decode<Located>(opened.payload));
                         if (located.epoch > newest.epoch) newest = {located.endpoint, located.epoch};
                       });
    } catch (const Error& error) {
      log::debug("ps", "parameter server at {}: {}", endpoint, error.what());
    }
  }
  return newest;
}

bool Route::has_moved() {
  const Place now = place();
  if (now.epoch == 0) return false;
  const Place newest = ask_others(kAsk);
  return newest.epoch > now.epoch && newest.endpoint != now.endpoint;
}

namespace {

constexpr std::size_t kMostUnderWay = std::size_t{8} << 20;  // more than 100 Gbit/s carry within a round trip of 0.5 ms
constexpr std::size_t kLeastSpare = std::size_t{64} << 10;
constexpr std::size_t kMostSpare = 8;
constexpr std::chrono::milliseconds kLongSilence(
    1000);  // time without an answer, after which look_around checks who serves the rows
constexpr std::size_t kLongestRecord = codec::kLongestError + 1024;  // longest record of an answer
constexpr std::chrono::milliseconds kSlack(2000);  // so that a server's answer, with what it waits for, comes in time

/// Decodes a copy of the record. The payload behind it stays where it is.
Result<Heard> open_answer(net::RpcAnswer whole) {
  const std::string_view body = whole.body();
  codec::Reader in(body);
  const auto size = in.number<std::uint32_t>();
  if (!size) return tl::unexpected(size.error());
  if (*size > kLongestRecord || *size > in.rest().size()) return fail(ErrorCode::Corrupt, "an answer without a record");
  const std::string record(in.rest().substr(0, *size));
  auto answer = codec::decode<Answer>(record);
  if (!answer) return tl::unexpected(answer.error());
  return Heard{*std::move(answer), std::move(whole), sizeof *size + record.size()};
}

}  // namespace

struct Link::Request {
  Method method;
  std::uint64_t sequence;  // number of a change; 0 for other requests
  std::string body;
  std::size_t room;
  net::Deadline deadline;
  std::uint64_t connection = 0;  // number of the connection that has sent it
  std::uint64_t call = 0;
  bool receiving = false;  // a thread waits for its answer
  std::optional<Heard> heard = {};
  std::optional<Error> failed = {};
};

Link::Link(const Hello& hello, const std::string& secret_file, std::chrono::milliseconds timeout)
    : route_(hello, secret_file),
      name_(fmt::format("parameter server {} at {}", hello.server, hello.servers[hello.server])),
      hello_(hello),
      timeout_(timeout) {}
Link::~Link() = default;

Welcome Link::greet(net::Deadline deadline, const Hello& hello) {
  Route::Met met = route_.meet(hello, deadline);
  rpc_ = std::move(met.rpc);
  return met.welcome;
}

Welcome Link::ask(net::Deadline deadline) {
  const Lock lock(mutex_);
  try {
    return greet(deadline, hello_);
  } catch (const Error& error) {
    raise(error.code(), "{} -- {}", name_, error.what());
  }
}

Welcome Link::come(std::uint64_t incarnation, net::Deadline deadline) {
  const Lock lock(mutex_);
  hello_.incarnation = incarnation;
  ++connection_;
  try {
    return greet(deadline, hello_);
  } catch (const Error& error) {
    raise(error.code(), "{} -- {}", name_, error.what());
  }
}

std::uint32_t Link::patience_ms() const noexcept {
  const std::chrono::milliseconds timeout = timeout_;
  return static_cast<std::uint32_t>(std::max(timeout - kSlack, timeout / 2).count());
}

Link::RequestPtr Link::send(Method method, std::string body, std::size_t room) {
  Lock lock(mutex_);
  return enqueue(lock, method, 0, std::move(body), room);
}

Link::RequestPtr Link::send_change(Method method, const std::function<std::string(const Order&)>& build) {
  Lock lock(mutex_);
  if (dead_) throw *dead_;
  // Answers to changes come in order, so all those before the first that is under way have been received.
  std::uint64_t acknowledged = sequence_;
  for (const RequestPtr& one : under_way_) {
    if (one->sequence == 0) continue;
    acknowledged = one->sequence - 1;
    break;
  }
  const std::uint64_t sequence = sequence_ + 1;
  std::string body = build({sequence, acknowledged});
  sequence_ = sequence;
  return enqueue(lock, method, sequence, std::move(body), 0);
}

Link::RequestPtr Link::enqueue(Lock& lock, Method method, std::uint64_t sequence, std::string body, std::size_t room) {
  if (dead_) throw *dead_;
  auto request =
      std::make_shared<Request>(Request{method, sequence, std::move(body), room, net::deadline_in(timeout_)});
  if (under_way_.empty()) owed_since_ = std::chrono::steady_clock::now();
  under_way_.push_back(request);
  bytes_under_way_ += request->body.size();
  transmit(*request);
  make_room(lock, kMostUnderWay);
  return request;
}

/// Sends the request. A failure is noticed when a thread waits for the answer.
void Link::transmit(Request& request) {
  request.connection = connection_;
  request.call = 0;
  try {
    request.call = rpc_->begin(static_cast<std::uint8_t>(request.method), request.body, request.room);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::PeerLost) request.failed = error;
  }
}

void Link::make_room(Lock& lock, std::size_t bytes) {
  while (bytes_under_way_ > bytes) {
    const auto oldest = std::find_if(under_way_.begin(), under_way_.end(), [](const RequestPtr& one) {
      return !one->receiving && one->method != Method::Pull && one->method != Method::Barrier &&
             one->method != Method::Await && one->method != Method::Snapshot;
    });
    if (oldest == under_way_.end()) return;
    const RequestPtr request = *oldest;
    receive(lock, request);
  }
}

void Link::keep_spare(std::string body) {
  if (body.capacity() >= kLeastSpare && spare_.size() < kMostSpare) spare_.push_back(std::move(body));
}

std::string Link::spare_body() {
  if (spare_.empty()) return {};
  std::string body = std::move(spare_.back());
  spare_.pop_back();
  return body;
}

void Link::receive(Lock& lock, const RequestPtr& request) {
  received_.wait(lock,
                 [&] { return !request->receiving; });  // another thread may wait for the answer, until its deadline
  request->receiving = true;
  while (!request->heard && !request->failed) {
    const std::shared_ptr<net::RpcClient> rpc = rpc_;
    const std::uint64_t connection = request->connection;
    std::optional<Error> lost;
    if (request->call == 0) {
      lost = Error(ErrorCode::PeerLost, "its connection is lost");
    } else {
      const std::uint64_t call = request->call;
      std::optional<net::RpcAnswer> bytes;
      lock.unlock();
      try {
        bytes = rpc->finish(call, request->deadline);
      } catch (const Error& error) {
        lost = error;
      }
      lock.lock();
      silent_ = lost && lost->code() == ErrorCode::Timeout;
      if (!silent_) owed_since_ = std::chrono::steady_clock::now();
      if (!lost) {
        if (auto heard = open_answer(*std::move(bytes))) {
          request->heard = *std::move(heard);
          if (!request->heard->answer.error) made_ = std::max(made_, request->sequence);
        } else {
          request->failed = heard.error();
        }
        break;
      }
    }
    if (dead_) {
      request->failed = dead_;
    } else if (lost->code() != ErrorCode::PeerLost) {
      request->failed = Error(lost->code(), fmt::format("{}: {}", name_, lost->what()));
      if (request->sequence != 0) dead_ = request->failed;  // it is not known whether the change has been made
    } else if (request->connection == connection) {
      // A ping has a short deadline; connecting again may take longer.
      recover(lock, connection, request->method == Method::Ping ? net::deadline_in(timeout_) : request->deadline);
    }
  }
  if (under_way_.remove(request) > 0) {
    bytes_under_way_ -= request->body.size();
    keep_spare(std::move(request->body));
  }
  request->receiving = false;
  received_.notify_all();
}

void Link::recover(Lock& lock, std::uint64_t connection, net::Deadline deadline) {
  if (connection != connection_) return;  // another thread has recovered it
  static_cast<void>(lock);                // no thread can send meanwhile
  std::optional<Error> reason;
  try {
    const Welcome welcome = greet(deadline, hello_);
    // A refused change (the server's disk was full) has not been made, so the server need not have it.
    const std::uint64_t had = made_;
    if (welcome.incarnation != hello_.incarnation || welcome.mark < had) {
      dead_ = Error(
          ErrorCode::Aborted,
          fmt::format("{} has been started again without what it knew: {} of this worker's {} changes are "
                      "lost -- start all workers again from a snapshot, and give servers a journal",
                      name_, had - std::min(had, welcome.incarnation == hello_.incarnation ? welcome.mark : 0), had));
    } else {
      go_on_after(welcome.mark);
    }
  } catch (const Error& error) {
    if (error.code() == ErrorCode::Timeout) {
      const std::chrono::duration<double> time = timeout_.load();
      dead_ = Error(
          ErrorCode::PeerLost,
          fmt::format("{}: its connection was lost, and not made again in what was left of a request's {:g} s: {}",
                      name_, time.count(), error.what()));
    } else {
      dead_ = Error(error.code(), fmt::format("{}: {}", name_, error.what()));
    }
  }
  ++connection_;
  log::info("ps", "{}: {}", name_, dead_ ? dead_->what() : "connected again");
  for (const RequestPtr& one : under_way_) {
    if (dead_) {
      one->failed = dead_;
    } else if (!one->failed) {
      transmit(*one);
    }
  }
}

/// Continues after the server's last change of this worker, `mark`. Changes that the server refused without recording
/// them leave a gap: numbers continue after `mark`, and a change that was sent after the gap fails.
void Link::go_on_after(std::uint64_t mark) {
  std::uint64_t last = mark;
  for (const RequestPtr& one : under_way_) {
    if (one->sequence <= mark) continue;  // not a change, or already made
    if (one->sequence == last + 1) {
      last = one->sequence;
    } else {
      one->failed = Error(ErrorCode::Unavailable,
                          fmt::format("{}: a change before this one was refused, and the connection was made again "
                                      "since: nothing of this one has been made -- send both again",
                                      name_));
    }
  }
  sequence_ = last;
}

void Link::drain() {
  Lock lock(mutex_);
  while (true) {
    const auto change =
        std::find_if(under_way_.begin(), under_way_.end(), [](const RequestPtr& one) { return one->sequence != 0; });
    if (change == under_way_.end()) return;
    const RequestPtr request = *change;
    receive(lock, request);
  }
}

void Link::demand_alive() {
  const Lock lock(mutex_);
  if (dead_) throw *dead_;
}

void Link::keep_alive() noexcept {
  try {
    Lock lock(mutex_);
    // A thread that waits for an answer notices a lost connection itself.
    if (dead_ ||
        std::any_of(under_way_.begin(), under_way_.end(), [](const RequestPtr& one) { return one->receiving; }))
      return;
    const RequestPtr ping = enqueue(lock, Method::Ping, 0, {}, 0);
    ping->deadline = std::min(ping->deadline, net::deadline_in(kLongSilence));
    receive(lock, ping);
  } catch (const std::exception& error) {  // the next call reports the error
    log::debug("ps", "{}: {}", name_, error.what());
  }
}

void Link::look_around() noexcept {
  try {
    std::shared_ptr<net::RpcClient> rpc;
    {
      const Lock lock(mutex_);
      const auto now = std::chrono::steady_clock::now();
      if (dead_ || now < look_ || !(silent_ || (!under_way_.empty() && now - owed_since_ > kLongSilence))) return;
      look_ = now + kLongSilence;
      rpc = rpc_;
    }
    if (route_.has_moved()) rpc->close();
  } catch (const std::exception& error) {
    log::debug("ps", "{}: {}", name_, error.what());
  }
}

void Link::hurry(std::chrono::milliseconds timeout) {
  const Lock lock(mutex_);
  timeout_ = std::min(timeout_.load(), timeout);
  for (const RequestPtr& one : under_way_) one->deadline = std::min(one->deadline, net::deadline_in(timeout));
}

Heard Link::finish(const RequestPtr& request) {
  Lock lock(mutex_);
  receive(lock, request);
  if (request->failed) {
    reported_ = reported_ || dead_.has_value();
    throw *request->failed;
  }
  Heard heard = *std::move(request->heard);
  if (heard.answer.error) raise(heard.answer.error->code(), "{}: {}", name_, heard.answer.error->what());
  return heard;
}

}  // namespace cohort::ps
