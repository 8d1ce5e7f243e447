#include "ps/snapshot.h"

#include "formats/checkpoint_folder.h"
#include "ps/optimizer.h"

#include <cstring>

namespace cohort::ps {
namespace {

constexpr std::string_view kMagic = "cohort ps snapshot 1\n";
constexpr std::size_t kPart = std::size_t{4} << 20;

void append(std::string& to, const void* bytes, std::size_t size) { to.append(static_cast<const char*>(bytes), size); }

/// Rows and counters of a table, handed on in parts.
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
  /// Also of a table without rows.
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
    std::string buffer(kMagic);
    Result<void> done;
    const auto spill = [&](std::size_t beyond) {
      if (done && buffer.size() > beyond) {
        done = sink(formats::as_bytes(buffer));
        buffer.clear();
      }
    };
    for (const auto& [table, elements] : state.tables) {
      buffer += pack(Adopt{table.name(), table.options(), elements, table.shape().counts.rows, table.shape().seen});
      table.for_each([&](const RowHeader& header, const float* floats) {
        append(buffer, &header, sizeof header);
        append(buffer, floats, table.floats() * sizeof(float));
        spill(kPart);
      });
      table.for_each_seen([&](std::uint64_t key, std::uint32_t count) {
        append(buffer, &key, sizeof key);
        append(buffer, &count, sizeof count);
        spill(kPart);
      });
    }
    spill(0);
    return done;
  });
}

Result<void> read_snapshot(std::string_view bytes, const std::string& name, const SnapshotReader& reader) {
  if (bytes.substr(0, kMagic.size()) != kMagic) return fail(ErrorCode::Corrupt, "{} is no snapshot", name);
  bytes.remove_prefix(kMagic.size());
  while (!bytes.empty()) {
    auto opened = unpack<Adopt>(bytes);
    if (!opened) return fail(ErrorCode::Corrupt, "{}: {}", name, opened.error().what());
    Adopt table = std::move(opened->record);
    if (auto ok = check(table.options); !ok) return fail(ErrorCode::Corrupt, "{}: {}", name, ok.error().what());
    bytes = opened->payload;
    const auto dim = static_cast<std::size_t>(table.options.dim);
    const std::size_t row = sizeof(RowHeader) + (dim + slots_of(table.options.optimizer, dim)) * sizeof(float);
    const std::uint64_t rows = std::exchange(table.rows, 0), seen = std::exchange(table.seen, 0);
    if (rows > bytes.size() / row || seen > (bytes.size() - rows * row) / kSeenBytes)
      return fail(ErrorCode::Corrupt, "{} ends within the rows of table \"{}\"", name, table.name);
    Parts parts(table, reader);
    const auto mine = [&] {
      std::uint64_t key;  // both begin with it
      std::memcpy(&key, bytes.data(), sizeof key);
      return reader.is_mine(table, key);
    };
    Result<void> done;
    for (std::uint64_t i = 0; i < rows && done; ++i, bytes.remove_prefix(row)) {
      if (mine()) done = parts.row(bytes.substr(0, row));
    }
    for (std::uint64_t i = 0; i < seen && done; ++i, bytes.remove_prefix(kSeenBytes)) {
      if (mine()) done = parts.seen(bytes.substr(0, kSeenBytes));
    }
    if (done) done = parts.flush();
    if (!done) return done;
  }
  return {};
}

Result<void> read_rows(const std::string& checkpoint, const SnapshotReader& reader) {
  const auto stored = formats::read_checkpoint(checkpoint);
  if (!stored) return tl::unexpected(stored.error());
  bool any = false;
  for (const auto& [name, digest] : stored->manifest.files) {
    if (!is_snapshot_file(name)) continue;
    any = true;
    const auto bytes = formats::read_checkpoint_file(*stored, name);
    if (!bytes) return tl::unexpected(bytes.error());
    if (auto done = read_snapshot(bytes->text(), name, reader); !done) return done;
  }
  if (!any) return fail(ErrorCode::Unavailable, "{} has no rows of parameter servers", checkpoint);
  return {};
}

}  // namespace cohort::ps
