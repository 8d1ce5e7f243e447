// What two ranks tell each other of a message. A small one comes with its payload. A larger one is offered, and then
// its receiver reads the payload, or asks for it, or refuses it. Plain data; both ends are of one build.
#pragma once

#include <cohort/dtype.h>

#include <cstdint>

namespace cohort::comm::messages {

enum class LetterKind : std::uint8_t {
  None = 0,
  Eager,    ///< a message with its payload: its send is over
  Offer,    ///< a message whose payload is still at its sender
  Grant,    ///< back: the offered payload may come
  Done,     ///< back: what was offered has been received
  Refused,  ///< back: what was offered, or an eager message (offer 0), does not fit its receive
  OfPath,   ///< for the path itself: the matcher does not see it
};

struct Letter {
  LetterKind kind = LetterKind::Eager;
  DType dtype = DType::Float32;     ///< as sent
  DType expected = DType::Float32;  ///< of Refused: by the receive
  std::uint8_t unused = 0;
  std::int32_t tag = 0;
  std::int64_t count = 0;  ///< elements, as sent
  std::int64_t expected_count = 0;
  std::uint64_t offer = 0;    ///< the sender's number of the offer that it is or that it answers
  std::uint64_t address = 0;  ///< of an offer: where the payload lies, in the sender's process
};

}  // namespace cohort::comm::messages
