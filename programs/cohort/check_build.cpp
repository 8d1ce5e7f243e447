// `cohort check-build`: what this build and this machine have, with versions, or the reason why not and what to
// install.

#include "base/files.h"
#include "base/json.h"
#include "base/process.h"
#include "base/result.h"
#include "cohort/commands.h"
#include "comm/api/communicator_impl.h"
#include "comm/gpu/driver.h"
#include "comm/gpu/nccl.h"
#include "comm/transport/mpi/endpoint.h"
#include "launch/plan/program.h"
#include "launch/processes.h"
#include "launch/start/starter.h"
#include "launch/version.h"
#include "mpi_sources.h"
#include "net/secret.h"
#include "rendezvous/detect.h"

#include <fmt/core.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::app {
namespace {

/// Frameworks are really imported, to find installed ones that do not work.
constexpr auto kPythonLimit = std::chrono::seconds(120);
constexpr auto kProgramLimit = std::chrono::seconds(15);
constexpr std::string_view kMark = "cohort-check-build ";

/// A module, and the command that installs it if it is missing.
struct Module {
  const char* name;
  const char* install;
};
constexpr Module kModules[] = {
    {"cohort", "pip install . in a clone of Cohort, or its build folder's python/ on PYTHONPATH"},
    {"torch", "pip install torch"},
    {"numpy", "pip install numpy"},
    {"cloudpickle", "pip install cloudpickle"},
};

// Prints one line with kMark, whatever the imports print themselves.
constexpr const char* kScript = R"(
import sys
sys.path = [one for one in sys.path if one]  # not the folder in which it is started, whose json.py is the user's
import importlib, json, platform
out = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        version = getattr(module, "__version__", None)
        if version is None:
            import importlib.metadata
            version = importlib.metadata.version(name)
        out[name] = {"version": str(version)}
    except BaseException as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        out[name] = {"missing": missing, "why": type(error).__name__ + ": " + " ".join(str(error).split())[:300]}
if "version" in out.get("torch", {}):
    import torch
    parts = ["CUDA " + torch.version.cuda if torch.version.cuda else "CPU only"]
    if torch.cuda.is_available():
        parts.append(str(torch.cuda.device_count()) + " GPUs")
    dist = torch.distributed
    if dist.is_available():
        found = [n for n in ("gloo", "nccl", "mpi") if getattr(dist, "is_" + n + "_available", lambda: False)()]
        parts.append("torch.distributed: " + (", ".join(found) or "no backend"))
    else:
        parts.append("without torch.distributed")
    out["torch"]["more"] = "; ".join(parts)
print("\ncohort-check-build " + json.dumps(out))
)";

struct Program {
  const char* name;
  std::vector<std::string> command;
  const char* install;
};

void row(std::string_view name, std::string_view text) { fmt::print("  {:<12} {}\n", name, text); }

std::string first_line(const std::string& text) {
  const auto begin = text.find_first_not_of(" \r\n");
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_first_of("\r\n", begin) - begin);
}

/// Most programs print their version in the first line; MPICH's launcher in a line of that name.
std::string version_in(const std::string& text) {
  const std::string first = first_line(text);
  const auto named = text.find("Version:");
  if (first.starts_with("HYDRA") && named != std::string::npos) return "MPICH " + first_line(text.substr(named + 8));
  return first;
}

void check_backends() {
  fmt::print("Communication\n");
  for (const comm::Backend& backend : comm::backends()) {
    const comm::Availability found = backend.probe();
    row(backend.name, found.available ? found.version : "no: " + found.reason);
  }
  std::string plugins;
  for (const auto& path : mpi::installed_plugins(rendezvous::current_environment()))
    plugins += fmt::format("{}{}", plugins.empty() ? "between hosts, by " : ", ", path.string());
  const auto gpus = comm::cuda::Gpu::look();
  row("cuda",
      gpus ? *gpus + "; the rank with LOCAL_RANK r is to use cuda:r" : fmt::format("no: {}", gpus.error().what()));
  const auto& nccl = comm::cuda::Nccl::find();
  row("nccl", nccl ? fmt::format("{} ({})", comm::cuda::Nccl::text_of(nccl->version), nccl->path)
                   : fmt::format("no, GPU memory is staged through host memory: {}", nccl.error().what()));
  row("mpi", plugins.empty() ? "no: there is no plug-in for an MPI; `cohort build-mpi` makes one" : plugins);
}

