#include "ps/link.h"

#include "base/log.h"
#include "cluster/host_identity.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace cohort::ps {
namespace {

constexpr std::size_t kMostUnderWay = std::size_t{32}
                                      << 20;        // bytes; a server that does not answer holds its workers up
constexpr std::chrono::milliseconds kNearer(5000);  // to be reached at its Unix name
constexpr std::size_t kLongestRecord = codec::kLongestError + 1024;  // of an answer
constexpr std::chrono::milliseconds kSlack(2000);  // a server says whom it waits for before the client gives up

net::RpcPlace sharing(net::RpcPlace place) {
  place.secure.descriptors = true;  // of memory
  return place;
}

/// The record is copied before it is looked at; what follows it stays where it is.
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
  std::uint64_t sequence;  // of a change
  std::string body;
  std::size_t room;
  net::Deadline deadline;
  std::uint64_t connection = 0;  // by which it has been sent
  std::uint64_t call = 0;
  bool receiving = false;  // some thread waits for its answer
  std::optional<Heard> heard = {};
  std::optional<Error> failed = {};
};

Link::Link(net::RpcPlace place, std::string endpoint, Hello hello, std::chrono::milliseconds timeout)
    : place_(sharing(std::move(place))),
      name_(fmt::format("parameter server {} at {}", hello.server, endpoint)),
      hello_(std::move(hello)),
      timeout_(timeout) {}
Link::~Link() = default;

Link::Met Link::meet(const net::RpcPlace& place, net::Deadline deadline, const Hello& hello) const {
  Met met;
  net::rpc_connect(place, deadline, [&](net::SecureConnection connection, const std::string& at, net::Deadline limit) {
    auto rpc = std::make_shared<net::RpcClient>(std::move(connection), "parameter", at);
    const std::string answer = rpc->call(static_cast<std::uint8_t>(Method::Hello), pack(hello), limit);
    const auto opened = value_or_throw(unpack<Answer>(answer));
    if (opened.record.error) throw *opened.record.error;
    met = {std::move(rpc), value_or_throw(codec::decode<Welcome>(opened.payload))};
  });
  return met;
}

Welcome Link::greet(net::Deadline deadline, const Hello& hello) {
  Met met = meet(place_, deadline, hello);
  if (hello.incarnation != 0) share_memory(met, deadline, hello);
  rpc_ = std::move(met.rpc);
  return met.welcome;
}

void Link::share_memory(Met& met, net::Deadline deadline, const Hello& hello) const {
  try {
    const std::string host = cluster::host_identity().id;
    auto shared = met.rpc->share_memory(host, deadline);
    if (shared && *shared) {
      net::RpcPlace nearer = place_;
      nearer.endpoints = {**shared};
      met = meet(nearer, std::min(deadline, net::deadline_in(kNearer)), hello);
      shared = met.rpc->share_memory(host, deadline);
    }
    if (!shared) log::debug("ps", "{}: no shared memory: {}", name_, shared.error().what());
  } catch (const Error& error) {  // if that was the connection, whoever asks next finds out
    log::debug("ps", "{}: no shared memory: {}", name_, error.what());
  }
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
  // Answers of changes come in order, so all before the first that is under way have been had.
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
  under_way_.push_back(request);
  bytes_under_way_ += request->body.size();
  transmit(*request);
  make_room(lock, kMostUnderWay);
  return request;
}

/// A failure shows when somebody waits.
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
      return !one->receiving && one->method != Method::Pull && one->method != Method::Barrier;
    });
    if (oldest == under_way_.end()) return;
    const RequestPtr request = *oldest;
    receive(lock, request);
  }
}

void Link::receive(Lock& lock, const RequestPtr& request) {
  received_.wait(lock,
                 [&] { return !request->receiving; });  // another thread waits for it, no longer than its deadline
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
      if (!lost) {
        if (auto heard = open_answer(*std::move(bytes))) {
          request->heard = *std::move(heard);
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
      if (request->sequence != 0) dead_ = request->failed;  // whether it has been made is not known
    } else if (request->connection == connection) {
      recover(lock, connection, request->deadline);
    }
  }
  if (under_way_.remove(request) > 0) bytes_under_way_ -= request->body.size();
  request->receiving = false;
  received_.notify_all();
}

void Link::recover(Lock& lock, std::uint64_t connection, net::Deadline deadline) {
  if (connection != connection_) return;  // another thread has
  static_cast<void>(lock);                // nobody can send meanwhile
  std::optional<Error> reason;
  try {
    const Welcome welcome = greet(deadline, hello_);
    std::uint64_t had = sequence_;
    for (const RequestPtr& one : under_way_) {
      if (one->sequence == 0) continue;
      had = one->sequence - 1;
      break;
    }
    if (welcome.incarnation != hello_.incarnation || welcome.mark < had) {
      dead_ = Error(
          ErrorCode::Aborted,
          fmt::format("{} has been started again without what it knew: {} of this worker's {} changes are "
                      "lost -- start all workers again from a snapshot, and give servers a journal",
                      name_, had - std::min(had, welcome.incarnation == hello_.incarnation ? welcome.mark : 0), had));
    }
  } catch (const Error& error) {
    dead_ = Error(error.code() == ErrorCode::Timeout ? ErrorCode::PeerLost : error.code(),
                  fmt::format("{}: {}", name_, error.what()));
  }
  ++connection_;
  log::info("ps", "{}: {}", name_, dead_ ? dead_->what() : "connected again");
  for (const RequestPtr& one : under_way_) {
    if (dead_) {
      one->failed = dead_;
    } else {
      transmit(*one);
    }
  }
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

void Link::keep_alive() noexcept {
  try {
    Lock lock(mutex_);
    // Whoever waits already sees it.
    if (dead_ ||
        std::any_of(under_way_.begin(), under_way_.end(), [](const RequestPtr& one) { return one->receiving; }))
      return;
    const RequestPtr ping = enqueue(lock, Method::Ping, 0, {}, 0);
    receive(lock, ping);
  } catch (const std::exception& error) {  // what is wrong shows to the next who asks
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
  if (request->failed) throw *request->failed;
  Heard heard = *std::move(request->heard);
  if (heard.answer.error) raise(heard.answer.error->code(), "{}: {}", name_, heard.answer.error->what());
  return heard;
}

}  // namespace cohort::ps
