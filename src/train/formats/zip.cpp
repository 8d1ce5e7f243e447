#include "train/formats/zip.h"

#include "base/records.h"

#include <zlib.h>

#include <algorithm>

namespace cohort::formats {
namespace {

constexpr std::uint32_t kLocal = 0x04034b50, kCentral = 0x02014b50, kEnd = 0x06054b50;
constexpr std::uint32_t kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
constexpr std::size_t kLocalSize = 30, kCentralSize = 46, kEndSize = 22, kEnd64Size = 56, kLocator64Size = 20;
constexpr std::uint32_t kMax32 = 0xffffffff;
constexpr std::uint16_t kMax16 = 0xffff;
constexpr std::uint16_t kFlagEncrypted = 0x1, kFlagDescriptor = 0x8, kFlagStrong = 0x40, kFlagUtf8 = 0x800;
constexpr std::uint16_t kExtra64 = 0x0001, kExtraPadding = 0x4246;  // "FB", as in torch's archives
constexpr std::uint16_t kVersion = 45;                              // zip64
constexpr std::uint16_t kDate = (0 << 9) | (1 << 5) | 1;            // 1 January 1980: the same bytes every time
constexpr std::size_t kAlignment = 64;

template <class T>
T number_at(std::span<const std::byte> bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

std::string_view text_at(std::span<const std::byte> bytes, std::size_t at, std::size_t size) {
  return {reinterpret_cast<const char*>(bytes.data()) + at, size};
}

std::uint32_t crc_of(std::span<const std::byte> data) {
  return static_cast<std::uint32_t>(crc32_z(0, reinterpret_cast<const Bytef*>(data.data()), data.size()));
}

/// Replaces the fields that are saturated by the numbers of the zip64 extra field, in order.
bool widen(std::span<const std::byte> extra, std::initializer_list<std::uint64_t*> fields) {
  for (std::size_t at = 0; at + 4 <= extra.size();) {
    const auto id = number_at<std::uint16_t>(extra, at);
    const std::size_t size = number_at<std::uint16_t>(extra, at + 2);
    at += 4;
    if (size > extra.size() - at) return false;
    if (id == kExtra64) {
      std::size_t next = at;
      for (std::uint64_t* field : fields) {
        if (*field != kMax32) continue;
        if (next + 8 > at + size) return false;
        *field = number_at<std::uint64_t>(extra, next);
        next += 8;
      }
      return true;
    }
    at += size;
  }
  return std::none_of(fields.begin(), fields.end(), [](const std::uint64_t* field) { return *field == kMax32; });
}

struct Directory {
  std::uint64_t begin = 0, size = 0, entries = 0;
};

tl::unexpected<Error> corrupt_zip(const std::string& name, std::string_view what) {
  return fail(ErrorCode::Corrupt, "{}: not a sound zip archive -- {} -- write or get the file again", name, what);
}

Result<Directory> find_directory(std::span<const std::byte> bytes, const std::string& name) {
  if (bytes.size() < kEndSize) return corrupt_zip(name, fmt::format("it has only {} bytes", bytes.size()));
  const std::size_t first = bytes.size() - kEndSize > kMax16 ? bytes.size() - kEndSize - kMax16 : 0;
  std::size_t end = bytes.size() - kEndSize;
  while (number_at<std::uint32_t>(bytes, end) != kEnd ||
         number_at<std::uint16_t>(bytes, end + 20) != bytes.size() - end - kEndSize) {
    if (end == first)
      return corrupt_zip(name, "it has no end-of-directory record: it was cut off, or is something else");
    --end;
  }
  if (number_at<std::uint16_t>(bytes, end + 4) != 0 || number_at<std::uint16_t>(bytes, end + 6) != 0 ||
      number_at<std::uint16_t>(bytes, end + 8) != number_at<std::uint16_t>(bytes, end + 10)) {
    return corrupt_zip(name, "it is one part of several");
  }
  Directory directory{number_at<std::uint32_t>(bytes, end + 16), number_at<std::uint32_t>(bytes, end + 12),
                      number_at<std::uint16_t>(bytes, end + 10)};
  std::size_t directory_end = end;
  if (end >= kLocator64Size && number_at<std::uint32_t>(bytes, end - kLocator64Size) == kLocator64) {
    const auto record = number_at<std::uint64_t>(bytes, end - kLocator64Size + 8);
    if (end - kLocator64Size < kEnd64Size || record != end - kLocator64Size - kEnd64Size ||
        number_at<std::uint32_t>(bytes, static_cast<std::size_t>(record)) != kEnd64) {
      return corrupt_zip(name, "its zip64 end record is not where it belongs");
    }
    directory_end = static_cast<std::size_t>(record);
    const Directory wide{number_at<std::uint64_t>(bytes, directory_end + 48),
                         number_at<std::uint64_t>(bytes, directory_end + 40),
                         number_at<std::uint64_t>(bytes, directory_end + 32)};
    if ((directory.begin != kMax32 && directory.begin != wide.begin) ||
        (directory.size != kMax32 && directory.size != wide.size) ||
        (directory.entries != kMax16 && directory.entries != wide.entries)) {
      return corrupt_zip(name, "its two end records disagree");
    }
    directory = wide;
  }
  if (directory.begin > directory_end || directory.size != directory_end - directory.begin ||
      directory.entries > directory.size / kCentralSize) {
    return corrupt_zip(name, "its directory is not where the end record says");
  }
  return directory;
}

}  // namespace

Result<ZipReader> ZipReader::parse(std::span<const std::byte> bytes, std::string name) {
  const auto directory = find_directory(bytes, name);
  if (!directory) return tl::unexpected(directory.error());
  ZipReader reader;
  reader.bytes_ = bytes;
  reader.name_ = std::move(name);
  const std::string& file = reader.name_;
  const auto directory_begin = static_cast<std::size_t>(directory->begin);
  const std::span<const std::byte> all = bytes.first(directory_begin + static_cast<std::size_t>(directory->size));
  std::size_t at = directory_begin;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;  // from the local header to the end of the data
  for (std::uint64_t i = 0; i < directory->entries; ++i) {
    if (all.size() - at < kCentralSize || number_at<std::uint32_t>(all, at) != kCentral) {
      return corrupt_zip(file, fmt::format("entry {} of its directory is damaged", i));
    }
    const auto flags = number_at<std::uint16_t>(all, at + 8);
    const auto method = number_at<std::uint16_t>(all, at + 10);
    const std::size_t name_size = number_at<std::uint16_t>(all, at + 28);
    const std::size_t extra_size = number_at<std::uint16_t>(all, at + 30);
    const std::size_t comment_size = number_at<std::uint16_t>(all, at + 32);
    if (all.size() - at - kCentralSize < name_size + extra_size + comment_size) {
      return corrupt_zip(file, fmt::format("entry {} of its directory is cut off", i));
    }
    ZipEntry entry;
    entry.name = text_at(all, at + kCentralSize, name_size);
    entry.crc = number_at<std::uint32_t>(all, at + 16);
    std::uint64_t packed = number_at<std::uint32_t>(all, at + 20), header = number_at<std::uint32_t>(all, at + 42);
    entry.size = number_at<std::uint32_t>(all, at + 24);
    if (!widen(all.subspan(at + kCentralSize + name_size, extra_size), {&entry.size, &packed, &header})) {
      return corrupt_zip(file, fmt::format("entry '{}' has a damaged extra field", entry.name));
    }
    if ((flags & (kFlagEncrypted | kFlagStrong)) != 0)
      return corrupt_zip(file, fmt::format("entry '{}' is encrypted", entry.name));
    entry.stored = method == 0;
    if (entry.stored && packed != entry.size) {
      return corrupt_zip(file, fmt::format("entry '{}' has two sizes", entry.name));
    }
    // The local header has to agree, so that no two readers can see different archives.
    if (header > directory_begin || directory_begin - header < kLocalSize) {
      return corrupt_zip(file, fmt::format("entry '{}' lies outside the archive", entry.name));
    }
    const auto local = static_cast<std::size_t>(header);
    const std::size_t local_name = number_at<std::uint16_t>(all, local + 26);
    const std::size_t local_extra = number_at<std::uint16_t>(all, local + 28);
    if (number_at<std::uint32_t>(all, local) != kLocal || number_at<std::uint16_t>(all, local + 6) != flags ||
        number_at<std::uint16_t>(all, local + 8) != method || local_name != name_size ||
        directory_begin - local - kLocalSize < local_name + local_extra ||
        text_at(all, local + kLocalSize, local_name) != entry.name) {
      return corrupt_zip(file, fmt::format("the header of entry '{}' does not agree with the directory", entry.name));
    }
    if ((flags & kFlagDescriptor) == 0) {
      std::uint64_t local_packed = number_at<std::uint32_t>(all, local + 18),
                    local_size = number_at<std::uint32_t>(all, local + 22);
      if (!widen(all.subspan(local + kLocalSize + local_name, local_extra), {&local_size, &local_packed}) ||
          local_packed != packed || local_size != entry.size ||
          number_at<std::uint32_t>(all, local + 14) != entry.crc) {
        return corrupt_zip(file, fmt::format("the header of entry '{}' does not agree with the directory", entry.name));
      }
    }
    entry.offset = local + kLocalSize + local_name + local_extra;
    if (packed > directory_begin - entry.offset) {
      return corrupt_zip(file, fmt::format("entry '{}' lies outside the archive", entry.name));
    }
    if (!reader.index_.emplace(entry.name, reader.entries_.size()).second) {
      return corrupt_zip(file, fmt::format("the name '{}' stands there twice", entry.name));
    }
    ranges.emplace_back(local, entry.offset + packed);
    reader.entries_.push_back(std::move(entry));
    at += kCentralSize + name_size + extra_size + comment_size;
  }
  if (at != all.size()) return corrupt_zip(file, "its directory has more entries than the end record says");
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) return corrupt_zip(file, "entries overlap");
  }
  return reader;
}

