#include "net/http_server.h"

#include "net/deadline.h"
#include "net/hmac.h"
#include "net/socket.h"
#include "sys/files.h"
#include "sys/thread.h"
#include "sys/unique_fd.h"

#include <fmt/format.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <exception>
#include <list>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::net {
namespace {

constexpr std::size_t kShortestToken = 16;

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

/// Up to `end`, which goes, too; all of it where there is none.
std::string_view cut(std::string_view& text, std::string_view end) {
  const std::size_t at = text.find(end);
  const std::string_view part = text.substr(0, at);
  text.remove_prefix(at == std::string_view::npos ? text.size() : at + end.size());
  return part;
}

const char* reason_of(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 431: return "Request Header Fields Too Large";
    default: return "Internal Server Error";
  }
}

std::string bytes_of(const HttpAnswer& answer, bool with_body) {
  std::string out = fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\nCache-Control: no-store\r\n"
      "X-Content-Type-Options: nosniff\r\n{}{}\r\n",
      answer.status, reason_of(answer.status), answer.type, answer.body.size(),
      answer.status == 401 ? "WWW-Authenticate: Bearer\r\n" : "", answer.status == 405 ? "Allow: GET, HEAD\r\n" : "");
  if (with_body) out += answer.body;
  return out;
}

/// Of a Host header, without its port.
std::string_view host_name(std::string_view host) {
  if (host.starts_with('[')) return host.substr(1, host.find(']') - 1);
  return host.substr(0, host.rfind(':'));
}

bool is_token_character(char c) { return c > 0x20 && c < 0x7F; }

struct Connection {
  sys::UniqueFd fd;
  Deadline until;
  std::string in, out;
  std::size_t sent = 0;
  bool answered = false;
};

}  // namespace

std::string HttpRequest::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? std::string() : found->second;
}

Result<HttpRequest> parse_http_request(std::string_view head) {
  const auto wrong = [](const char* what) { return fail(ErrorCode::Corrupt, "this is no HTTP request: {}", what); };
  if (!head.ends_with("\r\n\r\n")) return wrong("its head has no end");
  head.remove_suffix(2);
  std::string_view line = cut(head, "\r\n");
  HttpRequest request;
  request.method = cut(line, " ");
  const std::string_view target = cut(line, " ");
  if (line != "HTTP/1.1" && line != "HTTP/1.0") return wrong("another version");
  if (request.method.empty() || !target.starts_with('/')) return wrong("it names nothing");
  request.path = target.substr(0, target.find('?'));
  while (!head.empty()) {
    std::string_view rest = cut(head, "\r\n");
    if (rest.find(':') == std::string_view::npos) return wrong("a header has no name");
    const std::string_view name = cut(rest, ":");
    if (name.empty() || name.find_first_of(" \t") != std::string_view::npos) return wrong("a header's name");
    const std::string_view value = trimmed(rest);
    if (std::any_of(value.begin(), value.end(), [](char c) { return c == '\0' || c == '\r' || c == '\n'; }))
      return wrong("a header's value");
    request.headers[lower(name)] = value;
  }
  return request;
}

std::size_t preferred_type(std::string_view accept, std::string_view first, std::string_view second) {
  double weights[2] = {-1, -1};
  while (!accept.empty()) {
    std::string_view range = cut(accept, ",");
    const std::string type = lower(trimmed(cut(range, ";")));
    double weight = 1;
    while (!range.empty()) {
      const std::string_view parameter = trimmed(cut(range, ";"));
      if (!parameter.starts_with("q=")) continue;
      const auto read = std::from_chars(parameter.data() + 2, parameter.data() + parameter.size(), weight);
      if (read.ec != std::errc() || !(weight >= 0 && weight <= 1)) weight = 0;
    }
    if (type == first) weights[0] = std::max(weights[0], weight);
    if (type == second) weights[1] = std::max(weights[1], weight);
  }
  return weights[1] > 0 && weights[1] > weights[0] ? 1 : 0;
}

struct HttpServer::Impl {
  HttpServerOptions options;
  Address address;
  Mac key_proof{};
  std::array<std::uint8_t, 32> key{};
  sys::UniqueFd listener, stop;
  std::list<Connection> connections;
  std::thread thread;

