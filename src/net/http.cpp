#include "net/http.h"

#include "base/parse.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>

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

/// Takes what stands before `end`, and that; all if it is not there.
std::string_view take_until(std::string_view& text, char end) {
  const auto at = text.find(end);
  const std::string_view taken = text.substr(0, at);
  text.remove_prefix(at == std::string_view::npos ? text.size() : at + 1);
  return taken;
}

std::optional<int> digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return std::nullopt;
}

std::optional<std::string> decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    if (i + 2 >= text.size()) return std::nullopt;
    const auto high = digit(text[i + 1]), low = digit(text[i + 2]);
    if (!high || !low) return std::nullopt;
    out += static_cast<char>(*high * 16 + *low);
    i += 2;
  }
  return out;
}

/// A name of a header or method.
bool is_token(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           (c != '\0' && std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos);
  });
}

tl::unexpected<HttpRefusal> refuse(int status, std::string why) {
  return tl::unexpected(HttpRefusal{status, std::move(why)});
}

/// "[::1]:80", "localhost:80", "127.0.0.1" without brackets and port.
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
  std::string_view line = take_until(head, '\n');
  if (!line.ends_with('\r')) return refuse(400, "a line ends with CR LF");
  line.remove_suffix(1);
  const std::string_view method = take_until(line, ' ');
  std::string_view target = take_until(line, ' ');
  if (!is_token(method) || !target.starts_with('/') || (line != "HTTP/1.1" && line != "HTTP/1.0"))
    return refuse(400, "that is no request of HTTP/1.1");
  if (method != "GET" && method != "HEAD") return refuse(405, "GET and HEAD are answered here");
  request.method = method;
  const auto path = decoded(take_until(target, '?'));
  if (!path) return refuse(400, "the path has a wrong escape");
  request.path = *path;
  while (!target.empty()) {
    std::string_view value = take_until(target, '&');
    const auto name = decoded(take_until(value, '='));
    const auto text = decoded(value);
    if (!name || !text) return refuse(400, "the query has a wrong escape");
    request.query.emplace(*name, *text);
  }
  bool has_host = false, has_authorization = false;
  while (!head.empty()) {
    std::string_view field = take_until(head, '\n');
    if (!field.ends_with('\r')) return refuse(400, "a line ends with CR LF");
    field.remove_suffix(1);
    if (field.find('\r') != std::string_view::npos) return refuse(400, "CR stands alone");
    const bool has_name = field.find(':') != std::string_view::npos;
    const std::string_view spelling = take_until(field, ':');
    if (!has_name || !is_token(spelling)) return refuse(400, "that is no header");
    const std::string name = lower(spelling);
    const std::string_view value = trimmed(field);
    if (name == "host") {
      const auto host = host_name(value);
      if (!host || std::exchange(has_host, true)) return refuse(400, "there is one Host");
      request.host = *host;
    } else if (name == "cookie") {
      for (std::string_view rest = value; !rest.empty();) {
        std::string_view text = take_until(rest, ';');
        const std::string_view cookie = trimmed(take_until(text, '='));
        request.cookies.emplace(cookie, trimmed(text));
      }
    } else if (name == "authorization") {
      if (std::exchange(has_authorization, true)) return refuse(400, "there is one Authorization");
      std::string_view shown = value;
      if (lower(take_until(shown, ' ')) == "bearer") request.bearer = trimmed(shown);
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
    std::string_view range = take_until(accept, ',');
    const std::string type = lower(trimmed(take_until(range, ';')));
    double weight = 1;
    while (!range.empty()) {
      const std::string_view parameter = trimmed(take_until(range, ';'));
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

Result<HttpHead> parse_response_head(std::string_view bytes) {
  const auto end = head_end(bytes);
  if (!end || !bytes.starts_with("HTTP/1.") || bytes.size() < 12)
    return fail(ErrorCode::Corrupt, "what answers there is no page of `cohort watch`");
  const auto status = parse_integer<int>(bytes.substr(9, 3));
  if (!status || *status < 100) return fail(ErrorCode::Corrupt, "what answers there is no page of `cohort watch`");
  return HttpHead{*status, *end};
}

std::string as_line(std::string_view answer) {
  constexpr std::size_t kLongest = 500;
  std::string line(answer.substr(0, kLongest));
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  // U+0080 to U+009F, which terminals obey, too.
  for (std::size_t at = 0; (at = line.find('\xC2', at)) != std::string::npos && at + 1 < line.size(); ++at) {
    const auto next = static_cast<unsigned char>(line[at + 1]);
    if (next >= 0x80 && next < 0xA0) line.replace(at, 2, "  ");
  }
  while (line.ends_with(' ')) line.pop_back();
  return answer.size() > kLongest ? line + "..." : line;
}

}  // namespace cohort::net
