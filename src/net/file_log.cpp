
#include "net/file_log.h"
#include "base/records.h"
#include "net/store.h"

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

namespace {

constexpr std::string_view kMagic = "COHORTFS";
constexpr std::uint32_t kFormat = 1;
constexpr std::size_t kLongestBody = kLongestValue + kLongestKey + 64;
constexpr std::size_t kLongestHeader = 4096;

std::string framed(std::string_view body) { return frame_of(body).append(body); }

tl::unexpected<Error> malformed() { return fail(ErrorCode::Corrupt, "a record is malformed"); }

}  // namespace

void visit_fields(auto& m, auto& a, const FileHeader*) {
  a(codec::longest(m.nonce, 64), codec::longest(m.boot_id, 256), codec::longest(m.host, 256), m.pid, m.created, m.size,
    codec::longest(m.meeting, 1024));
}
void visit_fields(auto& m, auto& a, const FileRecord*) {
  a(codec::below(m.kind, kRecordKinds, "of no kind"), m.slot, codec::longest(m.key, kLongestKey),
    codec::longest(m.value, kLongestValue));
}

std::string encode(const FileHeader& header) {
  return std::string(kMagic) + codec::encode(kFormat) + framed(codec::encode(header));
}

std::string encode(const FileRecord& record) { return framed(codec::encode(record)); }

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
  auto header = codec::decode<FileHeader>(**body);
  if (!header) return malformed();
  return Decoded<FileHeader>{*std::move(header), kMagic.size() + sizeof kFormat + kFrame + (*body)->size()};
}

Result<std::optional<Decoded<FileRecord>>> decode_record(std::string_view bytes) {
  const auto body = unframe(bytes, kLongestBody);
  if (!body) return tl::unexpected(body.error());
  if (!*body) return std::optional<Decoded<FileRecord>>();
  auto record = codec::decode<FileRecord>(**body);
  if (!record) return malformed();
  return Decoded<FileRecord>{*std::move(record), kFrame + (*body)->size()};
}

}  // namespace cohort::store