const ZipEntry* ZipReader::find(std::string_view name) const noexcept {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

Result<std::span<const std::byte>> ZipReader::read(const ZipEntry& entry) const {
  if (!entry.stored)
    return corrupt_zip(name_, fmt::format("entry '{}' is compressed, which torch.save never does", entry.name));
  const auto data = bytes_.subspan(static_cast<std::size_t>(entry.offset), static_cast<std::size_t>(entry.size));
  if (crc_of(data) != entry.crc)
    return corrupt_zip(name_, fmt::format("entry '{}' has a wrong CRC-32: its bytes are damaged", entry.name));
  return data;
}

bool ZipWriter::large(std::uint64_t value) const noexcept { return zip64_ == Zip64::Always || value >= kMax32; }

Result<void> ZipWriter::put(std::span<const std::byte> bytes) {
  at_ += bytes.size();
  return sink_(bytes);
}

Result<void> ZipWriter::add(const std::string& name, std::span<const std::byte> data) {
  if (name.size() > kMax16 / 2) {
    return fail(ErrorCode::InvalidArgument, "cannot write a zip entry with a name of {} bytes", name.size());
  }
  Record record{{name, 0, data.size(), crc_of(data)}, at_};
  const bool wide = large(data.size());
  codec::Writer extra;
  if (wide) extra.number(kExtra64).number(std::uint16_t{16}).number(record.entry.size).number(record.entry.size);
  const std::uint64_t unpadded = at_ + kLocalSize + name.size() + extra.bytes().size() + 4;
  const auto padding = static_cast<std::uint16_t>((kAlignment - unpadded % kAlignment) % kAlignment);
  extra.number(kExtraPadding).number(padding);
  const std::string extra_field = extra.take() + std::string(padding, 'Z');

  codec::Writer header;
  const std::uint32_t size32 = wide ? kMax32 : static_cast<std::uint32_t>(data.size());
  header.number(kLocal)
      .number(kVersion)
      .number(kFlagUtf8)
      .number(std::uint16_t{0})
      .number(std::uint16_t{0})
      .number(kDate);
  header.number(record.entry.crc).number(size32).number(size32);
  header.number(static_cast<std::uint16_t>(name.size())).number(static_cast<std::uint16_t>(extra_field.size()));
  if (auto done = put(as_bytes(header.take() + name + extra_field)); !done) return done;
  record.entry.offset = at_;
  records_.push_back(std::move(record));
  return put(data);
}

Result<void> ZipWriter::finish() {
  const std::uint64_t begin = at_;
  for (const Record& record : records_) {
    const bool wide_size = large(record.entry.size), wide_header = large(record.header);
    codec::Writer extra;
    if (wide_size || wide_header) {
      extra.number(kExtra64).number(static_cast<std::uint16_t>((wide_size ? 16 : 0) + (wide_header ? 8 : 0)));
      if (wide_size) extra.number(record.entry.size).number(record.entry.size);
      if (wide_header) extra.number(record.header);
    }
    const std::uint32_t size32 = wide_size ? kMax32 : static_cast<std::uint32_t>(record.entry.size);
    codec::Writer header;
    header.number(kCentral)
        .number(kVersion)
        .number(kVersion)
        .number(kFlagUtf8)
        .number(std::uint16_t{0})
        .number(std::uint16_t{0});
    header.number(kDate).number(record.entry.crc).number(size32).number(size32);
    header.number(static_cast<std::uint16_t>(record.entry.name.size()))
        .number(static_cast<std::uint16_t>(extra.bytes().size()));
    header.number(std::uint16_t{0}).number(std::uint16_t{0}).number(std::uint16_t{0}).number(std::uint32_t{0});
    header.number(wide_header ? kMax32 : static_cast<std::uint32_t>(record.header));
    if (auto done = put(as_bytes(header.take() + record.entry.name + extra.take())); !done) return done;
  }
  const std::uint64_t size = at_ - begin, entries = records_.size();
  const bool wide = large(begin) || large(size) || entries >= kMax16;
  codec::Writer end;
  if (wide) {
    const std::uint64_t record = at_;
    end.number(kEnd64)
        .number(std::uint64_t{kEnd64Size - 12})
        .number(kVersion)
        .number(kVersion)
        .number(std::uint32_t{0});
    end.number(std::uint32_t{0}).number(entries).number(entries).number(size).number(begin);
    end.number(kLocator64).number(std::uint32_t{0}).number(record).number(std::uint32_t{1});
  }
  const auto entries16 = wide ? kMax16 : static_cast<std::uint16_t>(entries);
  end.number(kEnd).number(std::uint16_t{0}).number(std::uint16_t{0}).number(entries16).number(entries16);
  end.number(wide ? kMax32 : static_cast<std::uint32_t>(size))
      .number(wide ? kMax32 : static_cast<std::uint32_t>(begin));
  end.number(std::uint16_t{0});
  return put(as_bytes(end.take()));
}

}  // namespace cohort::formats
