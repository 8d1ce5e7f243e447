#include "ps/snapshot.h"

#include "base/files.h"
#include "ps/optimizer.h"
#include "train/formats/checkpoint_folder.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

namespace cohort::ps {
namespace {

constexpr std::string_view kSnapshotMagic = "cohort ps snapshot 1\n";
constexpr std::size_t kPart = std::size_t{4} << 20;

/// Passes rows and counters of a table to the reader in parts.
class Parts {
 public:
  Parts(Adopt table, const SnapshotReader& reader) : table_(std::move(table)), reader_(reader) {}

  Result<void> row(std::string_view bytes) {
    rows_.append(bytes);
    ++table_.rows;
    return rows_.size() < kPart ? Result<void>() : flush();
  }
  Result<void> seen(std::string_view bytes) {
    seen_.append(bytes);
    ++table_.seen;
    return seen_.size() < kPart ? Result<void>() : flush();
  }
  /// Passes on the last part, which is empty for a table without rows.
  Result<void> flush() {
    auto done = reader_.adopt(pack(table_, rows_.size() + seen_.size()).append(rows_).append(seen_));
    rows_.clear();
    seen_.clear();
    table_.rows = table_.seen = 0;
    return done;
  }

 private:
  Adopt table_;
  const SnapshotReader& reader_;
  std::string rows_, seen_;
};

}  // namespace

std::string snapshot_file(std::uint32_t server, std::uint32_t servers) {
  return fmt::format("ps-{}-of-{}.rows", server, servers);
}
bool is_snapshot_file(const std::string& name) {
  return name.size() > 8 && name.substr(0, 3) == "ps-" && name.substr(name.size() - 5) == ".rows" &&
         name.find('/') == std::string::npos;
}

Result<formats::FileDigest> write_snapshot(const FrozenState& state, const std::string& folder,
                                           const std::string& file) {
  return formats::write_checkpoint_file(folder, file, [&](const formats::Sink& sink) -> Result<void> {
    std::string buffer(kSnapshotMagic);
    Result<void> done;
    const auto spill = [&](std::size_t beyond) {
      if (done && buffer.size() > beyond) {
        done = sink(formats::as_bytes(buffer));
        buffer.clear();
      }
    };
    for (const FrozenTables::Table& one : state.tables.all) {
      const FrozenTable& table = one.table;
      buffer += pack(Adopt{table.name(), table.options(), one.elements, table.shape().counts.rows, table.shape().seen});
      table.for_each([&](const RowHeader& header, const float* floats) {
        append_bytes(buffer, &header, sizeof header);
        append_bytes(buffer, floats, table.floats() * sizeof(float));
        spill(kPart);
      });
      table.for_each_seen([&](std::uint64_t key, std::uint32_t count) {
        append_bytes(buffer, &key, sizeof key);
        append_bytes(buffer, &count, sizeof count);
        spill(kPart);
      });
    }
    spill(0);
    return done;
  });
}

Result<void> read_snapshot(const SnapshotBytes& source, const std::string& name, const SnapshotReader& reader) {
  constexpr std::size_t kTableHead = std::size_t{1} << 20;  // upper bound of a table's description
  std::string_view bytes;
  std::size_t there = 0;
  const auto want = [&](std::size_t wanted) -> Result<void> {
    if (bytes.size() >= wanted) return {};
    const auto more = source(there - bytes.size(), wanted);
    if (!more) return tl::unexpected(more.error());
    bytes = *more;
    there = bytes.size();
    return {};
  };
  Result<void> done = want(kSnapshotMagic.size());
  if (!done) return done;
  if (bytes.substr(0, kSnapshotMagic.size()) != kSnapshotMagic)
    return fail(ErrorCode::Corrupt, "{} is no snapshot", name);
  bytes.remove_prefix(kSnapshotMagic.size());
  while (true) {
    if (done = want(kTableHead); !done || bytes.empty()) return done;
    auto opened = unpack<Adopt>(bytes);
    if (!opened) return fail(ErrorCode::Corrupt, "{}: {}", name, opened.error().what());
    Adopt table = std::move(opened->record);
    if (auto ok = check(table.options); !ok) return fail(ErrorCode::Corrupt, "{}: {}", name, ok.error().what());
    bytes = opened->payload;
    const auto dim = static_cast<std::size_t>(table.options.dim);
    const std::size_t row = sizeof(RowHeader) + (dim + slots_of(table.options.optimizer, dim)) * sizeof(float);
    const std::uint64_t rows = std::exchange(table.rows, 0), seen = std::exchange(table.seen, 0);
    Parts parts(table, reader);
    const auto take = [&](std::uint64_t count, std::size_t size, auto&& hand_on) -> Result<void> {
      for (std::uint64_t i = 0; i < count; ++i, bytes.remove_prefix(size)) {
        if (auto ok = want(size); !ok) return ok;
        if (bytes.size() < size)
          return fail(ErrorCode::Corrupt, "{} ends within the rows of table \"{}\"", name, table.name);
        std::uint64_t key;  // rows and counters begin with their key
        std::memcpy(&key, bytes.data(), sizeof key);
        if (!reader.is_mine(table, key)) continue;
        if (auto ok = hand_on(bytes.substr(0, size)); !ok) return ok;
      }
      return {};
    };
    done = take(rows, row, [&](std::string_view one) { return parts.row(one); });
    if (done) done = take(seen, kSeenBytes, [&](std::string_view one) { return parts.seen(one); });
    if (done) done = parts.flush();
    if (!done) return done;
  }
}

namespace {

/// Reads a file some megabytes at a time.
class FileSource {
 public:
  FileSource(sys::FileReader file, std::uint64_t bytes) : file_(std::move(file)), left_(bytes) {}
  Result<std::string_view> more(std::size_t taken, std::size_t wanted) {
    buffer_.erase(0, taken);
    if (buffer_.size() >= wanted || left_ == 0) return std::string_view(buffer_);
    const auto read = static_cast<std::size_t>(std::min<std::uint64_t>(left_, std::max(kPart, wanted)));
    buffer_.resize(buffer_.size() + read);
    if (auto done = file_.read(std::as_writable_bytes(std::span(buffer_)).last(read)); !done)
      return tl::unexpected(done.error());
    left_ -= read;
    return std::string_view(buffer_);
  }

 private:
  sys::FileReader file_;
  std::uint64_t left_;
  std::string buffer_;
};

}  // namespace

Result<void> read_rows(const std::string& checkpoint, const SnapshotReader& reader) {
  const auto stored = formats::read_checkpoint(checkpoint);
  if (!stored) return tl::unexpected(stored.error());
  bool any = false;
  for (const auto& [name, digest] : stored->manifest.files) {
    if (!is_snapshot_file(name)) continue;
    any = true;
    if (auto sound = formats::check_checkpoint_file(*stored, name); !sound) return sound;
    auto file = sys::FileReader::open(fmt::format("{}/{}", stored->folder, name));
    if (!file) return tl::unexpected(file.error());
    FileSource source(*std::move(file), digest.bytes);
    const auto more = [&](std::size_t taken, std::size_t wanted) { return source.more(taken, wanted); };
    if (auto done = read_snapshot(more, name, reader); !done) return done;
  }
  if (!any) return fail(ErrorCode::Unavailable, "{} has no rows of parameter servers", checkpoint);
  return {};
}

}  // namespace cohort::ps
