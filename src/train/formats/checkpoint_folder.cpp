#include "train/formats/checkpoint_folder.h"

#include "base/log.h"
#include "base/parse.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <vector>

namespace cohort::formats {
namespace {

using namespace std::chrono_literals;

constexpr std::string_view kPrefix = "checkpoint-", kHidden = ".tmp-checkpoint-", kDoomed = ".old-checkpoint-";
constexpr std::uint64_t kLongestManifest = 64 << 20;
constexpr auto kLockPatience = 10s;

/// Returns the folder's name without the prefix.
std::string name_of(std::int64_t generation, std::int64_t step) {
  return fmt::format("{:06}-step-{}", generation, step);
}

/// "checkpoint-000007-step-1200" -> 7.
std::optional<std::int64_t> generation_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  const auto generation = parse_integer<std::int64_t>(name.substr(0, name.find('-')));
  if (!generation || *generation < 1 || *generation == std::numeric_limits<std::int64_t>::max()) return std::nullopt;
  return generation;
}

/// "checkpoint-000007-step-1200" -> 1200.
std::int64_t step_of(std::string_view name) {
  return parse_integer<std::int64_t>(name.substr(name.rfind('-') + 1)).value_or(0);
}

/// Locks the folder. The kernel releases the lock when its holder dies. File systems without locks are not locked.
Result<sys::UniqueFd> lock_folder(const std::string& folder) {
  sys::UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd)
    return fail(ErrorCode::Io, "cannot open the folder {} -- {} -- check its permissions", folder, errno_text(errno));
  sys::close_on_fork(fd.get());  // otherwise a child that outlives this process (a loader's worker) keeps the lock
  const auto deadline = std::chrono::steady_clock::now() + kLockPatience;
  while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) {
      log::info("checkpoint", "{}: no lock, {}; make sure that one job at a time saves there", folder,
                errno_text(errno));
      return fd;
    }
    if (std::chrono::steady_clock::now() > deadline) {
      sys::forget_on_fork(fd.get());
      return fail(ErrorCode::Unavailable,
                  "cannot save a checkpoint in {} -- another process has been saving there for {} s -- give each job "
                  "its own folder",
                  folder, kLockPatience.count());
    }
    std::this_thread::sleep_for(20ms);
  }
  return fd;
}

bool is_missing(int error_number) noexcept { return error_number == ENOENT || error_number == ENOTDIR; }

/// Returns Corrupt for a path that is missing or is no file, else Io: a file that cannot be read now (permissions, a
/// failing file system, no memory, too many open files) may be whole.
Error unread(const std::string& path, const Error& error) {
  struct stat status {};
  const bool seen = ::stat(path.c_str(), &status) == 0;
  if (error.code() == ErrorCode::Corrupt || (seen ? !S_ISREG(status.st_mode) : is_missing(errno)))
    return Error(ErrorCode::Corrupt, fmt::format("the checkpoint's file cannot be read: {}", error.what()));
  return Error(ErrorCode::Io,
               fmt::format("a checkpoint cannot be read now, and may be whole: {}; to go on from an older one, move it "
                           "out of its folder",
                           error.what()));
}

/// Removes a checkpoint so that a kill during the removal leaves no partial checkpoint under a valid name.
Result<void> discard(const std::string& folder, const std::string& name) {
  const std::string doomed = fmt::format("{}/{}{}", folder, kDoomed, name.substr(kPrefix.size()));
  if (auto renamed = sys::rename_path(folder + "/" + name, doomed); !renamed) return renamed;
  return sys::remove_tree(doomed);
}

/// Folders of checkpoints that were found damaged.
struct FoundDamaged {
  std::mutex mutex;
  std::set<std::string> folders;

  static FoundDamaged& of_process() {
    static FoundDamaged one;
    return one;
  }
};

std::string plain(const std::string& folder) { return std::filesystem::absolute(folder).lexically_normal().string(); }

/// This process's last checkpoint in each folder, and the checkpoints that others have saved there since.
struct OwnCheckpoints {
  struct Seen {
    std::int64_t newest = 0;
    std::set<std::int64_t> of_others = {};
  };
  std::mutex mutex;
  std::map<std::string, Seen> folders;
  std::string last;  ///< the last checkpoint, for messages

