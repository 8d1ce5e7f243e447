// A server's part of a snapshot, as a file: for each table its description, its complete rows, and the counters of keys
// that are not admitted yet. If the number of servers has changed, each reads all files and takes its own rows.
#pragma once

#include "ps/state.h"
#include "train/formats/checkpoint_folder.h"

#include <functional>
#include <string>

namespace cohort::ps {

/// Returns "ps-0-of-4.rows".
std::string snapshot_file(std::uint32_t server, std::uint32_t servers);
bool is_snapshot_file(const std::string& name);

/// Writes and syncs the file in the hidden folder of a checkpoint. Fails with Io.
Result<formats::FileDigest> write_snapshot(const FrozenState& state, const std::string& folder,
                                           const std::string& file);

/// Receives a snapshot's rows: those that `is_mine` accepts are passed to `adopt`, as commands of Method::Adopt of some
/// megabytes each. Reading fails with Corrupt, naming the file, or with the error of `adopt`.
struct SnapshotReader {
  std::function<bool(const Adopt& table, std::uint64_t key)> is_mine;
  std::function<Result<void>(const std::string& body)> adopt;
};
/// Returns the next bytes of a file, at least `wanted` unless the file ends before; valid until the next call. `taken`
/// bytes of the last result have been used.
using SnapshotBytes = std::function<Result<std::string_view>(std::size_t taken, std::size_t wanted)>;
Result<void> read_snapshot(const SnapshotBytes& source, const std::string& name, const SnapshotReader& reader);
/// Reads all files of a checkpoint, one after the other. Also fails with Unavailable if it has no such files.
Result<void> read_rows(const std::string& checkpoint, const SnapshotReader& reader);

}  // namespace cohort::ps
