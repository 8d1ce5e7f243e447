// Exchange for jobs without PMI from Slurm (MpiDefault=none). Rank 0 answers at one of a few ports that are computed
// from the job's number, on the first host of the step. Both sides show MUNGE credentials of the same user for the same
// step and round; rank 0's answer is sealed for that user. Calls use ordinary connections (net/rpc.h), with a secret
// that anyone can compute from the job's number. So the secret only rejects unrelated connections; the credential is
// the proof.

#include "base/files.h"
#include "net/rpc.h"
#include "net/secret.h"
#include "net/socket.h"
#include "rendezvous/exchange.h"

#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

namespace cohort::rendezvous {
namespace {

// libmunge's interface, with the numbers from its header.
struct Context;
constexpr int kCipher = 0;
constexpr int kSocket = 8;
constexpr int kUserOnly = 9;
constexpr int kAes128 = 4;
constexpr int kMungeSuccess = 0;

// Longest wait for the daemon's socket. libmunge would retry a missing socket for some twenty seconds.
constexpr std::chrono::seconds kSocketWait{2};

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\r");
  return begin == std::string_view::npos ? std::string_view()
                                         : text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

}  // namespace

struct Munge::Library {
  Context* (*create)() = nullptr;
  void (*destroy)(Context*) = nullptr;
  int (*set)(Context*, int, ...) = nullptr;
  int (*get)(Context*, int, ...) = nullptr;
  int (*encode)(char**, Context*, const void*, int) = nullptr;
  int (*decode)(const char*, Context*, void**, int*, uid_t*, gid_t*) = nullptr;
  const char* (*error_text)(int) = nullptr;
};

Result<std::shared_ptr<Munge>> Munge::load(const std::string& socket) {
  void* const handle = ::dlopen("libmunge.so.2", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = ::dlerror();
    return fail(ErrorCode::Unavailable, "MUNGE's library cannot be loaded: {}", why == nullptr ? "unknown" : why);
  }
  auto library = std::make_shared<Library>();
  const bool complete =
      look_up(handle, "munge_ctx_create", library->create) && look_up(handle, "munge_ctx_destroy", library->destroy) &&
      look_up(handle, "munge_ctx_set", library->set) && look_up(handle, "munge_ctx_get", library->get) &&
      look_up(handle, "munge_encode", library->encode) && look_up(handle, "munge_decode", library->decode) &&
      look_up(handle, "munge_strerror", library->error_text);
  if (!complete) return fail(ErrorCode::Unavailable, "libmunge.so.2 lacks functions");
  return std::shared_ptr<Munge>(new Munge(std::move(library), socket));
}

Result<std::string> Munge::seal(std::string_view bytes) const {
  const std::unique_ptr<Context, void (*)(Context*)> context(library_->create(), library_->destroy);
  if (!context) return fail(ErrorCode::Unavailable, "MUNGE: out of memory");
  int status = library_->set(context.get(), kUserOnly, ::geteuid());
  if (status == kMungeSuccess) status = library_->set(context.get(), kCipher, kAes128);
  if (status == kMungeSuccess && !socket_.empty()) status = library_->set(context.get(), kSocket, socket_.c_str());
  const char* socket = nullptr;
  if (status == kMungeSuccess) status = library_->get(context.get(), kSocket, &socket);
  if (status == kMungeSuccess && socket != nullptr) {
    const auto until = std::chrono::steady_clock::now() + kSocketWait;
    while (::access(socket, F_OK) != 0) {
      if (std::chrono::steady_clock::now() >= until)
        return fail(ErrorCode::Unavailable, "MUNGE's socket {} is not there -- does munged run on this host?", socket);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
  char* credential = nullptr;
  if (status == kMungeSuccess)
    status = library_->encode(&credential, context.get(), bytes.data(), static_cast<int>(bytes.size()));
  const std::unique_ptr<char, void (*)(void*)> held(credential, std::free);
  if (status != kMungeSuccess || credential == nullptr) {
    return fail(ErrorCode::Unavailable, "MUNGE makes no credential: {} -- does munged run on this host?",
                library_->error_text(status));
  }
  return std::string(credential);
}

Result<std::string> Munge::open(const std::string& credential) const {
  const std::unique_ptr<Context, void (*)(Context*)> context(library_->create(), library_->destroy);
  if (!context) return fail(ErrorCode::Unavailable, "MUNGE: out of memory");
  int status = kMungeSuccess;
  if (!socket_.empty()) status = library_->set(context.get(), kSocket, socket_.c_str());
  void* bytes = nullptr;
  int size = 0;
  uid_t user = 0;
  gid_t group = 0;
  if (status == kMungeSuccess)
    status = library_->decode(credential.c_str(), context.get(), &bytes, &size, &user, &group);
  const std::unique_ptr<void, void (*)(void*)> held(bytes, std::free);
  if (status != kMungeSuccess)
    return fail(ErrorCode::InvalidArgument, "MUNGE refuses a credential: {}", library_->error_text(status));
  if (user != ::geteuid())
    return fail(ErrorCode::InvalidArgument, "a credential of uid {}, and this process runs as uid {}", user,
                ::geteuid());
  if (bytes == nullptr || size <= 0) return std::string();
  std::string plain(static_cast<const char*>(bytes), static_cast<std::size_t>(size));
  ::explicit_bzero(bytes, plain.size());  // the bytes may be a secret
  return plain;
}

std::string munge_socket_of(std::string_view slurm_conf) {
  std::string found;
  while (!slurm_conf.empty()) {
    std::string_view line = slurm_conf.substr(0, slurm_conf.find('\n'));
    slurm_conf.remove_prefix(std::min(slurm_conf.size(), line.size() + 1));
    line = trimmed(line.substr(0, line.find('#')));
    const std::size_t equals = line.find('=');
    if (equals == std::string_view::npos || lower(trimmed(line.substr(0, equals))) != "authinfo") continue;
    for (std::string_view rest = trimmed(line.substr(equals + 1)); !rest.empty();) {
      const std::string_view part = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(rest.size(), part.size() + 1));
      constexpr std::string_view kKey = "socket=";
      if (lower(part.substr(0, kKey.size())) == kKey) found = trimmed(part.substr(kKey.size()));
    }
  }
  return found;
}

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::uint32_t kPorts = 8;
constexpr std::uint16_t kFirstPort = 10240;  // below the ports that kernels choose
constexpr std::uint32_t kPortSpan = 16000;
constexpr seconds kLongestPatience{60};  // longest wait for rank 0 at one port; shorter at first
constexpr std::uint8_t kAsk = 1;
constexpr std::uint8_t kTold = 2;

std::string nonce() {
  const net::Secret random = value_or_throw(net::Secret::generate());
  return net::sha256_hex({reinterpret_cast<const char*>(random.bytes().data()), random.bytes().size()}).substr(0, 32);
}

// A message is "WORD STEP KEY NONCE REST".
struct Message {
  std::string word, step, key, nonce, rest;
};
std::string to_text(const Message& message) {
  std::string text;
  text.reserve(message.word.size() + message.step.size() + message.key.size() + message.nonce.size() +
               message.rest.size() + 4);
  for (const std::string* part : {&message.word, &message.step, &message.key, &message.nonce})
    text.append(*part).append(" ");
  return text.append(message.rest);
}
Message from_text(std::string_view text) {
  Message message;
  for (std::string* part : {&message.word, &message.step, &message.key, &message.nonce}) {
    *part = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), part->size() + 1));
  }
  message.rest = text;
  return message;
}

