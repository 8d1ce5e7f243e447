#include "comm/messages/letter.h"

namespace cohort::comm::messages {

Result<Letter> read_letter(std::string_view bytes, std::size_t longest) {
  Result<Letter> letter = codec::decode<Letter>(bytes.substr(0, kLetterBytes));
  if (!letter) return letter;
  const bool eager = letter->kind == LetterKind::Eager;
  const std::size_t payload = bytes.size() - kLetterBytes;
  // The count alone could be so large that its bytes are few.
  if (payload > longest || (eager && static_cast<std::size_t>(letter->count) > longest) ||
      payload != (eager ? letter->bytes() : 0)) {
    return fail(ErrorCode::Corrupt, "a message of another length than it says");
  }
  if (eager != (letter->offer == 0) && letter->kind != LetterKind::Refused) {
    return fail(ErrorCode::Corrupt, "a message header without its number");
  }
  return letter;
}

}  // namespace cohort::comm::messages
