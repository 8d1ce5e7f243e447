#include "base/files.h"
#include "base/process.h"
#include "base/result.h"
#include "cohort/commands.h"
#include "comm/transport/mpi/endpoint.h"
#include "launch/start/starter.h"
#include "mpi_sources.h"
#include "net/secret.h"
#include "rendezvous/detect.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace cohort::app {
namespace {

// `cohort build-mpi`: compiles the plug-in for the site's MPI with its mpicc, and puts it where ranks look for it.

namespace fs = std::filesystem;

constexpr auto kCompiling = std::chrono::minutes(2);
constexpr auto kChecking = std::chrono::seconds(30);

struct BuildMpiOptions {
  std::vector<std::string> compilers;
  std::string output;
  std::string check;
};

/// Prints a plug-in's description of itself in three lines: family, the version it was made for, library.
void print_check(const std::string& path) {
  const mpi::Plugin plugin = value_or_throw(mpi::open_plugin(fs::absolute(path)));
  char library[512] = "";
  if (plugin.mpi->library(library, sizeof library) != 0)
    raise(ErrorCode::Unavailable, "{}: its MPI library does not say which it is", path);
  std::string line = library;
  line = line.substr(0, line.find('\n'));
  fmt::print("{}\n{}\n{}\n", plugin.mpi->family, plugin.mpi->made_for, line);
}

std::vector<std::string> compilers_to_use(const std::vector<std::string>& given) {
  if (!given.empty()) return given;
  std::vector<std::string> found;
  std::vector<fs::path> real;
  const char* const path = std::getenv("PATH");
  for (const char* const name : {"mpicc", "mpicc.openmpi", "mpicc.mpich"}) {
    std::istringstream folders(path == nullptr ? "" : path);
    for (std::string folder; std::getline(folders, folder, ':');) {
      const fs::path candidate = fs::path(folder) / name;
      if (::access(candidate.c_str(), X_OK) != 0) continue;
      const fs::path target = fs::canonical(candidate);
      if (std::find(real.begin(), real.end(), target) == real.end()) {
        real.push_back(target);
        found.push_back(candidate.string());
      }
      break;
    }
  }
  if (found.empty()) {
    raise(ErrorCode::Unavailable,
          "build-mpi: there is no mpicc in PATH -- load the site's MPI (module load ...), install its development "
          "package, or give --mpicc PATH");
  }
  return found;
}

fs::path make_folder(const BuildMpiOptions& options) {
  const bool own = options.output.empty();
  const auto folders = mpi::plugin_folders(rendezvous::current_environment());
  if (own && folders.empty()) raise(ErrorCode::Unavailable, "build-mpi: HOME is not set -- give --output FOLDER");
  const fs::path folder = fs::absolute(own ? folders.front() : fs::path(options.output));
  const bool is_new = !fs::exists(folder);
  value_or_throw(sys::make_folders(folder.string()));
  // Files in this folder are loaded into the user's programs.
  if (own && is_new && ::chmod(folder.c_str(), 0700) != 0)
    raise(ErrorCode::Io, "{}: {}", folder.string(), errno_text(errno));
  return folder;
}

void build(const std::string& compiler, const fs::path& folder) {
  const TemporaryFolder beside(folder, ".build-");  // other file systems may forbid to load programs from them
  const fs::path& work = beside.path();
  value_or_throw(sys::write_file_atomically((work / "cohort_mpi.h").string(), kMpiHeader));
  value_or_throw(sys::write_file_atomically((work / "cohort_mpi_plugin.c").string(), kMpiPlugin));
  const std::string made = (work / "plugin.so").string();
  const auto compiled = value_or_throw(launch::capture(
      {compiler, "-O2", "-fPIC", "-shared", "-o", made, (work / "cohort_mpi_plugin.c").string()}, kCompiling));
  if (compiled.status != 0) {
    raise(ErrorCode::Unavailable, "build-mpi: {} failed with status {} -- it needs an MPI of version 3 or later:\n{}",
          compiler, compiled.status, compiled.text);
  }
  // Uses a separate process, since two MPIs cannot share one.
  const auto checked =
      value_or_throw(launch::capture({value_or_throw(sys::own_executable()), "build-mpi", "--check", made}, kChecking));
  std::istringstream lines(checked.text);
  std::string family;
  std::string made_for;
  std::string library;
  if (checked.status != 0 || !std::getline(lines, family) || !std::getline(lines, made_for) ||
      !std::getline(lines, library))
    raise(ErrorCode::Unavailable, "build-mpi: what {} made cannot be used: {}", compiler, checked.text);
  std::string version = made_for.substr(made_for.rfind(' ') + 1);
  std::replace_if(
      version.begin(), version.end(), [](unsigned char letter) { return std::isalnum(letter) == 0 && letter != '.'; },
      '_');
  const fs::path path =
      folder / fmt::format("{}{}-{}-{}.so", mpi::kPluginPrefix, family, version, net::sha256_hex(library).substr(0, 8));
  fs::permissions(made, fs::perms(0755));
  value_or_throw(sys::rename_path(made, path.string()));
  fmt::print("{}: for {} ({})\n", path.string(), made_for, library);
}

}  // namespace

void add_build_mpi(CLI::App& app, int&) {
  auto options = std::make_shared<BuildMpiOptions>();
  CLI::App* command =
      app.add_subcommand("build-mpi", "Compile the plug-in through which COHORT_TRANSPORT=mpi uses the site's MPI");
  command->add_option("--mpicc", options->compilers,
                      "The MPI's compiler; may be repeated (default: mpicc, mpicc.openmpi and mpicc.mpich of PATH)");
  command->add_option("--output", options->output,
                      "Folder for the plug-in (default: ~/.local/share/cohort/mpi, where ranks look for it; "
                      "elsewhere COHORT_MPI_PLUGIN has to name the file)");
  command->add_option("--check", options->check, "Build nothing; load this plug-in and say what it is made for")
      ->type_name("FILE");
  command->footer(
      "It is done once for each MPI and version of Cohort, on a host that has the MPI's compiler; all hosts that "
      "share\n"
      "the home folder have it then. After that: COHORT_TRANSPORT=mpi mpirun -np 4 ./train");
  command->callback([options] {
    if (!options->check.empty()) return print_check(options->check);
    const std::vector<std::string> compilers = compilers_to_use(options->compilers);
    const fs::path folder = make_folder(*options);
    for (const std::string& compiler : compilers) build(compiler, folder);
  });
}

}  // namespace cohort::app