// Facts about a step that its ranks know before they communicate.
struct Step {
  std::string name;
  net::Secret everybodys;
  net::SecureOptions secure = {.purpose = "munge", .longest_message = 16 * 1024};
};

// Rank 0's server: gives the value to clients that show a credential of this user for the step and the key.
class Answers final : net::RpcServer::Service {
 public:
  Answers(std::shared_ptr<Munge> munge, Step step, std::string key, std::string value, net::Endpoint endpoint)
      : munge_(std::move(munge)),
        step_(std::move(step)),
        key_(std::move(key)),
        value_(std::move(value)),
        server_({.name = "rank 0 (MUNGE)",
                 .endpoint = std::move(endpoint),
                 .secret = step_.everybodys,
                 .public_secret = true,
                 .secure = step_.secure},
                *this) {}

  /// Waits until `others` other ranks have received the value.
  void wait(std::size_t others, net::Deadline deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return told_.size() >= others; });
  }

 private:
  Result<void> on_call(const net::RpcServer::ClientPtr& client, const net::RpcServer::Call& call) override {
    if (call.method == kTold) {
      const auto asked = asked_.find(client);
      if (asked == asked_.end()) return fail(ErrorCode::Mismatch, "it has not asked");
      const std::lock_guard lock(mutex_);
      told_.insert(asked->second);
      changed_.notify_all();
      return {};
    }
    const auto text = munge_->open(std::string(call.body));
    if (!text) return tl::unexpected(text.error());
    const Message asked = from_text(*text);
    if (asked.word != "ask" || asked.step != step_.name || asked.key != key_ || asked.rest.empty()) {
      server_.answer(client, call.id, "");  // a client of this user, but of another job, or already at another init
      return {};
    }
    Message give{"give", step_.name, key_, asked.nonce, value_};
    std::string plain = to_text(give);
    const auto reply = munge_->seal(plain);
    net::wipe(plain);
    net::wipe(give.rest);
    if (!reply) return tl::unexpected(reply.error());
    asked_[client] = asked.rest;
    server_.answer(client, call.id, *reply);
    return {};
  }
  void on_gone(const net::RpcServer::ClientPtr& client) override { asked_.erase(client); }

  const std::shared_ptr<Munge> munge_;
  const Step step_;
  const std::string key_;
  std::string value_;
  const net::Wiping wiping_{value_};
  std::map<net::RpcServer::ClientPtr, std::string> asked_;  ///< by client: its rank
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::string> told_;
  net::RpcServer server_;  ///< declared last, so that its thread ends first
};