  explicit Impl(HttpServerOptions wanted) : options(std::move(wanted)) {
    if (options.token.empty() && !is_loopback_name(options.at.host)) {
      raise(ErrorCode::InvalidArgument,
            "serving at {} failed -- whoever reaches this host could read it -- give a token (a file of one line), or "
            "serve at 127.0.0.1 and reach it by `ssh -L`",
            to_string(options.at));
    }
    // Compared by a MAC under a key of this process: what is compared has one length, and takes one time.
    std::random_device random;
    for (auto& byte : key) byte = static_cast<std::uint8_t>(random());
    key_proof = hmac_sha256(key, options.token);
    listener = value_or_throw(listen_on({options.at, {}}));
    address = value_or_throw(local_endpoint(listener.get())).tcp;
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
      waits.assign({{stop.get(), POLLIN, 0}, {listener.get(), POLLIN, 0}});
      Deadline next = deadline_in(std::chrono::minutes(10));
      for (const Connection& connection : connections) {
        waits.push_back({connection.fd.get(), static_cast<short>(connection.answered ? POLLOUT : POLLIN), 0});
        next = std::min(next, connection.until);
      }
      if (::poll(waits.data(), waits.size(), poll_timeout(next)) < 0 && errno != EINTR) return;
      if (waits[0].revents != 0) return;
      std::size_t at = 2;
      for (auto each = connections.begin(); each != connections.end();) {
        const bool ready = waits[at++].revents != 0;
        const bool late = passed(each->until);
        const bool over = late || (ready && !(each->answered ? send(*each) : receive(*each)));
        if (late) {  // the kernel keeps nothing for it, either
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
      if (!accepted) {  // no descriptors, or no memory: those that are there have to end first
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        return;
      }
      if (!*accepted) return;
      if (connections.size() >= options.most_connections) continue;
      connections.push_back({.fd = std::move(**accepted), .until = deadline_in(options.patience), .in = {}, .out = {}});
    }
  }

  /// False: it is over.
  bool receive(Connection& from) {
    char bytes[2048];
    const ssize_t got = ::recv(from.fd.get(), bytes, sizeof bytes, 0);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return false;
    from.in.append(bytes, static_cast<std::size_t>(got));
    const std::size_t end = from.in.find("\r\n\r\n");
    if (end != std::string::npos && end + 4 <= options.longest_head) {
      reply(from, from.in.substr(0, end + 4));
    } else if (from.in.size() >= options.longest_head) {
      from.out = bytes_of({.status = 431, .body = "the request is too long\n"}, true);
    } else {
      return true;
    }
    from.answered = true;
    from.until = deadline_in(options.patience);
    return send(from);
  }

  void reply(Connection& to, std::string_view head) {
    const auto request = parse_http_request(head);
    HttpAnswer answer = request ? answer_to(*request) : HttpAnswer{.status = 400, .body = "this is no request\n"};
    to.out = bytes_of(answer, !request || request->method != "HEAD");
  }

  HttpAnswer answer_to(const HttpRequest& request) const {
    if (!options.token.empty()) {
      std::string_view shown_by = request.headers.contains("authorization")
                                      ? std::string_view(request.headers.at("authorization"))
                                      : std::string_view();
      const std::string scheme = lower(cut(shown_by, " "));
      if (scheme != "bearer" || !same(hmac_sha256(key, trimmed(shown_by)), key_proof))
        return {.status = 401, .body = "a token is needed: Authorization: Bearer TOKEN\n"};
    } else if (const std::string host = request.header("host"); !host.empty() && !is_loopback_name(host_name(host))) {
      // A page in somebody's browser that has a name lead here (DNS rebinding).
      return {.status = 403, .body = "this is served to 127.0.0.1 and localhost alone\n"};
    }
    if (request.method != "GET" && request.method != "HEAD") return {.status = 405, .body = "GET is answered\n"};
    try {
      return options.handler(request);
    } catch (const std::exception& error) {
      return {.status = 500, .body = fmt::format("{}\n", error.what())};
    }
  }

  bool send(Connection& to) {
    while (to.sent < to.out.size()) {
      const ssize_t sent = ::send(to.fd.get(), to.out.data() + to.sent, to.out.size() - to.sent, MSG_NOSIGNAL);
      if (sent < 0) return errno == EAGAIN || errno == EINTR;
      to.sent += static_cast<std::size_t>(sent);
    }
    // What the client still sends must not turn the end into a reset, which would take the answer with it.
    ::shutdown(to.fd.get(), SHUT_WR);
    char ignored[512];
    for (int i = 0; i < 16 && ::recv(to.fd.get(), ignored, sizeof ignored, MSG_DONTWAIT) > 0; ++i) {
    }
    return false;
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
