#include "net/http.h"

#include "base/files.h"
#include "base/hardware.h"
#include "base/parse.h"
#include "base/thread.h"
#include "base/unique_fd.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/socket.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <exception>
#include <list>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::net {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

/// True if `text` is a valid name of a header or method.
bool is_token(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           (c != '\0' && std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos);
  });
}

tl::unexpected<HttpRefusal> refuse(int status, std::string why) {
  return tl::unexpected(HttpRefusal{status, std::move(why)});
}

/// Returns the name of a Host header ("[::1]:80", "localhost:80", "127.0.0.1") without brackets and port.
std::optional<std::string> host_name(std::string_view value) {
  std::string_view name = value;
  std::string_view port;
  if (value.starts_with('[')) {
    const auto close = value.find(']');
    if (close == std::string_view::npos) return std::nullopt;
    name = value.substr(1, close - 1);
    port = value.substr(close + 1);
  } else if (const auto colon = value.find(':'); colon != std::string_view::npos) {
    name = value.substr(0, colon);
    port = value.substr(colon);
  }
  if (!port.empty() && (port.front() != ':' || !parse_integer<std::uint16_t>(port.substr(1)))) return std::nullopt;
  return lower(name);
}

std::string_view reason_of(int status) {
  switch (status) {
    case 200: return "OK";
    case 303: return "See Other";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 421: return "Misdirected Request";
    case 431: return "Request Header Fields Too Large";
    default: return "Internal Server Error";
  }
}

}  // namespace

std::optional<std::string> percent_decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    std::uint8_t byte = 0;
    const std::string_view digits = text.substr(i + 1, 2);
    const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), byte, 16);
    if (digits.size() < 2 || read.ptr != digits.data() + 2) return std::nullopt;
    out += static_cast<char>(byte);
    i += 2;
  }
  return out;
}

std::optional<std::size_t> head_end(std::string_view bytes) noexcept {
  const auto at = bytes.find("\r\n\r\n");
  if (at == std::string_view::npos) return std::nullopt;
  return at + 4;
}

tl::expected<HttpRequest, HttpRefusal> parse_request(std::string_view head) {
  if (!head.ends_with("\r\n\r\n")) return refuse(400, "the head of the request has no end");
  head.remove_suffix(2);
  for (const char c : head) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\r' && c != '\n' && c != '\t') || byte >= 0x7F)
      return refuse(400, "the head of a request is ASCII");
  }
  HttpRequest request;
  std::string_view line = take_until(head, "\n");
  if (!line.ends_with('\r')) return refuse(400, "a line ends with CR LF");
  line.remove_suffix(1);
  const std::string_view method = take_until(line, " ");
  std::string_view target = take_until(line, " ");
  if (!is_token(method) || !target.starts_with('/') || (line != "HTTP/1.1" && line != "HTTP/1.0"))
    return refuse(400, "that is no request of HTTP/1.1");
  if (method != "GET" && method != "HEAD") return refuse(405, "GET and HEAD are answered here");
  request.method = method;
  const auto path = percent_decoded(take_until(target, "?"));
  if (!path) return refuse(400, "the path has a wrong escape");
  request.path = *path;
  while (!target.empty()) {
    std::string_view value = take_until(target, "&");
    const auto name = percent_decoded(take_until(value, "="));
    const auto text = percent_decoded(value);
    if (!name || !text) return refuse(400, "the query has a wrong escape");
    request.query.emplace(*name, *text);
  }
  bool has_host = false, has_authorization = false;
  while (!head.empty()) {
    std::string_view field = take_until(head, "\n");
    if (!field.ends_with('\r')) return refuse(400, "a line ends with CR LF");
    field.remove_suffix(1);
    if (field.find('\r') != std::string_view::npos) return refuse(400, "CR stands alone");
    const bool has_name = field.find(':') != std::string_view::npos;
    const std::string_view spelling = take_until(field, ":");
    if (!has_name || !is_token(spelling)) return refuse(400, "that is no header");
    const std::string name = lower(spelling);
    const std::string_view value = trimmed(field);
    if (name == "host") {
      const auto host = host_name(value);
      if (!host || std::exchange(has_host, true)) return refuse(400, "there is one Host");
      request.host = *host;
    } else if (name == "cookie") {
      for (std::string_view rest = value; !rest.empty();) {
        std::string_view text = take_until(rest, ";");
        const std::string_view cookie = trimmed(take_until(text, "="));
        request.cookies.emplace(cookie, trimmed(text));
      }
    } else if (name == "authorization") {
      if (std::exchange(has_authorization, true)) return refuse(400, "there is one Authorization");
      std::string_view shown = value;
      if (lower(take_until(shown, " ")) == "bearer") request.bearer = trimmed(shown);
    } else if (name == "accept") {
      request.accept += fmt::format("{}{}", request.accept.empty() ? "" : ",", value);
    } else if (name == "transfer-encoding" || (name == "content-length" && value != "0")) {
      return refuse(400, "a GET request has no body");
    }
  }
  if (!has_host && line == "HTTP/1.1") return refuse(400, "there is no Host");
  return request;
}