class MungeExchange final : public Exchange {
 public:
  /// `anywhere`: rank 0 may be on any host, not only on the first one.
  MungeExchange(const rendezvous::Detected& said, std::shared_ptr<Munge> munge, bool anywhere)
      : munge_(std::move(munge)),
        rank_(said.rank),
        size_(said.size),
        on_first_host_(said.node_rank == 0),
        hosts_(said.hosts.begin(), anywhere ? said.hosts.end() : said.hosts.begin() + 1),
        step_{net::sha256_hex(said.job).substr(0, 32), *net::Secret::from_digits(net::sha256_hex("munge " + said.job))},
        ports_(munge_ports(said.job)) {}

  std::string_view name() const override { return "MUNGE"; }
  std::size_t longest_value() const override { return 4096; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Result<std::string> share(const std::string& key, const std::optional<std::string>& mine,
                            net::Deadline deadline) override {
    if (!mine) return ask(key, deadline);
    if (!on_first_host_ && hosts_.size() == 1) {
      return fail(ErrorCode::Unavailable,
                  "rank 0 is not on the step's first host ({}), where the others look for it -- start by "
                  "`srun --mpi=pmi2`, or with --distribution=block",
                  hosts_.front());
    }
    // Answers in the background. Ranks with the value go on to the meeting, where missing ranks are named.
    deadline_ = deadline;
    answers_.reset();
    std::string reasons;
    for (const std::uint16_t port : ports_) {
      for (const char* const any : {"::", "0.0.0.0"}) {
        try {
          answers_ = std::make_unique<Answers>(munge_, step_, key, *mine, net::Endpoint{{any, port}, {}});
          return *mine;
        } catch (const Error& error) {
          reasons = error.what();
          if (error.context().system_error == EADDRINUSE) break;
        }
      }
    }
    return fail(ErrorCode::Unavailable,
                "none of the {} ports for this job is free on this host, the last one because: {}", kPorts, reasons);
  }

  void wait_told() override {
    if (answers_) answers_->wait(static_cast<std::size_t>(size_) - 1, deadline_);
  }

 private:
  // Tries one port after the other. A foreign process at a port, even one with the step's secret, only costs time.
  Result<std::string> ask(const std::string& key, net::Deadline deadline) const {
    std::string why;
    seconds patience{3};  // wait for a process at a port that does not answer
    for (auto pause = milliseconds(20);; pause = std::min(pause * 2, milliseconds(500))) {
      for (const std::string& host : hosts_) {
        for (const std::uint16_t port : ports_) {
          try {
            const net::Deadline limit = std::min(deadline, net::deadline_in(patience));
            auto connection = net::connect_once({{host, port}, {}}, limit);
            if (connection) return ask_at(*std::move(connection), host, key, limit);
            if (connection.error().kind != net::ConnectFailure::Refused) throw connection.error().error;
          } catch (const Error& error) {
            if (error.code() == ErrorCode::Timeout) patience = std::min(patience * 2, kLongestPatience);
            why = fmt::format("; port {} of {}: {}", port, host, error.what());
          }
        }
      }
      if (std::chrono::steady_clock::now() + pause >= deadline) {
        return fail(
            ErrorCode::Timeout,
            "rank 0 did not answer at {}, at any of the job's {} ports{} -- does every task call init, and does "
            "a firewall stand between?",
            hosts_.size() == 1 ? hosts_.front() + ", the step's first host" : "any of the step's hosts", kPorts, why);
      }
      std::this_thread::sleep_for(pause);
    }
  }

  std::string ask_at(sys::UniqueFd socket, const std::string& host, const std::string& key, net::Deadline limit) const {
    auto connection = value_or_throw(
        net::SecureConnection::with_secret(std::move(socket), net::Role::Client, step_.everybodys, step_.secure));
    value_or_throw(connection.handshake(limit));
    net::RpcClient client(std::move(connection), "MUNGE", host);
    const std::string once = nonce();
    const auto credential = munge_->seal(to_text({"ask", step_.name, key, once, std::to_string(rank_)}));
    const std::string reply = client.call(kAsk, value_or_throw(credential), limit);
    if (reply.empty()) raise(ErrorCode::Unavailable, "rank 0 is at another of its worlds, or of another job");
    std::string text = value_or_throw(munge_->open(reply));
    const net::Wiping wiping(text);
    Message given = from_text(text);
    if (given.word != "give" || given.step != step_.name || given.key != key || given.nonce != once)
      raise(ErrorCode::Mismatch, "another job answers");
    client.say(kTold, "", limit);
    return std::move(given.rest);
  }

  std::shared_ptr<Munge> munge_;
  int rank_;
  int size_;
  bool on_first_host_;
  std::vector<std::string> hosts_;  ///< hosts that may have rank 0
  Step step_;
  std::vector<std::uint16_t> ports_;
  net::Deadline deadline_{};
  std::unique_ptr<Answers> answers_;
};

}  // namespace

