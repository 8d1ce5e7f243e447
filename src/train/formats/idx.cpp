#include "train/formats/idx.h"

#include "base/files.h"
#include "train/formats/tensor.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <new>

namespace cohort::formats {
namespace {

constexpr int kGzipWindow = 15 + 16;  // zlib: the largest window, with gzip's header
constexpr std::size_t kChunk = std::size_t{1} << 16;

Bytef* zlib_pointer(std::span<const std::byte> bytes) {
  return const_cast<Bytef*>(reinterpret_cast<const Bytef*>(bytes.data()));  // zlib 1.2 takes next_in without const
}

uInt zlib_size(std::size_t size) {
  return static_cast<uInt>(std::min<std::size_t>(size, std::numeric_limits<uInt>::max()));
}

/// True if the bytes begin as gzip does.
bool is_gzip(std::span<const std::byte> bytes) noexcept {
  return bytes.size() >= 2 && bytes[0] == std::byte{0x1f} && bytes[1] == std::byte{0x8b};
}

/// Returns the content of all members. Returns Corrupt, naming `name`, if the checksum is wrong, the end is missing,
/// other data follows, or the content is longer than `max_bytes`.
Result<std::vector<std::byte>> gunzip(std::span<const std::byte> bytes, std::uint64_t max_bytes,
                                      const std::string& name) {
  z_stream stream{};
  if (inflateInit2(&stream, kGzipWindow) != Z_OK) throw std::bad_alloc();
  const std::unique_ptr<z_stream, int (*)(z_stream*)> guard(&stream, inflateEnd);
  std::vector<std::byte> content;
  std::array<std::byte, kChunk> chunk;
  std::span<const std::byte> rest = bytes;
  for (;;) {
    stream.next_in = zlib_pointer(rest);
    stream.avail_in = zlib_size(rest.size());
    const uInt offered = stream.avail_in;
    stream.next_out = reinterpret_cast<Bytef*>(chunk.data());
    stream.avail_out = static_cast<uInt>(chunk.size());
    const int status = inflate(&stream, Z_NO_FLUSH);
    rest = rest.subspan(offered - stream.avail_in);
    const std::size_t made = chunk.size() - stream.avail_out;
    if (made > max_bytes - content.size()) {
      return fail(ErrorCode::Corrupt, "{}: unpacks to more than {} bytes -- is it the right file?", name, max_bytes);
    }
    content.insert(content.end(), chunk.begin(), chunk.begin() + static_cast<std::ptrdiff_t>(made));
    if (status == Z_STREAM_END) {
      if (rest.empty()) return content;
      if (!is_gzip(rest)) {
        return fail(ErrorCode::Corrupt, "{}: {} bytes that are not gzip follow its end -- get the file again", name,
                    rest.size());
      }
      inflateReset(&stream);
    } else if (status == Z_BUF_ERROR || (status == Z_OK && rest.empty() && made == 0)) {
      return fail(ErrorCode::Corrupt, "{}: ends in the middle of its gzip data -- get the file again", name);
    } else if (status == Z_MEM_ERROR) {
      throw std::bad_alloc();
    } else if (status != Z_OK) {
      return fail(ErrorCode::Corrupt, "{}: damaged gzip data ({}) -- get the file again", name,
                  stream.msg != nullptr ? stream.msg : "unknown kind");
    }
  }
}

struct IdxType {
  std::uint8_t code;
  DType dtype;
};
constexpr std::array<IdxType, 6> kIdxTypes = {{{0x08, DType::UInt8},
                                               {0x09, DType::Int8},
                                               {0x0B, DType::Int16},
                                               {0x0C, DType::Int32},
                                               {0x0D, DType::Float32},
                                               {0x0E, DType::Float64}}};
constexpr std::size_t kMostIdxDimensions = 8;

void swap_bytes(std::span<std::byte> data, std::size_t element_size) {
  if (element_size == 1) return;
  for (std::size_t at = 0; at + element_size <= data.size(); at += element_size) {
    std::reverse(data.begin() + static_cast<std::ptrdiff_t>(at),
                 data.begin() + static_cast<std::ptrdiff_t>(at + element_size));
  }
}

std::string dimensions_text(std::span<const std::int64_t> shape) {
  std::string text;
  for (const std::int64_t dimension : shape) text += fmt::format("{}{}", text.empty() ? "" : " x ", dimension);
  return text.empty() ? "one" : text;
}

}  // namespace

std::int64_t IdxArray::elements() const noexcept {
  std::int64_t count = 1;
  for (const std::int64_t dimension : shape) count *= dimension;
  return count;
}

Result<IdxArray> parse_idx(std::span<const std::byte> bytes, const std::string& name, const ReadIdxOptions& options) {
  std::vector<std::byte> unpacked;
  if (is_gzip(bytes)) {
    auto content = gunzip(bytes, options.max_bytes, name);
    if (!content) return tl::unexpected(content.error());
    unpacked = std::move(*content);
    bytes = unpacked;
  }
  if (bytes.size() > options.max_bytes) {
    return fail(ErrorCode::Corrupt, "{}: {} bytes where at most {} make sense -- is it the right file?", name,
                bytes.size(), options.max_bytes);
  }
  if (bytes.size() < 4 || bytes[0] != std::byte{0} || bytes[1] != std::byte{0}) {
    return fail(ErrorCode::Corrupt,
                "{}: not an IDX file (it has to begin with two zero bytes) -- is it the right file?", name);
  }
  const auto code = std::to_integer<std::uint8_t>(bytes[2]);
  const auto* const type =
      std::find_if(kIdxTypes.begin(), kIdxTypes.end(), [code](const IdxType& row) { return row.code == code; });
  if (type == kIdxTypes.end()) {
    return fail(ErrorCode::Corrupt, "{}: unknown IDX element type 0x{:02x} (known: 08, 09, 0b, 0c, 0d, 0e)", name,
                code);
  }
  const auto dimensions = std::to_integer<std::size_t>(bytes[3]);
  if (dimensions > kMostIdxDimensions) {
    return fail(ErrorCode::Corrupt, "{}: {} dimensions where at most {} make sense", name, dimensions,
                kMostIdxDimensions);
  }
  const std::size_t header = 4 + 4 * dimensions;
  if (bytes.size() < header) return fail(ErrorCode::Corrupt, "{}: ends within its header -- get the file again", name);

  IdxArray array;
  array.dtype = type->dtype;
  for (std::size_t i = 0; i < dimensions; ++i) {
    std::int64_t dimension = 0;
    for (std::size_t j = 0; j < 4; ++j)
      dimension = dimension << 8 | std::to_integer<std::int64_t>(bytes[4 + 4 * i + j]);
    array.shape.push_back(dimension);
  }
  const auto elements = element_count(array.shape);
  std::uint64_t expected = 0;
  if (!elements || __builtin_mul_overflow(*elements, size_of(array.dtype), &expected) ||
      expected != bytes.size() - header) {
    return fail(ErrorCode::Corrupt,
                "{}: holds {} bytes of data, but its header promises {} elements of {} -- get the file again", name,
                bytes.size() - header, dimensions_text(array.shape), to_string(array.dtype));
  }
  array.data.assign(bytes.begin() + static_cast<std::ptrdiff_t>(header), bytes.end());
  swap_bytes(array.data, size_of(array.dtype));
  return array;
}

Result<IdxArray> read_idx(const std::string& path, const ReadIdxOptions& options) {
  auto bytes = sys::read_file(path, {.max_bytes = options.max_bytes});
  if (!bytes) return tl::unexpected(bytes.error());
  return parse_idx(bytes->bytes(), path, options);
}

}  // namespace cohort::formats
