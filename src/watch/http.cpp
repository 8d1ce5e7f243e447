#include "watch/http.h"

#include "base/parse.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace cohort::watch {
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

/// "[::1]:80", "localhost:80", "127.0.0.1" without the port.
std::optional<std::string> host_name(std::string_view value) {
  std::string_view name = value;
  std::string_view port;
  if (value.starts_with('[')) {
    const auto close = value.find(']');
    if (close == std::string_view::npos) return std::nullopt;
    name = value.substr(0, close + 1);
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
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 421: return "Misdirected Request";
    case 431: return "Request Header Fields Too Large";
    case 503: return "Service Unavailable";
    default: return "Error";
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
  if (method != "GET") return refuse(405, "only GET is answered here");
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
  bool has_host = false;
  while (!head.empty()) {
    std::string_view field = take_until(head, '\n');
    if (!field.ends_with('\r')) return refuse(400, "a line ends with CR LF");
    field.remove_suffix(1);
    if (field.find('\r') != std::string_view::npos) return refuse(400, "CR stands alone");
    const std::string_view spelling = take_until(field, ':');
    if (!is_token(spelling)) return refuse(400, "that is no header");
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
      if (value.starts_with("Bearer ")) request.bearer = trimmed(value.substr(7));
    } else if (name == "transfer-encoding" || (name == "content-length" && value != "0")) {
      return refuse(400, "a GET request has no body");
    }
  }
  if (!has_host) return refuse(400, "there is no Host");
  return request;
}

std::string to_bytes(const HttpResponse& response) {
  std::string out = fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\nCache-Control: no-store\r\n"
      "X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCross-Origin-Opener-Policy: same-origin\r\n"
      "Cross-Origin-Resource-Policy: same-origin\r\n",
      response.status, reason_of(response.status), response.type, response.body.size());
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

}  // namespace cohort::watch
