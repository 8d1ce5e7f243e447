#include "formats/checkpoint_folder.h"

#include "base/log.h"
#include "base/parse.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <limits>
#include <optional>
#include <thread>

namespace cohort::formats {
namespace {

using namespace std::chrono_literals;

constexpr std::string_view kPrefix = "checkpoint-", kAside = ".tmp-checkpoint-", kDoomed = ".old-checkpoint-";
constexpr std::uint64_t kLongestManifest = 64 << 20;
constexpr auto kLockPatience = 10s;

std::string name_of(const Manifest& manifest) {
  return fmt::format("{}{:06}-step-{}", kPrefix, manifest.generation, manifest.step);
}

/// "checkpoint-000007-step-1200" -> 7.
std::optional<std::int64_t> generation_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  const auto generation = parse_integer<std::int64_t>(name.substr(0, name.find('-')));
  if (!generation || *generation < 1 || *generation == std::numeric_limits<std::int64_t>::max()) return std::nullopt;
  return generation;
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                     utc.tm_hour, utc.tm_min, utc.tm_sec);
}

/// The kernel lets go of the lock when its holder dies. Where a file system has no locks there is none.
Result<sys::UniqueFd> lock_folder(const std::string& folder) {
  sys::UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd)
    return fail(ErrorCode::Io, "cannot open the folder {} -- {} -- check its permissions", folder, errno_text(errno));
  const auto deadline = std::chrono::steady_clock::now() + kLockPatience;
  while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) {
      log::info("checkpoint", "{}: no lock, {}; make sure that one job at a time saves there", folder,
                errno_text(errno));
      return fd;
    }
    if (std::chrono::steady_clock::now() > deadline) {
      return fail(ErrorCode::Unavailable,
                  "cannot save a checkpoint in {} -- another process has been saving there for {} s -- give each job "
                  "its own folder",
                  folder, kLockPatience.count());
    }
    std::this_thread::sleep_for(20ms);
  }
  return fd;
}

/// Removes a checkpoint so that a kill in the middle leaves none that looks like one.
Result<void> discard(const std::string& folder, const std::string& name) {
  const std::string doomed = fmt::format("{}/{}{}", folder, kDoomed, name.substr(kPrefix.size()));
  if (auto renamed = sys::rename_path(folder + "/" + name, doomed); !renamed) return renamed;
  return sys::remove_tree(doomed);
}

void prune(const std::string& folder, int keep) {
  const auto list = list_checkpoints(folder);
  const auto names = sys::list_folder(folder);
  if (!list || !names || list->sound.size() <= static_cast<std::size_t>(keep)) return;
  const std::int64_t oldest = list->sound[list->sound.size() - static_cast<std::size_t>(keep)].manifest.generation;
  for (const std::string& name : *names) {
    const auto generation = generation_of(name);
    if (!generation || *generation >= oldest) continue;
    if (auto gone = discard(folder, name); !gone)
      log::warn("checkpoint", "cannot remove an old checkpoint: {}", gone.error().what());
  }
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::string folder, Manifest manifest, sys::UniqueFd lock)
    : folder_(std::move(folder)), manifest_(std::move(manifest)), lock_(std::move(lock)) {}

CheckpointWriter::CheckpointWriter(CheckpointWriter&& other) noexcept
    : folder_(std::move(other.folder_)),
      aside_(std::exchange(other.aside_, {})),
      manifest_(std::move(other.manifest_)),
      lock_(std::move(other.lock_)) {}

CheckpointWriter::~CheckpointWriter() {
  if (!aside_.empty()) {
    if (auto gone = sys::remove_tree(aside_); !gone) log::warn("checkpoint", "{}", gone.error().what());
  }
  // A child forked meanwhile has the descriptor, too; closing ours would leave the folder locked.
  if (lock_) ::flock(lock_.get(), LOCK_UN);
}

Result<CheckpointWriter> CheckpointWriter::begin(const std::string& folder, Manifest manifest) {
  if (auto made = sys::make_folders(folder); !made) return tl::unexpected(made.error());
  auto lock = lock_folder(folder);
  if (!lock) return tl::unexpected(lock.error());
  const auto names = sys::list_folder(folder);
  if (!names) return tl::unexpected(names.error());
  std::int64_t newest = 0;
  for (const std::string& name : *names) {
    if (name.starts_with(kAside) || name.starts_with(kDoomed)) {
      if (auto gone = sys::remove_tree(folder + "/" + name); !gone) return tl::unexpected(gone.error());
    }
    newest = std::max(newest, generation_of(name).value_or(0));
  }
  manifest.generation = newest + 1;
  manifest.created = now_text();
  manifest.files.clear();
  CheckpointWriter writer(folder, std::move(manifest), std::move(*lock));
  const std::string aside = fmt::format("{}/{}{}", folder, kAside, name_of(writer.manifest_).substr(kPrefix.size()));
  if (auto made = sys::make_folders(aside); !made) return tl::unexpected(made.error());
  writer.aside_ = aside;
  return writer;
}

