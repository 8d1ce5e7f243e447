// Whole files, read into memory and written so that a reader sees the old content or the new one, never a part.
// Nothing here is shared: any thread may call, each object belongs to one thread. Errors (Io, Unavailable, Corrupt)
// name the path and errno's text.
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

/// The bytes of a file, in memory of their own (aligned to 64), so that nobody can change or cut them under a reader.
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
  std::uint64_t max_bytes = std::uint64_t{1} << 40;  ///< a larger file is refused (Corrupt) before memory is taken
};

/// A regular file, completely. Unavailable if it does not exist; Io if it shrinks meanwhile or is not a regular file.
Result<FileBytes> read_file(const std::string& path, const ReadFileOptions& options = {});

/// A file of any kind to its end: also those of /proc, which report no size and may end with their process (Io).
Result<std::string> read_text(const std::string& path);

/// A file read a part at a time.
class FileReader {
 public:
  static Result<FileReader> open(const std::string& path);
  /// Fills all of `bytes`, from where the last call ended; Io if the file ends before.
  Result<void> read(std::span<std::byte> bytes);
  /// Continues reading at `offset`.
  Result<void> seek(std::uint64_t offset);

 private:
  FileReader(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  UniqueFd fd_;
  std::string path_;
};

/// A new file, written front to back. The descriptor is closed at the end; the file stays.
class FileWriter {
 public:
  /// Fails if the file exists.
  static Result<FileWriter> create(const std::string& path);
  Result<void> write(std::span<const std::byte> bytes);
  Result<void> write(std::string_view text) { return write(std::as_bytes(std::span(text.data(), text.size()))); }
  /// Returns once the bytes are on the disk (fsync).
  Result<void> sync();
  std::uint64_t size() const noexcept { return size_; }

 private:
  friend class AtomicFile;
  FileWriter(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  UniqueFd fd_;
  std::string path_;
  std::uint64_t size_ = 0;
};

/// Replaces a file as a whole: written aside without a name (O_TMPFILE, so that a killed writer leaves nothing; with a
/// hidden name where the file system cannot, and for the moment in which an existing file is replaced), synced,
/// renamed, and the folder synced. The mode of a file that is replaced is kept, and a symbolic link is followed.
/// Destroyed without `commit`: nothing has happened.
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
  std::string aside_;  ///< the hidden name, while there is one
};

/// The whole content at once.
Result<void> write_file_atomically(const std::string& path, std::span<const std::byte> bytes);
Result<void> write_file_atomically(const std::string& path, std::string_view text);

/// fsync of a folder, so that names in it survive a power cut.
Result<void> sync_folder(const std::string& path);
/// rename(2). Replaces a file, or an empty folder by a folder.
Result<void> rename_path(const std::string& from, const std::string& to);
/// mkdir -p, new folders synced into their parents.
Result<void> make_folders(const std::string& path);
/// Removes a file or a folder with everything in it; links are not followed. A missing path is no error.
Result<void> remove_tree(const std::string& path);
/// Names in a folder, sorted, without "." and "..".
Result<std::vector<std::string>> list_folder(const std::string& path);

/// Returns so many bytes from the kernel's generator, two digits each: for names that nobody else uses. At most 256.
std::string random_hex(std::size_t bytes);
/// All of it, as write(2) may take less. False, with errno, where that fails.
bool write_all(int fd, std::string_view text);

}  // namespace cohort::sys
