#include "store/file_log.h"

#include "base/codec.h"
#include "store/meeting_store.h"

#include <zlib.h>

namespace cohort::store {
namespace {

constexpr std::string_view kMagic = "COHORTFS";
constexpr std::uint32_t kFormat = 1;
// Length, its checksum, the body's. The length has its own: a damaged one would pass for a record that is being
// written.
constexpr std::size_t kFrame = 12;
constexpr std::size_t kLongestBody = kLongestValue + kLongestKey + 64;
constexpr std::size_t kLongestHeader = 4096;

std::uint32_t checksum(std::string_view bytes) {
  return static_cast<std::uint32_t>(::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

std::string framed(std::string_view body) {
  codec::Writer out;
  out.number(static_cast<std::uint32_t>(body.size()));
  const std::uint32_t sum_of_size = checksum(out.bytes());
  out.number(sum_of_size).number(checksum(body));
  return out.take().append(body);
}

// The body of the frame at the front; nullopt if it is not complete.
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

tl::unexpected<Error> malformed() { return fail(ErrorCode::Corrupt, "a record is malformed"); }

}  // namespace

std::string encode(const FileHeader& header) {
  codec::Writer out;
  out.text(header.nonce)
      .text(header.boot_id)
      .text(header.host)
      .number(header.pid)
      .number(header.created)
      .number(header.size);
  out.text(header.meeting);
  codec::Writer front;
  front.number(kFormat);
  return std::string(kMagic) + front.take() + framed(out.bytes());
}

std::string encode(const FileRecord& record) {
  codec::Writer out;
  out.number(static_cast<std::uint8_t>(record.kind)).number(record.slot).text(record.key).text(record.value);
  return framed(out.bytes());
}

Result<std::optional<Decoded<FileHeader>>> decode_header(std::string_view bytes) {
  const std::string_view magic = bytes.substr(0, kMagic.size());
  if (magic != kMagic.substr(0, magic.size())) return fail(ErrorCode::Corrupt, "it is not a Cohort file store");
  if (bytes.size() < kMagic.size() + sizeof kFormat) return std::optional<Decoded<FileHeader>>();
  codec::Reader front(bytes.substr(kMagic.size()));
  const auto format = front.number<std::uint32_t>();
  if (!format || *format != kFormat) {
    return fail(ErrorCode::Corrupt, "it has format version {}, and this Cohort reads version {}", format ? *format : 0,
                kFormat);
  }
  const auto body = unframe(front.rest(), kLongestHeader);
  if (!body) return tl::unexpected(body.error());
  if (!*body) return std::optional<Decoded<FileHeader>>();
  codec::Reader in(**body);
  FileHeader header;
  const auto nonce = in.text(64);
  const auto boot_id = in.text(256);
  const auto host = in.text(256);
  const auto pid = in.number<std::int64_t>();
  const auto created = in.number<std::int64_t>();
  const auto size = in.number<std::int32_t>();
  const auto meeting = in.text(1024);
  if (!nonce || !boot_id || !host || !pid || !created || !size || !meeting || !in.at_end()) return malformed();
  header = {std::string(*nonce),  std::string(*boot_id), std::string(*host), *pid, *created, *size,
            std::string(*meeting)};
  return Decoded<FileHeader>{std::move(header), kMagic.size() + sizeof kFormat + kFrame + (*body)->size()};
}

Result<std::optional<Decoded<FileRecord>>> decode_record(std::string_view bytes) {
  const auto body = unframe(bytes, kLongestBody);
  if (!body) return tl::unexpected(body.error());
  if (!*body) return std::optional<Decoded<FileRecord>>();
  codec::Reader in(**body);
  const auto kind = in.number<std::uint8_t>();
  const auto slot = in.number<std::uint32_t>();
  const auto key = in.text(kLongestKey);
  const auto value = in.text(kLongestValue);
  if (!kind || *kind >= kRecordKinds || !slot || !key || !value || !in.at_end()) return malformed();
  FileRecord record{static_cast<RecordKind>(*kind), *slot, std::string(*key), std::string(*value)};
  return Decoded<FileRecord>{std::move(record), kFrame + (*body)->size()};
}

}  // namespace cohort::store
