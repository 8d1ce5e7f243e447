#include "train/formats/pt.h"

#include "base/files.h"
#include "base/process.h"
#include "train/formats/pt_program.h"

#include <fmt/format.h>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::formats {
namespace {

/// With -c Python looks for modules in the working folder first, where a json.py of anybody's may lie. (-P: from 3.11.)
constexpr std::string_view kNotFromHere = "import sys; sys.path[:] = [path for path in sys.path if path]\n";

Result<sys::UniqueFd> file_in_memory() {
  sys::UniqueFd file(::memfd_create("cohort-pt", MFD_CLOEXEC));
  if (!file) return fail(ErrorCode::Unavailable, "memfd_create: {}", errno_text(errno));
  return file;
}

std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

/// Runs the program; `file` is what the user has named.
Result<void> run(const std::string& file, const std::vector<std::string>& arguments,
                 std::vector<std::pair<int, int>> descriptors) {
  auto said = file_in_memory();
  if (!said) return tl::unexpected(said.error());
  sys::SpawnOptions options{.path = "/usr/bin/env",
                            .arguments = {"env", "python3", "-c", std::string(kNotFromHere) + std::string(kPtProgram)},
                            .environment = {},
                            .folder = {}};
  options.arguments.insert(options.arguments.end(), arguments.begin(), arguments.end());
  for (char** one = environ; *one != nullptr; ++one) options.environment.emplace_back(*one);
  options.stdout_fd = options.stderr_fd = said->get();
  options.inherited = std::move(descriptors);
  options.parent_death_signal = SIGKILL;
  auto pending = sys::spawn(options);
  auto child = pending ? std::move(*pending).confirm() : tl::unexpected(pending.error());
  if (!child)
    return fail(ErrorCode::Unavailable, "{}: cannot start {} -- {}", file, options.path, sys::to_string(child.error()));
  while (::waitpid(child->pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  const auto text = sys::read_text(fmt::format("/proc/self/fd/{}", said->get()));
  const std::string end = text ? last_line(*text) : text.error().what();
  if (end == "done") return {};
  for (const auto& [word, code] :
       {std::pair(std::string_view("invalid "), ErrorCode::InvalidArgument), {"corrupt ", ErrorCode::Corrupt}}) {
    if (end.starts_with(word)) return tl::unexpected(Error(code, end.substr(word.size())));
  }
  if (end.starts_with("failed ")) return fail(ErrorCode::Io, "{}: {}", file, end.substr(std::strlen("failed ")));
  return fail(ErrorCode::Unavailable,
              "{}: torch itself reads and writes .pt files, in the python3 of PATH, and there {} -- pip install torch, "
              "activate the environment that has it, or take .safetensors, which need no Python",
              file, end.empty() ? "Python was killed" : end);
}

}  // namespace

bool is_pt(const std::string& path) {
  char head[2] = {};
  std::ifstream(path, std::ios::binary).read(head, sizeof head);
  const std::string_view text(head, sizeof head);
  return text == "PK" || text == "\x80\x02";  // the latter: from before torch 1.6
}

Result<sys::UniqueFd> read_pt(const std::string& path, const std::string& key) {
  auto file = file_in_memory();
  if (!file) return file;
  if (auto done = run(path, {"read", path, key}, {{file->get(), 4}}); !done) return tl::unexpected(done.error());
  return file;
}

Result<void> write_pt(const std::string& path, int safetensors, PtContent content, PtFloats floats) {
  auto file = sys::AtomicFile::create(path);
  if (!file) return tl::unexpected(file.error());
  auto done = run(path,
                  {"write", content == PtContent::Everything ? "everything" : "weights",
                   floats == PtFloats::Tensor ? "tensors" : "numbers"},
                  {{safetensors, 3}, {file->writer().fd(), 4}});
  return done ? file->commit() : done;
}

}  // namespace cohort::formats
