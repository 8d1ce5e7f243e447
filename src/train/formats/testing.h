// For tests of this folder: bytes, folders, and the pythons that have a torch.
#pragma once

#include "base/files.h"
#include "train/formats/idx.h"

#include <gtest/gtest.h>

#include <unistd.h>
#include <zlib.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace cohort::formats {

/// A temporary folder, removed by the destructor.
class TestFolder {
 public:
  TestFolder() {
    std::string name = ::testing::TempDir() + "cohort_XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  ~TestFolder() { static_cast<void>(sys::remove_tree(path_)); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::vector<std::byte> random_bytes(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

inline std::vector<std::byte> copy_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

/// Compresses as one gzip member.
inline std::vector<std::byte> gzip(std::span<const std::byte> bytes) {
  z_stream stream{};
  if (deflateInit2(&stream, Z_BEST_COMPRESSION, Z_DEFLATED, 15 + 16, 9, Z_DEFAULT_STRATEGY) != Z_OK) std::abort();
  std::vector<std::byte> packed(deflateBound(&stream, bytes.size()));
  stream.next_in = const_cast<Bytef*>(reinterpret_cast<const Bytef*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  if (deflate(&stream, Z_FINISH) != Z_STREAM_END) std::abort();
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

/// Returns the IDX file of an array; `type` is the code of its elements, which are written big-endian.
inline std::vector<std::byte> idx_bytes(const IdxArray& array, int type = 0x08) {
  std::vector<std::byte> bytes = {std::byte{0}, std::byte{0}, static_cast<std::byte>(type),
                                  static_cast<std::byte>(array.shape.size())};
  for (const std::int64_t dimension : array.shape) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<std::byte>(dimension >> shift & 0xff));
  }
  const auto element = static_cast<std::ptrdiff_t>(size_of(array.dtype));
  for (auto at = array.data.begin(); at != array.data.end(); at += element)
    bytes.insert(bytes.end(), std::make_reverse_iterator(at + element), std::make_reverse_iterator(at));
  return bytes;
}

/// Returns the interpreters that can import torch; tries the active one and Debian's.
inline std::vector<std::string> pythons_with_torch() {
  static const std::vector<std::string> kFound = [] {
    std::vector<std::string> found;
    std::string first_version;
    for (const std::string python : {"python3", "/usr/bin/python3"}) {
      std::FILE* const pipe =
          ::popen((python + " -c 'import torch; print(torch.__version__)' 2>/dev/null").c_str(), "r");
      char text[64] = {};
      const bool answered = pipe != nullptr && std::fgets(text, sizeof text, pipe) != nullptr;
      if (pipe != nullptr) ::pclose(pipe);
      if (!answered || first_version == text) continue;
      first_version = text;
      found.push_back(python);
    }
    return found;
  }();
  return kFound;
}

/// Runs a script with `arguments`; a failure includes the script's output.
inline ::testing::AssertionResult run_python(const std::string& python, const std::string& script,
                                             const std::string& arguments) {
  TestFolder folder;
  const std::string path = folder / "script.py", log = folder / "log.txt";
  if (!sys::write_file_atomically(path, script)) return ::testing::AssertionFailure() << "no script";
  const int status = std::system((python + " " + path + " " + arguments + " > " + log + " 2>&1").c_str());
  if (status == 0) return ::testing::AssertionSuccess();
  const auto output = sys::read_file(log);
  return ::testing::AssertionFailure() << python << ": status " << status << "\n"
                                       << (output ? std::string(output->text()) : "");
}

}  // namespace cohort::formats