  static OwnCheckpoints& of_process() {
    static OwnCheckpoints one;
    return one;
  }
};

}  // namespace

void remember_own(const std::string& folder, std::int64_t newest) {
  auto& own = OwnCheckpoints::of_process();
  const std::lock_guard<std::mutex> lock(own.mutex);
  auto& seen = own.folders[plain(folder)];
  if (newest < seen.newest) {
    // A loader beside the training has seen an older checkpoint, or the folder was emptied.
    const auto names = sys::list_folder(folder);
    const bool is_there = names && std::ranges::any_of(*names, [&](const std::string& name) {
                            return generation_of(name).value_or(0) >= seen.newest;
                          });
    if (is_there) return;
  }
  seen.newest = newest;
  own.last = newest > 0 ? fmt::format("checkpoint {} in {}", newest, plain(folder)) : std::string();
}

std::string last_own_checkpoint() {
  auto& own = OwnCheckpoints::of_process();
  const std::lock_guard<std::mutex> lock(own.mutex);
  return own.last;
}

std::set<std::int64_t> checkpoints_of_others(const std::string& folder) {
  auto& own = OwnCheckpoints::of_process();
  const std::lock_guard<std::mutex> lock(own.mutex);
  const auto found = own.folders.find(plain(folder));
  if (found == own.folders.end()) return {};
  auto& seen = found->second;
  std::set<std::int64_t> here;
  if (const auto names = sys::list_folder(folder)) {
    for (const std::string& name : *names) {
      const auto its = generation_of(name);
      if (its && (*its > seen.newest || seen.of_others.contains(*its))) here.insert(*its);
    }
  }
  seen.of_others = here;
  return here;
}

void remember_damage(const std::string& folder, bool is_damaged) {
  auto& found = FoundDamaged::of_process();
  const std::lock_guard<std::mutex> lock(found.mutex);
  if (is_damaged)
    found.folders.insert(plain(folder));
  else
    found.folders.erase(plain(folder));
}

std::string whole_at_a_glance(const StoredCheckpoint& checkpoint) {
  {
    auto& found = FoundDamaged::of_process();
    const std::lock_guard<std::mutex> lock(found.mutex);
    if (found.folders.contains(plain(checkpoint.folder))) return {};
  }
  std::string whole;
  for (const auto& [name, digest] : checkpoint.manifest.files) {
    const std::string path = fmt::format("{}/{}", checkpoint.folder, name);
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0)
      whole += is_missing(errno) ? '0' : '?';
    else if (static_cast<std::uint64_t>(status.st_size) != digest.bytes)
      whole += '0';
    else
      whole += ::access(path.c_str(), R_OK) == 0 ? '1' : '?';
  }
  return whole;
}

Glance glance_of(const std::string& files) {
  if (files.empty() || files.find('0') != std::string::npos) return Glance::Damaged;
  return files.find('?') == std::string::npos ? Glance::Whole : Glance::Unreadable;
}

std::optional<Error> CheckpointList::unjudged_above(std::int64_t generation) const {
  const std::pair<std::int64_t, Error>* last = nullptr;
  for (const auto* const all : {&newer, &unreadable}) {
    if (all->empty() || all->back().first <= generation) continue;
    if (last == nullptr || all->back().first > last->first) last = &all->back();
  }
  return last == nullptr ? std::nullopt : std::optional(last->second);
}

void remove_older_checkpoints(const std::string& folder, std::int64_t generation, Spared spared) {
  const auto names = sys::list_folder(folder);
  if (!names) return;
  std::multimap<std::int64_t, std::string, std::greater<>> older;
  for (const std::string& name : *names) {
    if (const auto its = generation_of(name); its && *its < generation) older.emplace(*its, name);
  }
  for (const auto& [its, name] : older) {
    if (spared.best.contains(its) || spared.unjudged.contains(its)) continue;
    if (spared.count > 0 && step_of(name) < spared.below_step) {
      --spared.count;
      continue;
    }
    if (auto gone = discard(folder, name); !gone)
      log::warn("checkpoint", "cannot remove an old checkpoint: {}", gone.error().what());
  }
}

