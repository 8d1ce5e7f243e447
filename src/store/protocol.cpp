#include "store/protocol.h"

#include "base/records.h"

namespace cohort::store {
namespace {

constexpr codec::Limits kLimits{.longest_text = kLongestValue, .what = "store message"};

}  // namespace

template <class M, class A>
void visit_fields(M& m, A& a, const Request*) {
  a(m.amount, m.timeout_ms, codec::most(m.keys, kMostKeys, kLongestKey), m.value, m.expected);
  const bool needs_key = m.op != Op::Hello && m.op != Op::GoodBye && m.op != Op::Wait;
  a.demand(!needs_key || !m.keys.empty(), "an operation without a key");
}
template <class M, class A>
void visit_fields(M& m, A& a, const Reply*) {
  a(m.error, m.number, m.value, codec::most(m.keys, kMostKeys, kLongestKey));
}

std::string encode(const Request& request) { return codec::encode(request); }
std::string encode(const Reply& reply) { return codec::encode(reply); }
Result<Request> decode_request(std::uint8_t method, std::string_view bytes) {
  Request request;
  codec::Decoder in(bytes, kLimits);
  in.demand(method < kOpCount, "an operation that does not exist");
  request.op = static_cast<Op>(method);
  in(request);
  if (auto done = in.finish(); !done) return tl::unexpected(std::move(done).error());
  return request;
}
Result<Reply> decode_reply(std::string_view bytes) { return codec::decode<Reply>(bytes, kLimits); }

}  // namespace cohort::store
