#include "observe/doctor/build.h"

#include "base/json.h"
#include "base/process.h"
#include "base/result.h"
#include "comm/api/communicator_impl.h"
#include "comm/gpu/driver.h"
#include "comm/gpu/nccl.h"
#include "comm/transport/mpi/endpoint.h"
#include "launch/plan/program.h"
#include "launch/processes.h"
#include "launch/start/starter.h"
#include "launch/version.h"
#include "rendezvous/detect.h"
#include "shared/program.h"

#include <fmt/core.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::app {
namespace {

/// Limits for commands. Python really imports frameworks, to find installed ones that do not work.
constexpr auto kPythonLimit = std::chrono::seconds(120);
constexpr auto kProgramLimit = std::chrono::seconds(15);
constexpr std::string_view kMark = "cohort-doctor-build ";

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

// Prints one line with kMark, whatever else the imports print.
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
print("\ncohort-doctor-build " + json.dumps(out))
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

/// Most programs print their version in the first line; MPICH's launcher prints it in a line named "Version".
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

}  // namespace cohort::app