void keep_newest_checkpoints(const std::string& folder, int keep, Spared spared, const BestBy& best) {
  const auto list = list_checkpoints(folder);
  if (!list) return;
  std::vector<StoredCheckpoint> whole;
  for (const StoredCheckpoint& one : list->sound) {
    const Glance glance = glance_of(whole_at_a_glance(one));
    if (glance == Glance::Whole) whole.push_back(one);
    if (glance == Glance::Unreadable) spared.unjudged.insert(one.manifest.generation);
  }
  if (whole.size() <= static_cast<std::size_t>(keep)) return;
  for (const auto* const all : {&list->newer, &list->unreadable}) {
    for (const auto& [generation, error] : *all) spared.unjudged.insert(generation);
  }
  const auto oldest = whole[whole.size() - static_cast<std::size_t>(keep)].manifest.generation;
  spared.best = best_checkpoints(whole, best);
  remove_older_checkpoints(folder, oldest, std::move(spared));
}

std::optional<double> standing(const Manifest& manifest, const BestBy& best) {
  const auto found = manifest.values.find(best.value);
  if (best.value.empty() || found == manifest.values.end()) return std::nullopt;
  double number = std::numeric_limits<double>::quiet_NaN();
  if (const auto* const whole = std::get_if<std::int64_t>(&found->second)) number = static_cast<double>(*whole);
  if (const auto* const real = std::get_if<double>(&found->second)) number = *real;
  if (!std::isfinite(number)) return std::nullopt;
  return best.mode == BestMode::Min ? number : -number;
}

std::set<std::int64_t> best_checkpoints(const std::vector<StoredCheckpoint>& among, const BestBy& best) {
  std::set<std::pair<double, std::int64_t>> order;
  for (const StoredCheckpoint& one : among) {
    if (const auto its = standing(one.manifest, best)) order.emplace(*its, one.manifest.generation);
  }
  std::set<std::int64_t> generations;
  for (const auto& [its, generation] : order) {
    if (generations.size() < static_cast<std::size_t>(std::max(1, best.keep))) generations.insert(generation);
  }
  return generations;
}

Result<FileDigest> write_checkpoint_file(const std::string& hidden, const std::string& name,
                                         const std::function<Result<void>(const Sink&)>& write) {
  auto file = sys::FileWriter::create(hidden + "/" + name);
  if (!file) return tl::unexpected(file.error());
  FileDigester digester;
  const auto written = write([&](std::span<const std::byte> bytes) {
    digester.update(bytes);
    return file->write(bytes);
  });
  if (!written) return tl::unexpected(written.error());
  if (auto synced = file->sync(); !synced) return tl::unexpected(synced.error());
  return digester.finish();
}

CheckpointWriter::CheckpointWriter(std::string folder, sys::UniqueFd lock)
    : folder_(std::move(folder)), lock_(std::move(lock)) {}

CheckpointWriter::CheckpointWriter(CheckpointWriter&& other) noexcept
    : folder_(std::move(other.folder_)),
      hidden_(std::exchange(other.hidden_, {})),
      published_(std::move(other.published_)),
      manifest_(std::move(other.manifest_)),
      lock_(std::move(other.lock_)),
      newest_(other.newest_) {}

CheckpointWriter::~CheckpointWriter() {
  if (!hidden_.empty()) {
    if (auto gone = sys::remove_tree(hidden_); !gone) log::warn("checkpoint", "{}", gone.error().what());
  }
  if (!lock_) return;
  sys::forget_on_fork(lock_.get());
  ::flock(lock_.get(), LOCK_UN);
}

Result<CheckpointWriter> CheckpointWriter::open(const std::string& folder) {
  if (auto made = sys::make_folders(folder); !made) return tl::unexpected(made.error());
  auto lock = lock_folder(folder);
  if (!lock) return tl::unexpected(lock.error());
  CheckpointWriter writer(folder, std::move(*lock));
  const auto names = sys::list_folder(folder);
  if (!names) return tl::unexpected(names.error());
  for (const std::string& name : *names) {
    if (name.starts_with(kHidden) || name.starts_with(kDoomed)) {
      if (auto gone = sys::remove_tree(folder + "/" + name); !gone) return tl::unexpected(gone.error());
    }
    writer.newest_ = std::max(writer.newest_, generation_of(name).value_or(0));
  }
  return writer;
}

