#include "store/protocol.h"

#include "base/records.h"

namespace cohort::store {
namespace {

constexpr codec::Limits kLimits{.longest_text = kLongestValue, .what = "store message"};

}  // namespace

template <class M, class A>
void visit_fields(M& m, A& a, const Request*) {
  a(codec::below(m.op, kOpCount, "an operation that does not exist"), m.id, m.amount, m.timeout_ms,
    codec::most(m.keys, kMostKeys, kLongestKey), m.value, m.expected);
  const bool needs_key = m.op != Op::Hello && m.op != Op::GoodBye && m.op != Op::Wait;
  a.demand(!needs_key || !m.keys.empty(), "an operation without a key");
}
template <class M, class A>
void visit_fields(M& m, A& a, const Reply*) {
  a(m.id, m.error, m.number, m.value, codec::most(m.keys, kMostKeys, kLongestKey));
}

std::string encode(const Request& request) { return codec::encode(request); }
std::string encode(const Reply& reply) { return codec::encode(reply); }
Result<Request> decode_request(std::string_view bytes) { return codec::decode<Request>(bytes, kLimits); }
Result<Reply> decode_reply(std::string_view bytes) { return codec::decode<Reply>(bytes, kLimits); }

}  // namespace cohort::store
