#include "store/frame.h"

#include "base/codec.h"

#include <zlib.h>

namespace cohort::store {
namespace {

std::uint32_t checksum(std::string_view bytes, std::uint32_t before = 0) {
  return static_cast<std::uint32_t>(::crc32_z(before, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace

std::string frame_of(std::string_view first, std::string_view second) {
  codec::Writer out;
  out.number(static_cast<std::uint32_t>(first.size() + second.size()));
  const std::uint32_t sum_of_size = checksum(out.bytes());
  out.number(sum_of_size).number(second.empty() ? checksum(first) : checksum(second, checksum(first)));
  return out.take();
}

Result<std::optional<std::string_view>> unframe(std::string_view bytes, std::size_t longest) {
  codec::Reader in(bytes);
  const auto size = in.number<std::uint32_t>();
  const auto sum_of_size = in.number<std::uint32_t>();
  if (!size || !sum_of_size) return std::optional<std::string_view>();
  if (checksum(bytes.substr(0, sizeof *size)) != *sum_of_size)
    return fail(ErrorCode::Corrupt, "the checksum of a record's length is wrong");
  const auto sum = in.number<std::uint32_t>();
  if (!sum) return std::optional<std::string_view>();
  if (*size > longest)
    return fail(ErrorCode::Corrupt, "a record of {} bytes, where at most {} are written", *size, longest);
  if (in.rest().size() < *size) return std::optional<std::string_view>();
  const std::string_view body = in.rest().substr(0, *size);
  if (checksum(body) != *sum) return fail(ErrorCode::Corrupt, "a record's checksum is wrong");
  return std::optional<std::string_view>(body);
}

}  // namespace cohort::store