std::vector<std::uint16_t> munge_ports(std::string_view job) {
  const std::string digits = net::sha256_hex(job).substr(0, 6);
  const std::uint32_t start = static_cast<std::uint32_t>(std::stoul(digits, nullptr, 16)) % kPortSpan;
  std::vector<std::uint16_t> ports;
  // The ports are spread, so that a job with a neighbouring number has no port of this job.
  for (std::uint32_t i = 0; i < kPorts; ++i)
    ports.push_back(static_cast<std::uint16_t>(kFirstPort + (start + 1237 * i) % kPortSpan));
  return ports;
}

Result<std::shared_ptr<Exchange>> open_munge(const rendezvous::Detected& said,
                                             const rendezvous::Environment& environment) {
  if (said.hosts.empty() || !said.node_rank)
    return fail(ErrorCode::Unavailable, "SLURM_STEP_NODELIST and SLURM_NODEID do not say where rank 0 is");
  const auto set = environment.find("SLURM_CONF");
  const std::string path = set != environment.end() ? set->second : "/etc/slurm/slurm.conf";
  std::string socket;
  if (const auto conf = sys::read_file(path, {.max_bytes = 16 << 20})) socket = munge_socket_of(conf->text());
  auto munge = Munge::load(socket);
  if (!munge) return tl::unexpected(munge.error());
  // Checks that the daemon answers, since the error here comes with advice.
  if (const auto sealed = (*munge)->seal("hello"); !sealed) return tl::unexpected(sealed.error());
  // Unless the distribution is arbitrary, Slurm places rank 0 on the first host.
  const auto distribution = environment.find("SLURM_DISTRIBUTION");
  const bool anywhere = distribution != environment.end() && distribution->second.starts_with("arbitrary");
  return std::shared_ptr<Exchange>(std::make_shared<MungeExchange>(said, *std::move(munge), anywhere));
}

}  // namespace cohort::rendezvous
