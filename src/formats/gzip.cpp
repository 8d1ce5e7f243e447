#include "formats/gzip.h"

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

}  // namespace

bool is_gzip(std::span<const std::byte> bytes) noexcept {
  return bytes.size() >= 2 && bytes[0] == std::byte{0x1f} && bytes[1] == std::byte{0x8b};
}

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

std::vector<std::byte> gzip(std::span<const std::byte> bytes) {
  z_stream stream{};
  if (deflateInit2(&stream, Z_BEST_COMPRESSION, Z_DEFLATED, kGzipWindow, 9, Z_DEFAULT_STRATEGY) != Z_OK) {
    throw std::bad_alloc();
  }
  const std::unique_ptr<z_stream, int (*)(z_stream*)> guard(&stream, deflateEnd);
  std::vector<std::byte> packed;
  std::array<std::byte, kChunk> chunk;
  std::span<const std::byte> rest = bytes;
  int status = Z_OK;
  while (status != Z_STREAM_END) {
    stream.next_in = zlib_pointer(rest);
    stream.avail_in = zlib_size(rest.size());
    const uInt offered = stream.avail_in;
    stream.next_out = reinterpret_cast<Bytef*>(chunk.data());
    stream.avail_out = static_cast<uInt>(chunk.size());
    status = deflate(&stream, offered == rest.size() ? Z_FINISH : Z_NO_FLUSH);
    rest = rest.subspan(offered - stream.avail_in);
    const auto made = static_cast<std::ptrdiff_t>(chunk.size() - stream.avail_out);
    packed.insert(packed.end(), chunk.begin(), chunk.begin() + made);
  }
  return packed;
}

}  // namespace cohort::formats
