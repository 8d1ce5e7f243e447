#include "comm/engine/channel.h"

#include <fmt/format.h>

namespace cohort::comm::messages {

Result<MessageHeader> read_header(std::string_view bytes, std::size_t longest) {
  Result<MessageHeader> header = codec::decode<MessageHeader>(bytes.substr(0, kHeaderBytes));
  if (!header) return header;
  const bool eager = header->kind == HeaderKind::Eager;
  const std::size_t payload = bytes.size() - kHeaderBytes;
  // Checks the count itself, since its number of bytes may overflow to a small number.
  if (payload > longest || (eager && static_cast<std::size_t>(header->count) > longest) ||
      payload != (eager ? header->bytes() : 0)) {
    return fail(ErrorCode::Corrupt, "a message of another length than it says");
  }
  if (eager != (header->offer == 0) && header->kind != HeaderKind::Refused) {
    return fail(ErrorCode::Corrupt, "a message header without its number");
  }
  return header;
}

MessageWork::~MessageWork() = default;

std::string to_string(const Message& message) {
  const std::string peer = message.peer == kAnySource ? "any rank" : fmt::format("rank {}", message.peer);
  return fmt::format("{}({}[{}], {} {}, tag {})", name_of(message.kind), cohort::to_string(message.dtype),
                     message.count, message.kind == Kind::Send ? "to" : "from", peer, message.tag);
}

Error refusal_of(const Members& members, const Message& own, const MessageHeader& header) {
  const int rank = members.rank();
  const bool sends = own.kind == Kind::Send;
  const std::string& host = members.host_name(rank);
  const std::string why =
      fmt::format("rank {} sends {}[{}] (tag {}) to rank {}, which receives {}[{}]", sends ? rank : own.peer,
                  cohort::to_string(header.dtype), header.count, header.tag, sends ? own.peer : rank,
                  cohort::to_string(header.expected), header.expected_count);
  ErrorContext context;
  context.rank = rank;
  context.host = host;
  context.peer = own.peer;
  context.operation = to_string(own);
  context.sequence = own.number;
  context.cause = why;
  return Error(ErrorCode::Mismatch,
               fmt::format("{} refused -- rank {} ({}) -- {} -- give both the same type and count", name_of(own.kind),
                           rank, host, why),
               std::move(context));
}

}  // namespace cohort::comm::messages