Result<void> CheckpointWriter::begin(std::int64_t generation, std::int64_t step) {
  const std::string hidden = fmt::format("{}/{}{}-{}", folder_, kHidden, name_of(generation, step), sys::random_hex(8));
  if (auto made = sys::make_folders(hidden); !made) return made;
  hidden_ = hidden;
  return {};
}

Result<void> CheckpointWriter::seal(const Manifest& manifest, const std::function<bool(const std::string&)>& is_here) {
  manifest_ = manifest;
  const auto json = to_json(manifest_);
  if (!json) return tl::unexpected(json.error());
  for (const auto& [name, digest] : manifest_.files) {
    if (!is_here(name)) continue;
    // If several processes write on a network file system, this shows that their files have arrived.
    const std::string path = fmt::format("{}/{}", hidden_, name);
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) {
      return fail(ErrorCode::Io, "cannot find {} -- {} -- it was just written: check its file system", path,
                  errno_text(errno));
    }
    if (static_cast<std::uint64_t>(status.st_size) != digest.bytes) {
      return fail(ErrorCode::Io, "{} has {} bytes where {} were written -- check its file system", path, status.st_size,
                  digest.bytes);
    }
  }
  auto file = sys::FileWriter::create(hidden_ + "/" + kManifestFile);
  if (!file) return tl::unexpected(file.error());
  auto done = file->write(*json);
  if (done) done = file->sync();
  if (done) done = sys::sync_folder(hidden_);
  return done;
}

Result<StoredCheckpoint> CheckpointWriter::publish() {
  const std::string folder = fmt::format("{}/{}{}", folder_, kPrefix, name_of(manifest_.generation, manifest_.step));
  if (auto done = sys::rename_path(hidden_, folder); !done) return tl::unexpected(done.error());
  hidden_.clear();
  published_ = folder;
  remember_damage(folder, false);  // an earlier checkpoint may have had this name
  if (auto done = sys::sync_folder(folder_); !done) {
    withdraw();
    return tl::unexpected(done.error());
  }
  return StoredCheckpoint{folder, manifest_};
}

void CheckpointWriter::withdraw() {
  if (published_.empty()) return;
  if (auto gone = discard(folder_, published_.substr(folder_.size() + 1)); !gone)
    log::warn("checkpoint", "cannot take back a checkpoint: {}", gone.error().what());
  published_.clear();
}

Result<StoredCheckpoint> read_checkpoint(const std::string& folder) {
  const std::string path = fmt::format("{}/{}", folder, kManifestFile);
  const auto text = sys::read_file(path, {.max_bytes = kLongestManifest});
  if (!text) return tl::unexpected(text.error());
  auto manifest = parse_manifest(text->text(), path);
  if (!manifest) return tl::unexpected(manifest.error());
  return StoredCheckpoint{folder, std::move(*manifest)};
}

