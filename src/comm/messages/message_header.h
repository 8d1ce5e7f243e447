// What two ranks tell each other of a message. A small one comes with its payload. A larger one is offered, and then
// its receiver reads the payload, or asks for it, or refuses it. Plain data; both ends are of one build.
#pragma once

#include "base/records.h"
#include "base/result.h"

#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace cohort::comm::messages {

enum class HeaderKind : std::uint8_t {
  None = 0,
  Eager,      ///< a message with its payload: its send is over
  Offer,      ///< a message whose payload is still at its sender
  Grant,      ///< back: the offered payload may come
  Done,       ///< back: what was offered has been received
  Refused,    ///< back: what was offered, or an eager message (offer 0), does not fit its receive
  OfChannel,  ///< for the channel itself: the matcher does not see it
};
inline constexpr int kHeaderKinds = 7;

struct MessageHeader {
  HeaderKind kind = HeaderKind::Eager;
  DType dtype = DType::Float32;     ///< as sent
  DType expected = DType::Float32;  ///< of Refused: by the receive
  std::int32_t tag = 0;
  std::int64_t count = 0;  ///< elements, as sent
  std::int64_t expected_count = 0;
  std::uint64_t offer = 0;    ///< the sender's number of the offer that it is or that it answers
  std::uint64_t address = 0;  ///< of an offer: where the payload lies, in the sender's process

  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count) * size_of(dtype); }
};

/// Between processes that share no memory: all but the address.
template <class M, class A>
void visit_fields(M& m, A& archive, const MessageHeader*) {
  archive(codec::below(m.kind, kHeaderKinds, "a message header of unknown kind"),
          codec::below(m.dtype, kDTypeCount, "a type that does not exist"),
          codec::below(m.expected, kDTypeCount, "a type that does not exist"), m.tag, m.count, m.expected_count,
          m.offer);
  archive.demand(m.kind != HeaderKind::None && m.count >= 0 && m.expected_count >= 0, "an empty message header");
}
inline constexpr std::size_t kHeaderBytes = 31;

/// The header at the beginning of `bytes`; behind it is its payload, if it is Eager, of at most `longest` bytes.
Result<MessageHeader> read_header(std::string_view bytes, std::size_t longest);

}  // namespace cohort::comm::messages
