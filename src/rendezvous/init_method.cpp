#include "rendezvous/init_method.h"

#include "base/parse.h"

namespace cohort::rendezvous {
namespace {

tl::unexpected<Error> bad_init_method(std::string_view text, std::string_view why) {
  return fail(ErrorCode::InvalidArgument,
              "init_method '{}': {} -- write env://, tcp://HOST:PORT, file:///PATH or unix://NAME", text, why);
}

Result<void> parse_query(std::string_view text, std::string_view query, InitMethod& method) {
  while (!query.empty()) {
    const std::size_t end = query.find('&');
    const std::string_view item = query.substr(0, end);
    query = end == std::string_view::npos ? std::string_view() : query.substr(end + 1);
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos) return bad_init_method(text, fmt::format("'{}' has no value", item));
    const std::string_view name = item.substr(0, equals);
    const auto value = parse_integer<int>(item.substr(equals + 1));
    const bool is_rank = name == "rank";
    if (!is_rank && name != "world_size")
      return bad_init_method(text, fmt::format("'{}' is neither rank nor world_size", name));
    if (!value || *value < (is_rank ? 0 : 1))
      return bad_init_method(text, fmt::format("'{}' is not a number from {}", item, is_rank ? 0 : 1));
    std::optional<int>& target = is_rank ? method.rank : method.world_size;
    if (target) return bad_init_method(text, fmt::format("{} is given twice", name));
    target = value;
  }
  return {};
}

}  // namespace

Result<InitMethod> parse_init_method(std::string_view text) {
  InitMethod method;
  const std::size_t scheme_end = text.find("://");
  if (scheme_end == std::string_view::npos) return bad_init_method(text, "there is no '://'");
  const std::string_view scheme = text.substr(0, scheme_end);
  std::string_view rest = text.substr(scheme_end + 3);
  const std::size_t question = rest.find('?');
  if (question != std::string_view::npos) {
    if (auto parsed = parse_query(text, rest.substr(question + 1), method); !parsed)
      return tl::unexpected(parsed.error());
    rest = rest.substr(0, question);
  }
  if (scheme == "env") {
    if (!rest.empty()) return bad_init_method(text, "env:// takes no place: it stands in MASTER_ADDR and MASTER_PORT");
    method.kind = InitMethod::Kind::Env;
    return method;
  }
  if (scheme == "tcp") {
    if (rest.ends_with('/')) rest.remove_suffix(1);
    auto address = net::parse_address(rest);
    if (!address) return tl::unexpected(address.error());
    if (address->port == 0) return bad_init_method(text, "the port is 0; all ranks have to know the same one");
    method.kind = InitMethod::Kind::Tcp;
    method.address = *std::move(address);
    return method;
  }
  if (scheme == "file") {
    if (!rest.starts_with('/')) return bad_init_method(text, "the path has to be absolute: file:///PATH");
    if (rest.ends_with('/')) return bad_init_method(text, "the path is a folder's");
    if (rest.find('\0') != std::string_view::npos) return bad_init_method(text, "the path contains a NUL");
    method.kind = InitMethod::Kind::File;
    method.path = rest;
    return method;
  }
  if (scheme == "unix") {
    if (rest.empty() || rest.size() > 200) return bad_init_method(text, "the name has to have 1 to 200 bytes");
    method.kind = InitMethod::Kind::Unix;
    method.name = rest;
    return method;
  }
  return bad_init_method(text, fmt::format("'{}' is not a way to meet", scheme));
}

Result<TransportKind> parse_transport(std::string_view text, std::string_view from) {
  if (text.empty() || text == "tcp") return TransportKind::Tcp;
  if (text == "mpi") return TransportKind::Mpi;
  return fail(ErrorCode::InvalidArgument, "{}='{}': there is no such transport -- give tcp or mpi", from, text);
}

}  // namespace cohort::rendezvous
