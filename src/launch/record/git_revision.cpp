#include "launch/record/git_revision.h"

#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kBranches = "refs/heads/";

std::string first_line(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return {};
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
  return line;
}

bool is_commit(std::string_view text) {
  return (text.size() == 40 || text.size() == 64) &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

/// The repository's own folder: .git, or where a file of that name leads to (worktrees, submodules).
fs::path repository_of(fs::path folder) {
  std::error_code error;
  while (true) {
    const fs::path git = folder / ".git";
    if (fs::is_directory(git, error)) return git;
    const std::string line = first_line(git);
    if (line.starts_with("gitdir: ")) return (folder / line.substr(8)).lexically_normal();
    if (!folder.has_relative_path()) return {};
    folder = folder.parent_path();
  }
}

std::string packed(const fs::path& file, const std::string& name) {
  std::error_code error;
  if (!fs::is_regular_file(file, error)) return {};
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    const auto space = line.find(' ');
    if (space != std::string::npos && line.substr(space + 1) == name) return line.substr(0, space);
  }
  return {};
}

}  // namespace

std::optional<GitRevision> git_revision(const std::string& folder) {
  const fs::path repository = repository_of(folder);
  if (repository.empty()) return std::nullopt;
  GitRevision revision;
  std::string head = first_line(repository / "HEAD");
  if (head.starts_with("ref: ")) {
    const std::string name = head.substr(5);
    if (name.starts_with(kBranches)) revision.branch = name.substr(kBranches.size());
    // A worktree has its own HEAD; branches are the main repository's.
    const std::string common = first_line(repository / "commondir");
    const fs::path root = common.empty() ? repository : (repository / common).lexically_normal();
    head = first_line(root / name);
    if (head.empty()) head = packed(root / "packed-refs", name);
  }
  if (!is_commit(head)) return std::nullopt;
  revision.commit = head;
  return revision;
}

}  // namespace cohort::launch
