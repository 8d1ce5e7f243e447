#include "store/protocol.h"

#include "base/codec.h"

namespace cohort::store {
namespace {

constexpr std::size_t kLongestErrorText = 8192;

void put_optional(codec::Writer& out, const std::optional<std::string>& value) {
  out.number(static_cast<std::uint8_t>(value.has_value()));
  if (value) out.text(*value);
}

void put_keys(codec::Writer& out, const std::vector<std::string>& keys) {
  out.number(static_cast<std::uint32_t>(keys.size()));
  for (const std::string& key : keys) out.text(key);
}

// Takes parts one after the other and remembers the first failure.
class Parts {
 public:
  explicit Parts(std::string_view bytes) : in_(bytes) {}

  template <class T>
  T number() {
    if (error_) return {};
    auto value = in_.number<T>();
    if (value) return *value;
    error_ = value.error();
    return {};
  }
  std::string text(std::size_t longest) {
    if (error_) return {};
    auto value = in_.text(longest);
    if (value) return std::string(*value);
    error_ = value.error();
    return {};
  }
  std::optional<std::string> optional_text(std::size_t longest) {
    const auto present = number<std::uint8_t>();
    if (present > 1) refuse("a flag is neither 0 nor 1");
    if (present != 1) return std::nullopt;
    return text(longest);
  }
  std::vector<std::string> keys() {
    const auto count = number<std::uint32_t>();
    if (count > kMostKeys) refuse("more keys than are allowed");
    std::vector<std::string> result;
    for (std::uint32_t i = 0; i < count && !error_; ++i) result.push_back(text(kLongestKey));
    return result;
  }
  void refuse(std::string_view why) {
    if (!error_) error_ = Error(ErrorCode::Corrupt, fmt::format("store message: {}", why));
  }
  template <class T>
  Result<T> finish(T value) {
    if (!error_ && !in_.at_end()) refuse("bytes after its end");
    if (error_) return tl::unexpected(*error_);
    return value;
  }

 private:
  codec::Reader in_;
  std::optional<Error> error_;
};

}  // namespace

std::string encode(const Request& request) {
  codec::Writer out;
  out.number(static_cast<std::uint8_t>(request.op))
      .number(request.id)
      .number(request.amount)
      .number(request.timeout_ms);
  put_keys(out, request.keys);
  out.text(request.value);
  put_optional(out, request.expected);
  return out.take();
}

std::string encode(const Reply& reply) {
  codec::Writer out;
  out.number(reply.id).number(static_cast<std::uint8_t>(reply.error.has_value()));
  if (reply.error) {
    out.number(static_cast<std::uint8_t>(reply.error->code()));
    out.text(std::string_view(reply.error->what()).substr(0, kLongestErrorText));
  }
  out.number(reply.number);
  put_optional(out, reply.value);
  put_keys(out, reply.keys);
  return out.take();
}

Result<Request> decode_request(std::string_view bytes) {
  Parts in(bytes);
  Request request;
  const auto op = in.number<std::uint8_t>();
  if (op >= kOpCount) in.refuse("an operation that does not exist");
  request.op = static_cast<Op>(op);
  request.id = in.number<std::uint64_t>();
  request.amount = in.number<std::int64_t>();
  request.timeout_ms = in.number<std::uint64_t>();
  request.keys = in.keys();
  request.value = in.text(kLongestValue);
  request.expected = in.optional_text(kLongestValue);
  const bool needs_key = request.op != Op::Hello && request.op != Op::GoodBye && request.op != Op::Wait;
  if (needs_key && request.keys.empty()) in.refuse("an operation without a key");
  return in.finish(std::move(request));
}

Result<Reply> decode_reply(std::string_view bytes) {
  Parts in(bytes);
  Reply reply;
  reply.id = in.number<std::uint64_t>();
  const auto failed = in.number<std::uint8_t>();
  if (failed > 1) in.refuse("a flag is neither 0 nor 1");
  if (failed == 1) {
    const auto code = in.number<std::uint8_t>();
    if (code > static_cast<std::uint8_t>(ErrorCode::Internal)) in.refuse("an error code that does not exist");
    const std::string message = in.text(kLongestErrorText);
    reply.error = Error(static_cast<ErrorCode>(code), message);
  }
  reply.number = in.number<std::int64_t>();
  reply.value = in.optional_text(kLongestValue);
  reply.keys = in.keys();
  return in.finish(std::move(reply));
}

}  // namespace cohort::store
