#include "comm/messages/message_header.h"

namespace cohort::comm::messages {

Result<MessageHeader> read_header(std::string_view bytes, std::size_t longest) {
  Result<MessageHeader> header = codec::decode<MessageHeader>(bytes.substr(0, kHeaderBytes));
  if (!header) return header;
  const bool eager = header->kind == HeaderKind::Eager;
  const std::size_t payload = bytes.size() - kHeaderBytes;
  // The count alone could be so large that its bytes are few.
  if (payload > longest || (eager && static_cast<std::size_t>(header->count) > longest) ||
      payload != (eager ? header->bytes() : 0)) {
    return fail(ErrorCode::Corrupt, "a message of another length than it says");
  }
  if (eager != (header->offer == 0) && header->kind != HeaderKind::Refused) {
    return fail(ErrorCode::Corrupt, "a message header without its number");
  }
  return header;
}

}  // namespace cohort::comm::messages