std::size_t preferred_type(std::string_view accept, std::string_view first, std::string_view second) {
  double weights[2] = {-1, -1};
  while (!accept.empty()) {
    std::string_view range = take_until(accept, ",");
    const std::string type = lower(trimmed(take_until(range, ";")));
    double weight = 1;
    while (!range.empty()) {
      const std::string_view parameter = trimmed(take_until(range, ";"));
      if (!parameter.starts_with("q=")) continue;
      const auto read = std::from_chars(parameter.data() + 2, parameter.data() + parameter.size(), weight);
      if (read.ec != std::errc() || !(weight >= 0 && weight <= 1)) weight = 0;
    }
    if (type == first) weights[0] = std::max(weights[0], weight);
    if (type == second) weights[1] = std::max(weights[1], weight);
  }
  return weights[1] > 0 && weights[1] > weights[0] ? 1 : 0;
}

std::string to_bytes(const HttpResponse& response) {
  std::string out = fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\nCache-Control: no-store\r\n"
      "X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCross-Origin-Opener-Policy: same-origin\r\n"
      "Cross-Origin-Resource-Policy: same-origin\r\n",
      response.status, reason_of(response.status), response.type, response.body.size());
  if (response.status == 401) out += "WWW-Authenticate: Bearer\r\n";
  if (response.status == 405) out += "Allow: GET, HEAD\r\n";
  for (const auto& [name, value] : response.headers) out += fmt::format("{}: {}\r\n", name, value);
  if (!response.headers.contains("Content-Security-Policy"))
    out += "Content-Security-Policy: default-src 'none'; frame-ancestors 'none'\r\n";
  return out += "\r\n" + response.body;
}

std::string as_line(std::string_view text, std::size_t longest, Kept kept) {
  const auto byte = [&text](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0; };
  std::string out;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (c == '\n' || c == '\r' || c == '\t' || c == '\0') {
      if (!out.empty() && out.back() != ' ') out += ' ';
    } else if (byte(at) == 0xC2 && byte(at + 1) >= 0x80 && byte(at + 1) < 0xA0) {
      ++at;  // U+0080 to U+009F, which terminals interpret too
    } else if (byte(at) >= ' ' && c != '\x7f') {
      out += c;
    }
  }
  while (out.ends_with(' ')) out.pop_back();
  if (out.size() <= longest) return out;
  const auto within_character = [&out](std::size_t at) { return (static_cast<unsigned char>(out[at]) & 0xC0) == 0x80; };
  std::size_t cut = kept == Kept::Beginning ? longest - 3 : out.size() - (longest - 4);
  while (cut < out.size() && within_character(cut)) kept == Kept::Beginning ? --cut : ++cut;
  return kept == Kept::Beginning ? out.substr(0, cut) + "..." : "... " + out.substr(cut);
}

