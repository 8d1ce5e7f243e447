#include "ps/command_record.h"

#include "store/frame.h"

#include <cstring>

namespace cohort::ps {
namespace {

struct Head {
  std::uint64_t incarnation;
  std::uint32_t now;
  std::uint32_t worker;
  std::uint32_t method;
};
constexpr std::size_t kHead = kRecordHead - store::kFrame;
static_assert(offsetof(Head, method) + sizeof(Head::method) == kHead);

constexpr std::size_t kLongest = kLongestMessage + (std::size_t{64} << 10);

}  // namespace

std::string record_head(const Command& command) {
  const Head head{command.incarnation, command.now, command.worker, static_cast<std::uint32_t>(command.method)};
  const std::string_view bytes(reinterpret_cast<const char*>(&head), kHead);
  return store::frame_of(bytes, command.body).append(bytes);
}

Result<std::optional<Command>> next_record(std::string_view& bytes) {
  const auto framed = store::unframe(bytes, kLongest);
  if (!framed) return tl::unexpected(framed.error());
  if (!*framed) return std::optional<Command>();
  const std::string_view body = **framed;
  if (body.size() < kHead) return fail(ErrorCode::Corrupt, "a record of {} bytes", body.size());
  Head head;
  std::memcpy(&head, body.data(), kHead);
  bytes.remove_prefix(store::kFrame + body.size());
  return Command{head.now, static_cast<Method>(head.method), head.worker, head.incarnation, body.substr(kHead)};
}

}  // namespace cohort::ps
