#include "net/http_server.h"

#include "net/deadline.h"
#include "net/hmac.h"
#include "net/secret.h"
#include "net/socket.h"
#include "sys/files.h"
#include "sys/hardware.h"
#include "sys/thread.h"
#include "sys/unique_fd.h"

#include <fmt/format.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <list>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::net {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kShortestToken = 16;
constexpr milliseconds kEndTime = std::chrono::seconds(2);
constexpr milliseconds kWithoutDescriptors{100};

bool is_token_character(char c) { return c > 0x20 && c < 0x7F; }

/// Who may be answered. Tokens are compared by a MAC under a key of this process: what is compared has one length, and
/// takes one time.
class Admission {
 public:
  Admission(HttpClients clients, const Address& at, const std::string& token)
      : clients_(clients),
        at_(at),
        key_(value_or_throw(Secret::generate())),
        cookie_(fmt::format("cohort_{}", at.port)) {
    if (token.empty()) return;
    proof_ = hmac_sha256(key_.bytes(), token);
    // Browsers show it to other ports of this host, too, so it is not the token.
    value_or_throw(Secret::generate()).append_digits(pass_);
  }

  /// What a request gets before the handler sees it; nullopt: the handler answers.
  std::optional<HttpResponse> before(const HttpRequest& request) const {
    // A page of somebody else's whose name is made to lead here (DNS rebinding) is not ours.
    if (clients_ == HttpClients::Browsers && !is_our_name(request.host))
      return HttpResponse{.status = 421, .body = "this page is at localhost or 127.0.0.1, not at another name\n"};
    if (!proof_) {
      if (request.host.empty() || is_our_name(request.host)) return std::nullopt;
      return HttpResponse{.status = 403, .body = "this is served to 127.0.0.1 and localhost alone\n"};
    }
    if (is_token(request.bearer)) return std::nullopt;
    if (clients_ == HttpClients::Machines)
      return HttpResponse{.status = 401, .body = "a token is needed: Authorization: Bearer TOKEN\n"};
    if (const auto query = request.query.find("token"); query != request.query.end() && is_token(query->second)) {
      if (request.path != "/") return std::nullopt;
      // The token is not for the history and the screen.
      const std::string cookie = fmt::format("{}={}; HttpOnly; SameSite=Strict; Path=/", cookie_, pass_);
      return HttpResponse{.status = 303, .body = {}, .headers = {{"Location", "/"}, {"Set-Cookie", cookie}}};
    }
    const auto cookie = request.cookies.find(cookie_);
    if (cookie != request.cookies.end() && is_pass(cookie->second)) return std::nullopt;
    return HttpResponse{
        .status = 403,
        .body = "the token is missing or wrong: open the whole address that was printed, with its token\n"};
  }

 private:
  bool is_token(const std::string& shown) const { return same(hmac_sha256(key_.bytes(), shown), *proof_); }
  bool is_pass(const std::string& shown) const {
    return same(hmac_sha256(key_.bytes(), shown), hmac_sha256(key_.bytes(), pass_));
  }
  bool is_our_name(const std::string& host) const {
    if (is_loopback_name(host)) return true;
    return !is_loopback_name(at_.host) && (host == at_.host || host == sys::host_name());
  }

  HttpClients clients_;
  Address at_;
  Secret key_;
  std::string cookie_, pass_;
  std::optional<Mac> proof_;
};

struct Connection {
  enum class State { Reading, Writing, Ending };
  sys::UniqueFd fd;
  Deadline until;
  State state = State::Reading;
  std::string in = {}, out = {};
  std::size_t sent = 0;
};
using State = Connection::State;

}  // namespace

struct HttpServer::Impl {
  HttpServerOptions options;
  Address address;
  std::optional<Admission> admission;
  sys::UniqueFd listener, stop;
  Deadline listen_again{};
  std::list<Connection> connections;
  std::thread thread;