namespace {

using std::chrono::milliseconds;

constexpr std::size_t kShortestToken = 16;
constexpr milliseconds kEndTime = std::chrono::seconds(2);
constexpr milliseconds kWithoutDescriptors{100};

bool is_token_character(char c) { return c > 0x20 && c < 0x7F; }

bool is_any_address(const std::string& host) { return host == "0.0.0.0" || host == "::"; }

bool is_numeric(std::string host) {
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  in6_addr address;
  return ::inet_pton(AF_INET, host.c_str(), &address) == 1 || ::inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

/// Returns this host's full name in lower case; empty if it is unknown.
std::string full_host_name() {
  addrinfo hints{};
  hints.ai_flags = AI_CANONNAME;
  addrinfo* found = nullptr;
  if (::getaddrinfo(sys::host_name().c_str(), nullptr, &hints, &found) != 0) return {};
  std::string name = found->ai_canonname != nullptr ? lower(found->ai_canonname) : std::string();
  ::freeaddrinfo(found);
  return name;
}

/// Decides which clients are served. Compares MACs of tokens, made with a key of this process, since MACs have one
/// length, and are compared in constant time.
class Admission {
 public:
  Admission(HttpClients clients, const Address& at, const std::string& token)
      : clients_(clients),
        at_(at),
        key_(value_or_throw(Secret::generate())),
        cookie_(fmt::format("cohort_{}", at.port)) {
    if (!is_any_address(at.host)) names_.push_back(lower(at.host));
    if (!is_loopback_name(at.host)) names_.push_back(lower(sys::host_name()));
    if (is_any_address(at.host)) {
      if (std::string full = full_host_name(); !full.empty()) names_.push_back(std::move(full));
    }
    if (token.empty()) return;
    proof_ = hmac_sha256(key_.bytes(), token);
    // Browsers send cookies to other ports of this host too, so the cookie is not the token itself.
    value_or_throw(Secret::generate()).append_digits(pass_);
  }

  /// Returns the response to a request that must not reach the handler; nullopt if the handler answers.
  std::optional<HttpResponse> before(const HttpRequest& request) const {
    // Refuse foreign names that were made to resolve to this host (DNS rebinding).
    if (clients_ == HttpClients::Browsers && !is_our_name(request.host))
      return HttpResponse{.status = 421, .body = fmt::format("this page is at {}, not at another name\n", names())};
    if (!proof_) {
      if (request.host.empty() || is_our_name(request.host)) return std::nullopt;
      return HttpResponse{.status = 403, .body = "this is served to 127.0.0.1 and localhost alone\n"};
    }
    if (is_token(request.bearer)) return std::nullopt;
    if (clients_ == HttpClients::Machines)
      return HttpResponse{.status = 401, .body = "a token is needed: Authorization: Bearer TOKEN\n"};
    if (const auto query = request.query.find("token"); query != request.query.end() && is_token(query->second)) {
      if (request.path != "/") return std::nullopt;
      // Redirect, so that the token does not stay in the browser's history and address bar.
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
  /// True if `host` is an address or one of this host's names. All addresses are allowed, since an address cannot be
  /// rebound, and with a wildcard address, addresses of routers in front lead here too.
  bool is_our_name(const std::string& host) const {
    if (is_loopback_name(host)) return true;
    if (is_loopback_name(at_.host)) return false;
    return std::ranges::find(names_, host) != names_.end() || (is_any_address(at_.host) && is_numeric(host));
  }
  std::string names() const {
    if (is_loopback_name(at_.host)) return "localhost or 127.0.0.1";
    return fmt::format("{}{}", fmt::join(names_, " or "),
                       is_any_address(at_.host) ? " or an address of this host" : "");
  }

  HttpClients clients_;
  Address at_;
  std::vector<std::string> names_;  ///< in lower case, as in HttpRequest
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
        if (late && each->state != State::Ending) {  // then the kernel has no unsent bytes either
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
      if (!accepted) listen_again = deadline_in(kWithoutDescriptors);  // existing connections have to end first
      if (!accepted || !*accepted) return;
      if (connections.size() >= options.most_connections && !make_room()) continue;
      connections.push_back({.fd = std::move(**accepted), .until = deadline_in(options.request_time)});
    }
  }

  /// Closes the first connection that has its response, or else the first without a complete request, so that idle
  /// connections cannot keep clients out.
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

  /// Returns false if the connection is over.
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
    // Keep the socket until the client closes: closing it with unread bytes would discard the response.
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
