// A server's part of a snapshot, as a file: each table's description, its rows with all that belongs to them, and the
// counters of keys that are not admitted yet. With another number of servers, each reads all files, and takes its own
// rows.
#pragma once

#include "ps/state.h"
#include "train/formats/checkpoint_folder.h"

#include <functional>
#include <string>

namespace cohort::ps {

/// "ps-0-of-4.rows".
std::string snapshot_file(std::uint32_t server, std::uint32_t servers);
bool is_snapshot_file(const std::string& name);

/// Writes and syncs the file in the hidden folder of a checkpoint. Io.
Result<formats::FileDigest> write_snapshot(const FrozenState& state, const std::string& folder,
                                           const std::string& file);

/// Calls `adopt` with commands of Method::Adopt for the rows that `is_mine` says, some megabytes at a time. `elements`:
/// of a dense variable, whose keys are pieces. Corrupt, naming the file, or what `adopt` says.
struct SnapshotReader {
  std::function<bool(const Adopt& table, std::uint64_t key)> is_mine;
  std::function<Result<void>(const std::string& body)> adopt;
};
/// Returns the next bytes of a file, at least `wanted` if there are as many; valid until the next call. `taken` of the
/// bytes before are done with.
using SnapshotBytes = std::function<Result<std::string_view>(std::size_t taken, std::size_t wanted)>;
Result<void> read_snapshot(const SnapshotBytes& source, const std::string& name, const SnapshotReader& reader);
/// All files of a checkpoint, one after the other. Also Unavailable: it has none.
Result<void> read_rows(const std::string& checkpoint, const SnapshotReader& reader);

}  // namespace cohort::ps