namespace {

/// `gone` is set if a checkpoint was removed while it was read, so that a newer one may be missing in the list.
Result<CheckpointList> list_once(const std::string& folder, bool& gone) {
  CheckpointList list;
  const auto names = sys::list_folder(folder);
  if (!names) {
    if (names.error().code() == ErrorCode::Unavailable) return list;
    return tl::unexpected(names.error());
  }
  for (const std::string& name : *names) {
    const auto generation = generation_of(name);
    if (!generation) continue;
    list.newest = std::max(list.newest, *generation);
    auto stored = read_checkpoint(folder + "/" + name);
    // A save may have removed the checkpoint meanwhile, to keep newer ones.
    struct stat status {};
    if (!stored && ::lstat((folder + "/" + name).c_str(), &status) != 0 && is_missing(errno)) {
      gone = true;
      continue;
    }
    if (stored && stored->manifest.generation != *generation) {
      list.damaged.emplace_back(ErrorCode::Corrupt,
                                fmt::format("{}/{}: its manifest is of checkpoint {} -- rename it back", folder, name,
                                            stored->manifest.generation));
    } else if (stored) {
      list.sound.push_back(std::move(*stored));
    } else if (stored.error().code() == ErrorCode::InvalidArgument) {
      list.newer.emplace_back(*generation, stored.error());
    } else if (auto why = unread(fmt::format("{}/{}/{}", folder, name, kManifestFile), stored.error());
               why.code() == ErrorCode::Io) {
      list.unreadable.emplace_back(*generation, std::move(why));
    } else {
      list.damaged.push_back(stored.error());
    }
  }
  std::sort(list.sound.begin(), list.sound.end(),
            [](const auto& a, const auto& b) { return a.manifest.generation < b.manifest.generation; });
  for (auto* const all : {&list.newer, &list.unreadable})
    std::sort(all->begin(), all->end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return list;
}

}  // namespace

Result<CheckpointList> list_checkpoints(const std::string& folder) {
  constexpr int kMostLooks = 100;
  for (int look = 1;; ++look) {
    bool gone = false;
    auto list = list_once(folder, gone);
    if (!list || !gone || look == kMostLooks) return list;
  }
}

Result<void> check_checkpoint_files(const StoredCheckpoint& checkpoint) {
  for (const auto& [name, digest] : checkpoint.manifest.files) {
    if (const auto sound = check_checkpoint_file(checkpoint, name); !sound) return sound;
  }
  return {};
}

namespace {

struct Written {
  std::string path;
  const FileDigest& digest;
};
Result<Written> written_as(const StoredCheckpoint& checkpoint, const std::string& name) {
  std::string path = fmt::format("{}/{}", checkpoint.folder, name);
  const auto expected = checkpoint.manifest.files.find(name);
  if (expected == checkpoint.manifest.files.end()) {
    return fail(ErrorCode::Unavailable, "{}: the checkpoint was saved without it", path);
  }
  return Written{std::move(path), expected->second};
}

Result<void> compare(const Written& file, const FileDigest& found) {
  const auto& [path, written] = file;
  if (found.bytes != written.bytes) {
    return fail(ErrorCode::Corrupt, "{}: damaged -- it has {} bytes where {} were written", path, found.bytes,
                written.bytes);
  }
  if (found.sha256 != written.sha256) {
    const std::string where = differing_bytes(written, found);
    return fail(ErrorCode::Corrupt, "{}: damaged{}{} -- its SHA-256 is {} where {} was written", path,
                where.empty() ? "" : " in ", where, found.sha256, written.sha256);
  }
  // If the SHA-256 is equal, CRCs differ only if the manifest's writer was faulty. Such a file is refused, too.
  if (!written.crc32.empty() && found.crc32 != written.crc32) {
    return fail(ErrorCode::Corrupt, "{}: damaged in {} -- its CRC-32 is another than was written", path,
                differing_bytes(written, found));
  }
  return {};
}

}  // namespace

Result<sys::FileBytes> read_checkpoint_file(const StoredCheckpoint& checkpoint, const std::string& name) {
  const auto file = written_as(checkpoint, name);
  if (!file) return tl::unexpected(file.error());
  auto bytes = sys::read_file(file->path);
  if (!bytes) return tl::unexpected(unread(file->path, bytes.error()));
  const FileDigest found =
      bytes->size() == file->digest.bytes ? digest_of(bytes->bytes()) : FileDigest{bytes->size(), {}, {}};
  if (auto same = compare(*file, found); !same) return tl::unexpected(same.error());
  return bytes;
}

Result<void> check_checkpoint_file(const StoredCheckpoint& checkpoint, const std::string& name) {
  const auto file = written_as(checkpoint, name);
  if (!file) return tl::unexpected(file.error());
  auto reader = sys::FileReader::open(file->path);
  if (!reader) return tl::unexpected(unread(file->path, reader.error()));
  std::error_code none;
  FileDigest found{std::filesystem::file_size(file->path, none), {}, {}};
  if (none) {
    const Error why(ErrorCode::Io, fmt::format("cannot examine {} -- {}", file->path, none.message()));
    return tl::unexpected(unread(file->path, why));
  }
  if (found.bytes == file->digest.bytes) {
    FileDigester digester;
    std::vector<std::byte> piece(std::min<std::uint64_t>(found.bytes, kBlockBytes));
    for (std::uint64_t left = found.bytes; left > 0; left -= piece.size()) {
      piece.resize(std::min<std::uint64_t>(left, kBlockBytes));
      if (auto read = reader->read(piece); !read) return tl::unexpected(unread(file->path, read.error()));
      digester.update(piece);
    }
    found = digester.finish();
  }
  return compare(*file, found);
}

}  // namespace cohort::formats