  explicit Impl(HttpServerOptions wanted) : options(std::move(wanted)) {
    if (options.token.empty() && !is_loopback_name(options.at.host)) {
      raise(ErrorCode::InvalidArgument,
            "serving at {} failed -- whoever reaches this host could read it -- give a token (a file of one line), or "
            "serve at 127.0.0.1 and reach it by `ssh -L`",
            to_string(options.at));
    }
    listener = value_or_throw(listen_on({options.at, {}}));
    address = {options.at.host, value_or_throw(local_endpoint(listener.get())).tcp.port};
    admission.emplace(options.clients, address, options.token);
    wipe(options.token);
    stop.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!stop) raise(ErrorCode::Unavailable, "serving at {} failed -- {}", to_string(address), errno_text(errno));
    thread = sys::start_without_signals([this] { serve(); });
  }
  ~Impl() {
    const std::uint64_t one = 1;
    (void)!::write(stop.get(), &one, sizeof one);
    thread.join();
  }

  void serve() {
    std::vector<pollfd> waits;
    for (;;) {
      Deadline next = deadline_in(std::chrono::minutes(10));
      const bool listening = passed(listen_again);
      if (!listening) next = std::min(next, listen_again);
      waits.assign({{stop.get(), POLLIN, 0}, {listener.get(), static_cast<short>(listening ? POLLIN : 0), 0}});
      for (const Connection& each : connections) {
        waits.push_back({each.fd.get(), static_cast<short>(each.state == State::Writing ? POLLOUT : POLLIN), 0});
        next = std::min(next, each.until);
      }
      if (::poll(waits.data(), waits.size(), poll_timeout(next)) < 0 && errno != EINTR) return;
      if (waits[0].revents != 0) return;
      std::size_t at = 2;
      for (auto each = connections.begin(); each != connections.end();) {
        const bool ready = waits[at++].revents != 0;
        const bool late = passed(each->until);
        const bool over = late || (ready && !advance(*each));
        if (late && each->state != State::Ending) {  // the kernel keeps nothing for it, either
          const linger at_once{.l_onoff = 1, .l_linger = 0};
          (void)::setsockopt(each->fd.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        }
        each = over ? connections.erase(each) : std::next(each);
      }
      if (waits[1].revents != 0) let_in();
    }
  }

  void let_in() {
    for (int i = 0; i < 16; ++i) {
      auto accepted = accept_one(listener.get());
      if (!accepted) listen_again = deadline_in(kWithoutDescriptors);  // those that are there have to end first
      if (!accepted || !*accepted) return;
      if (connections.size() >= options.most_connections && !make_room()) continue;
      connections.push_back({.fd = std::move(**accepted), .until = deadline_in(options.request_time)});
    }
  }

  /// The first goes that has its answer, or else has not said what it wants: so no crowd keeps anybody out.
  bool make_room() {
    for (const State state : {State::Ending, State::Reading}) {
      const auto goes = std::find_if(connections.begin(), connections.end(),
                                     [state](const auto& each) { return each.state == state; });
      if (goes == connections.end()) continue;
      connections.erase(goes);
      return true;
    }
    return false;
  }

  /// False: it is over.
  bool advance(Connection& with) const {
    if (with.state == State::Writing) return send(with);
    char bytes[4096];
    const ssize_t got = ::recv(with.fd.get(), bytes, sizeof bytes, 0);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return false;
    if (with.state == State::Ending) return true;
    with.in.append(bytes, static_cast<std::size_t>(got));
    const auto end = head_end(with.in);
    if (!end && with.in.size() < kLongestHead) return true;
    const auto request = end && *end <= kLongestHead ? parse_request(std::string_view(with.in).substr(0, *end))
                                                     : tl::unexpected(HttpRefusal{431, "the request is too long"});
    with.out = to_bytes(request ? answer_to(*request)
                                : HttpResponse{.status = request.error().status, .body = request.error().why + "\n"});
    if (request && request->method == "HEAD") with.out.resize(*head_end(with.out));
    with.state = State::Writing;
    with.until = deadline_in(options.answer_time);
    return send(with);
  }

  HttpResponse answer_to(const HttpRequest& request) const {
    try {
      if (auto answer = admission->before(request)) return *std::move(answer);
      return options.handler(request);
    } catch (const std::exception& error) {
      return {.status = 500, .body = fmt::format("{}\n", error.what())};
    }
  }

  static bool send(Connection& to) {
    while (to.sent < to.out.size()) {
      const ssize_t sent = ::send(to.fd.get(), to.out.data() + to.sent, to.out.size() - to.sent, MSG_NOSIGNAL);
      if (sent < 0) return errno == EAGAIN || errno == EINTR;
      to.sent += static_cast<std::size_t>(sent);
    }
    // Until the reader has taken it and closes: a close with bytes unread would take the answer back.
    ::shutdown(to.fd.get(), SHUT_WR);
    to.state = State::Ending;
    to.until = deadline_in(kEndTime);
    return true;
  }
};

HttpServer::HttpServer(HttpServerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
HttpServer::~HttpServer() = default;
const Address& HttpServer::address() const noexcept { return impl_->address; }

std::string read_token_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && (status.st_mode & (S_IROTH | S_IWOTH)) != 0) {
    raise(ErrorCode::InvalidArgument, "token file {} has mode {:04o}: everyone may read or change it -- chmod 600 {}",
          path, status.st_mode & 07777, path);
  }
  const auto content = sys::read_file(path);
  if (!content) throw content.error();
  std::string_view text = content->text();
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.remove_suffix(1);
  if (text.size() < kShortestToken || !std::all_of(text.begin(), text.end(), is_token_character)) {
    raise(ErrorCode::InvalidArgument,
          "token file {}: one line of at least {} characters without spaces is wanted -- make one: (umask 077; openssl "
          "rand -hex 32 > {})",
          path, kShortestToken, path);
  }
  return std::string(text);
}

}  // namespace cohort::net
