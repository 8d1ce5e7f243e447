// Whole files, read into memory, and written so that a reader sees the old content or the new one, never a mix. No
// shared state: any thread may call; each object belongs to one thread. Errors (Io, Unavailable, Corrupt) contain the
// path and errno's text.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::sys {

/// A file's bytes, copied to memory (aligned to 64), so that no process can change or truncate them under a reader.
class FileBytes {
 public:
  FileBytes() = default;
  /// Uninitialised memory. Throws std::bad_alloc.
  explicit FileBytes(std::size_t size);
  FileBytes(FileBytes&&) noexcept = default;
  FileBytes& operator=(FileBytes&&) noexcept = default;

  std::byte* data() noexcept { return data_.get(); }
  const std::byte* data() const noexcept { return data_.get(); }
  std::size_t size() const noexcept { return size_; }
  std::span<const std::byte> bytes() const noexcept { return {data_.get(), size_}; }
  std::string_view text() const noexcept { return {reinterpret_cast<const char*>(data_.get()), size_}; }

 private:
  struct Free {
    void operator()(std::byte* pointer) const noexcept { ::operator delete[](pointer, std::align_val_t(64)); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  std::size_t size_ = 0;
};

struct ReadFileOptions {
  std::uint64_t max_bytes = std::uint64_t{1} << 40;  ///< larger files are refused (Corrupt) before memory is allocated
};

/// Reads a regular file. Fails with Unavailable if it does not exist, Io if it shrinks meanwhile or is not a regular
/// file.
Result<FileBytes> read_file(const std::string& path, const ReadFileOptions& options = {});

/// Reads a file of any kind to its end. Files of /proc have no size, and may vanish with their process (Io).
Result<std::string> read_text(const std::string& path);

/// A file that is read in parts.
class FileReader {
 public:
  static Result<FileReader> open(const std::string& path);
  /// Fills all of `bytes`, continuing where the last call ended. Fails with Io if the file ends before.
  Result<void> read(std::span<std::byte> bytes);
  /// Continues reading at `offset`.
  Result<void> seek(std::uint64_t offset);

 private:
  FileReader(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  UniqueFd fd_;
  std::string path_;
};

/// A new file, written sequentially. Destruction closes the descriptor and keeps the file.
class FileWriter {
 public:
  /// Fails if the file exists.
  static Result<FileWriter> create(const std::string& path);
  Result<void> write(std::span<const std::byte> bytes);
  Result<void> write(std::string_view text) { return write(std::as_bytes(std::span(text.data(), text.size()))); }
  /// Returns when the bytes are on the disk (fsync).
  Result<void> sync();
  std::uint64_t size() const noexcept { return size_; }

 private:
  friend class AtomicFile;
  FileWriter(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  UniqueFd fd_;
  std::string path_;
  std::uint64_t size_ = 0;
};

/// Replaces a file as a whole: writes a file without a name (O_TMPFILE, so a killed writer leaves nothing), syncs and
/// renames it, and syncs the folder. The file has a hidden name if the file system lacks O_TMPFILE, and briefly while
/// it replaces an existing file. Keeps the mode of a replaced file, and follows a symbolic link. Destruction without
/// `commit` leaves the old file unchanged.
class AtomicFile {
 public:
  static Result<AtomicFile> create(const std::string& path);
  AtomicFile(AtomicFile&&) noexcept = default;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  FileWriter& writer() noexcept { return writer_; }
  Result<void> commit();

 private:
  AtomicFile(FileWriter writer, std::string path, std::string aside)
      : writer_(std::move(writer)), path_(std::move(path)), aside_(std::move(aside)) {}
  FileWriter writer_;
  std::string path_;
  std::string aside_;  ///< the hidden name, if the file has one
};

/// Replaces a file by this content, with AtomicFile.
Result<void> write_file_atomically(const std::string& path, std::span<const std::byte> bytes);
Result<void> write_file_atomically(const std::string& path, std::string_view text);

/// Syncs a folder (fsync), so that the names in it survive a power cut.
Result<void> sync_folder(const std::string& path);
/// Renames by rename(2), which replaces a file by a file, and an empty folder by a folder.
Result<void> rename_path(const std::string& from, const std::string& to);
/// Like mkdir -p, and syncs the parents of new folders.
Result<void> make_folders(const std::string& path);
/// Removes a file, or a folder with everything in it, without following links. A missing path is no error.
Result<void> remove_tree(const std::string& path);
/// Names in a folder, sorted, without "." and "..".
Result<std::vector<std::string>> list_folder(const std::string& path);

/// Returns `bytes` random bytes (256 at most) from the kernel, each as two hexadecimal digits, for unique names.
std::string random_hex(std::size_t bytes);
/// Writes all of `text`, unlike write(2). Returns false, with errno set, if that fails.
bool write_all(int fd, std::string_view text);

}  // namespace cohort::sys
