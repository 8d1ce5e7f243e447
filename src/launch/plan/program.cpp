#include "launch/plan/program.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>

namespace cohort::launch {
namespace {

bool is_file(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

bool is_executable(const std::string& path) { return is_file(path) && ::access(path.c_str(), X_OK) == 0; }

std::optional<std::string> search(std::string_view name, std::string_view folders) {
  while (true) {
    const auto colon = folders.find(':');
    const std::string_view folder = folders.substr(0, colon);
    const std::string path = (folder.empty() ? std::string(".") : std::string(folder)) + "/" + std::string(name);
    if (is_executable(path)) return path;
    if (colon == std::string_view::npos) return std::nullopt;
    folders.remove_prefix(colon + 1);
  }
}

std::string search_path(const Environment& environment) { return environment.find("PATH").value_or("/usr/bin:/bin"); }

std::string short_name(std::string_view path) {
  if (const auto slash = path.rfind('/'); slash != std::string_view::npos) path.remove_prefix(slash + 1);
  if (path.ends_with(".py")) path.remove_suffix(3);
  std::string name;
  for (const char c : path.substr(0, 40)) {
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.';
    name += plain ? c : '-';
  }
  return name.empty() || name[0] == '.' ? "program" + name : name;
}

/// "train" of `python train.py` and `python -m train`, too.
std::string name_of(const ProgramRequest& request) {
  std::string name = short_name(request.program);
  if (!name.starts_with("python")) return name;
  for (std::size_t i = 0; i < request.arguments.size(); ++i) {
    if (request.arguments[i].ends_with(".py")) return short_name(request.arguments[i]);
    if (request.arguments[i] == "-m" && i + 1 < request.arguments.size()) return short_name(request.arguments[i + 1]);
  }
  return name;
}

Result<std::string> find_file(const std::string& program, const Environment& environment, bool script) {
  if (program.find('/') != std::string::npos) {
    struct stat info {};
    if (::stat(program.c_str(), &info) != 0) {
      return fail(ErrorCode::Unavailable, "cannot start {}: {}", program, errno_text(errno));
    }
    if (S_ISDIR(info.st_mode)) return fail(ErrorCode::Unavailable, "cannot start {}: it is a folder", program);
    return program;
  }
  if (script && is_file(program)) return "./" + program;
  if (struct stat info{}; ::stat(program.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && (script || program[0] == '.'))
    return fail(ErrorCode::Unavailable, "cannot start {}: it is a folder", program);
  if (script) {
    std::error_code error;
    return fail(ErrorCode::Unavailable, "cannot start {}: there is no such file in {}", program,
                std::filesystem::current_path(error).string());
  }
  const std::string folders = search_path(environment);
  if (auto found = search(program, folders)) return *found;
  std::string hint;
  if (is_file("./" + program)) hint = fmt::format("; did you mean ./{}?", program);
  if (program == "python") hint = "; did you mean python3, or `cohort run PROGRAM.py`?";
  return fail(ErrorCode::Unavailable, "cannot start {}: no such program in PATH ({}){}", program, folders, hint);
}

/// What execve would say only as "No such file" or "Exec format error".
Result<void> check_executable(const std::string& path) {
  if (::access(path.c_str(), X_OK) != 0) {
    return fail(ErrorCode::Unavailable, "cannot start {}: {}; make it executable with `chmod +x {}`", path,
                errno_text(errno), path);
  }
  std::ifstream file(path, std::ios::binary);
  char head[4] = {};
  file.read(head, sizeof head);
  const std::string_view start(head, static_cast<std::size_t>(file.gcount()));
  if (!file.is_open() || start.starts_with("\177ELF")) return {};  // executable and unreadable is allowed
  if (!start.starts_with("#!")) {
    // Other formats exist (binfmt_misc); plain text is none of them.
    for (const char c : start) {
      if (static_cast<unsigned char>(c) < 9) return {};
    }
    return fail(ErrorCode::Unavailable,
                "cannot start {}: it is neither a program nor does it begin with #!; name its interpreter, e.g. "
                "`cohort run ... -- sh {}`",
                path, path);
  }
  file.clear();
  file.seekg(2);
  std::string line;
  std::getline(file, line);
  if (line.ends_with('\r')) {
    return fail(
        ErrorCode::Unavailable,
        "cannot start {}: its first line ends with a carriage return, as of an editor on Windows, and the kernel "
        "takes that for a part of the interpreter's name; `sed -i 's/\\r$//' {}` removes them",
        path, path);
  }
  std::string interpreter;
  std::istringstream(line) >> interpreter;
  if (!interpreter.empty() && !is_executable(interpreter)) {
    return fail(ErrorCode::Unavailable, "cannot start {}: its first line names the interpreter {}, which is not there",
                path, interpreter);
  }
  return {};
}

}  // namespace

Result<std::string> find_command(const std::string& name, const Environment& environment) {
  return find_file(name, environment, false);
}

Result<std::string> active_python(const Environment& environment) {
  if (const auto virtual_env = environment.find("VIRTUAL_ENV"); virtual_env && !virtual_env->empty()) {
    const std::string python = *virtual_env + "/bin/python3";
    if (is_executable(python)) return python;
    return fail(ErrorCode::Unavailable,
                "VIRTUAL_ENV is {}, and there is no bin/python3 in it; activate another one or unset it", *virtual_env);
  }
  const std::string folders = search_path(environment);
  for (const char* name : {"python3", "python"}) {
    if (auto found = search(name, folders)) return *found;
  }
  return fail(ErrorCode::Unavailable, "there is no python3 in PATH ({}); install it or activate a virtual environment",
              folders);
}

Result<Program> resolve_program(const ProgramRequest& request, const Environment& environment) {
  Program program;
  program.name = name_of(request);
  const bool script = request.python == ProgramRequest::Python::Auto && request.program.ends_with(".py");
  if (script || request.python == ProgramRequest::Python::Module) {
    auto python = active_python(environment);
    if (!python) return tl::unexpected(python.error());
    program.path = *python;
    program.arguments.push_back(*python);
    if (request.python == ProgramRequest::Python::Module) {
      program.arguments.insert(program.arguments.end(), {"-m", request.program});
    } else {
      auto file = find_file(request.program, environment, true);
      if (!file) return tl::unexpected(file.error());
      if (::access(file->c_str(), R_OK) != 0) {
        return fail(ErrorCode::Unavailable, "cannot read {}: {}", *file, errno_text(errno));
      }
      program.arguments.push_back(
          request.program.find('/') == std::string::npos ? file->substr(file->starts_with("./") ? 2 : 0) : *file);
    }
  } else {
    auto file = find_file(request.program, environment, false);
    if (!file) return tl::unexpected(file.error());
    if (auto fine = check_executable(*file); !fine) return tl::unexpected(fine.error());
    program.path = *file;
    program.arguments.push_back(request.program);
  }
  program.arguments.insert(program.arguments.end(), request.arguments.begin(), request.arguments.end());
  return program;
}

}  // namespace cohort::launch