void check_python() {
  const auto python = launch::active_python(launch::Environment::current());
  if (!python) {
    fmt::print("Python\n");
    row("python", fmt::format("no: {}", python.error().what()));
    return;
  }
  fmt::print("Python ({})\n", *python);
  std::vector<std::string> command = {*python, "-c", kScript};
  for (const Module& module : kModules) command.emplace_back(module.name);
  const auto answer = launch::capture(command, kPythonLimit);
  if (!answer) return row("python", fmt::format("no: {}", answer.error().what()));
  const auto mark = answer->text.rfind(std::string("\n") + std::string(kMark));
  const nlohmann::json found = mark == std::string::npos
                                   ? nlohmann::json()
                                   : parse_json_or_discard(answer->text.substr(mark + 1 + kMark.size()));
  if (!found.is_object()) {
    return row("python",
               fmt::format("no: it ended with status {} while it imported what is asked for below", answer->status));
  }
  row("python", found.value("python", "?"));
  for (const Module& module : kModules) {
    const nlohmann::json entry = found.value(module.name, nlohmann::json::object());
    if (entry.contains("version")) {
      const std::string more = entry.value("more", "");
      row(module.name, entry.value("version", "") + (more.empty() ? "" : " (" + more + ")"));
    } else if (entry.value("missing", false)) {
      row(module.name, fmt::format("no: not installed; {}", module.install));
    } else {
      row(module.name, fmt::format("no: it is installed and does not work: {}", entry.value("why", "")));
    }
  }
}

void check_programs() {
  const std::vector<Program> programs = {
      {"MPI", {"mpirun", "--version"}, "Debian: apt install openmpi-bin, or mpich"},
      {"Slurm", {"srun", "--version"}, "Debian: apt install slurm-client; it needs a cluster that runs Slurm"},
      {"ssh", {"ssh", "-V"}, "Debian: apt install openssh-client"},
      {"git", {"git", "--version"}, "Debian: apt install git"},
  };
  fmt::print("Programs\n");
  for (const Program& program : programs) {
    const auto answer = launch::capture(program.command, kProgramLimit);
    if (!answer && answer.error().code() == ErrorCode::Unavailable) {
      row(program.name, fmt::format("no: there is no {} in PATH; {}", program.command.front(), program.install));
    } else if (!answer) {
      row(program.name, fmt::format("no: {}", answer.error().what()));
    } else if (answer->status != 0) {
      row(program.name, fmt::format("no: `{}` ends with status {}: {}", fmt::join(program.command, " "), answer->status,
                                    first_line(answer->text)));
    } else {
      row(program.name, version_in(answer->text));
    }
  }
}

}  // namespace

void print_build() {
  fmt::print("cohort {} ({}, {})\n\n", launch::kVersion, launch::kCompiler, launch::kBuildType);
  check_backends();
  fmt::print("\nC++\n");
  const auto prefix = result_of(installed_prefix);
  row("package", prefix ? *prefix + " (CMAKE_PREFIX_PATH)" : fmt::format("no: {}", prefix.error().what()));
  fmt::print("\n");
  check_python();
  fmt::print("\n");
  check_programs();
}

void add_check_build(CLI::App& app, int&) {
  app.add_subcommand("check-build", "Print what this build and this machine have, or why not")->callback(print_build);
}

namespace {

// `cohort build-mpi`: compiles the plug-in for the site's MPI by its own mpicc, and puts it where ranks look for it.

namespace fs = std::filesystem;

constexpr auto kCompiling = std::chrono::minutes(2);
constexpr auto kChecking = std::chrono::seconds(30);

struct BuildMpiOptions {
  std::vector<std::string> compilers;
  std::string output;
  std::string check;
};

/// Prints a plug-in's own description, a line each: family, made for, library.
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