Result<void> CheckpointWriter::add(const std::string& name, const std::function<Result<void>(const Sink&)>& write) {
  auto file = sys::FileWriter::create(aside_ + "/" + name);
  if (!file) return tl::unexpected(file.error());
  Sha256 digest;
  auto written = write([&](std::span<const std::byte> bytes) {
    digest.update(bytes);
    return file->write(bytes);
  });
  if (!written) return written;
  manifest_.files[name] = {file->size(), digest.finish()};
  return file->sync();
}

Result<StoredCheckpoint> CheckpointWriter::commit(int keep) {
  const auto json = to_json(manifest_);
  if (!json) return tl::unexpected(json.error());
  auto file = sys::FileWriter::create(aside_ + "/" + kManifestFile);
  if (!file) return tl::unexpected(file.error());
  auto done = file->write(*json);
  if (done) done = file->sync();
  if (done) done = sys::sync_folder(aside_);
  prune(folder_, keep);  // what writers killed between publishing and pruning left: else every such kill adds one
  const std::string name = name_of(manifest_);
  StoredCheckpoint stored{fmt::format("{}/{}", folder_, name), manifest_};
  if (done) done = sys::rename_path(aside_, stored.folder);
  if (!done) return tl::unexpected(done.error());
  aside_.clear();
  if (done = sys::sync_folder(folder_); !done) return tl::unexpected(done.error());
  prune(folder_, keep);
  return stored;
}

Result<StoredCheckpoint> read_checkpoint(const std::string& folder) {
  const std::string path = fmt::format("{}/{}", folder, kManifestFile);
  const auto text = sys::read_file(path, {.max_bytes = kLongestManifest});
  if (!text) return tl::unexpected(text.error());
  auto manifest = parse_manifest(text->text(), path);
  if (!manifest) return tl::unexpected(manifest.error());
  return StoredCheckpoint{folder, std::move(*manifest)};
}

Result<CheckpointList> list_checkpoints(const std::string& folder) {
  CheckpointList list;
  const auto names = sys::list_folder(folder);
  if (!names) {
    if (names.error().code() == ErrorCode::Unavailable) return list;
    return tl::unexpected(names.error());
  }
  for (const std::string& name : *names) {
    const auto generation = generation_of(name);
    if (!generation) continue;
    auto stored = read_checkpoint(folder + "/" + name);
    if (stored && stored->manifest.generation != *generation) {
      list.damaged.emplace_back(ErrorCode::Corrupt,
                                fmt::format("{}/{}: its manifest is of checkpoint {} -- rename it back", folder, name,
                                            stored->manifest.generation));
    } else if (stored) {
      list.sound.push_back(std::move(*stored));
    } else {
      list.damaged.push_back(stored.error());
    }
  }
  std::sort(list.sound.begin(), list.sound.end(),
            [](const auto& a, const auto& b) { return a.manifest.generation < b.manifest.generation; });
  return list;
}

Result<sys::FileBytes> read_checkpoint_file(const StoredCheckpoint& checkpoint, const std::string& name) {
  const std::string path = fmt::format("{}/{}", checkpoint.folder, name);
  const auto expected = checkpoint.manifest.files.find(name);
  if (expected == checkpoint.manifest.files.end()) {
    return fail(ErrorCode::Unavailable, "{}: the checkpoint was saved without it", path);
  }
  auto bytes = sys::read_file(path);
  if (!bytes) {
    return fail(ErrorCode::Corrupt, "the checkpoint's file cannot be read: {}", bytes.error().what());
  }
  if (bytes->size() != expected->second.bytes) {
    return fail(ErrorCode::Corrupt, "{}: damaged -- it has {} bytes where {} were written", path, bytes->size(),
                expected->second.bytes);
  }
  if (const std::string digest = sha256(bytes->bytes()); digest != expected->second.sha256) {
    return fail(ErrorCode::Corrupt, "{}: damaged -- its SHA-256 is {} where {} was written", path, digest,
                expected->second.sha256);
  }
  return bytes;
}

}  // namespace cohort::formats
