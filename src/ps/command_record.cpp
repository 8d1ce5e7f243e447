#include "ps/command_record.h"

#include "store/file_log.h"

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

std::optional<Command> next_record(std::string_view& bytes, std::optional<Error>* damaged) {
  const auto framed = store::unframe(bytes, kLongest);
  if (!framed) {
    if (damaged != nullptr) *damaged = framed.error();
    return std::nullopt;
  }
  if (!*framed) return std::nullopt;
  const std::string_view body = **framed;
  if (body.size() < kHead) {
    if (damaged != nullptr) *damaged = Error(ErrorCode::Corrupt, fmt::format("a record of {} bytes", body.size()));
    return std::nullopt;
  }
  Head head;
  std::memcpy(&head, body.data(), kHead);
  bytes.remove_prefix(store::kFrame + body.size());
  return Command{head.now, static_cast<Method>(head.method), head.worker, head.incarnation, body.substr(kHead)};
}

}  // namespace cohort::ps
