#include "ps/command_record.h"

#include <algorithm>
#include <cstring>

namespace cohort::ps {
namespace {

struct Head {
  std::uint64_t digest;
  std::uint64_t incarnation;
  std::uint32_t size;
  std::uint32_t now;
  std::uint32_t worker;
  std::uint32_t method;
};
static_assert(sizeof(Head) == kRecordHead);

std::uint64_t digest_of(Head head, std::string_view body) noexcept {
  head.digest = 0;
  std::uint64_t digest = 0xCBF29CE484222325ULL;
  const auto take = [&](const char* bytes, std::size_t size) {
    for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + at, std::min(sizeof word, size - at));
      digest = (digest ^ word) * 0x9E3779B97F4A7C15ULL;
    }
  };
  take(reinterpret_cast<const char*>(&head), sizeof head);
  take(body.data(), body.size());
  return mix64(digest);
}

}  // namespace

std::string record_head(const Command& command) {
  Head head{0,           command.incarnation, static_cast<std::uint32_t>(command.body.size()),
            command.now, command.worker,      static_cast<std::uint32_t>(command.method)};
  head.digest = digest_of(head, command.body);
  return {reinterpret_cast<const char*>(&head), sizeof head};
}

std::optional<Command> next_record(std::string_view& bytes) {
  if (bytes.size() < sizeof(Head)) return std::nullopt;
  Head head;
  std::memcpy(&head, bytes.data(), sizeof head);
  const std::string_view rest = bytes.substr(sizeof head);
  if (head.size > rest.size() || head.digest != digest_of(head, rest.substr(0, head.size))) return std::nullopt;
  bytes = rest.substr(head.size);
  return Command{head.now, static_cast<Method>(head.method), head.worker, head.incarnation, rest.substr(0, head.size)};
}

}  // namespace cohort::ps
