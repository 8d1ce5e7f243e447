// Which executable a command line means. Looks at files, starts nothing.
#pragma once

#include "base/result.h"
#include "launch/processes.h"

#include <string>
#include <vector>

namespace cohort::launch {

struct ProgramRequest {
  std::string program;  ///< name or path; with `module` a Python module
  std::vector<std::string> arguments;
  enum class Python {
    Auto,    ///< a .py file runs with the active Python, all else is executed
    Module,  ///< python -m program
    Never,   ///< even a .py file is executed
  };
  Python python = Python::Auto;
};

struct Program {
  std::string path;                    ///< executable
  std::vector<std::string> arguments;  ///< argv, with argv[0]
  std::string name;                    ///< short, for folders and messages: "train"
};

/// Errors (Unavailable): not found (names the PATH that was searched; suggests ./PROGRAM where that exists), not
/// executable, a script whose interpreter is missing, neither a program nor a script, no Python.
Result<Program> resolve_program(const ProgramRequest& request, const Environment& environment);

/// In PATH. Fails with Unavailable, naming what was searched.
Result<std::string> find_command(const std::string& name, const Environment& environment);

/// VIRTUAL_ENV's Python, else python3 on PATH, else python.
Result<std::string> active_python(const Environment& environment);

}  // namespace cohort::launch
