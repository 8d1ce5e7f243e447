// The program to run: the table [run] of a TOML file, as texts, and the executable that a command line names. Reads
// files, starts nothing; any thread.
#pragma once

#include "base/result.h"
#include "launch/processes.h"

#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

struct ProgramRequest {
  std::string program;  ///< name or path; with `module` a Python module
  std::vector<std::string> arguments;
  enum class Python {
    Auto,    ///< a .py file runs with the active Python, any other file is executed
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

/// Finds the program. Errors (Unavailable): not found (names the PATH that was searched; suggests ./PROGRAM if that
/// exists), not executable, a script whose interpreter is missing, neither a program nor a script, no Python.
Result<Program> resolve_program(const ProgramRequest& request, const Environment& environment);

/// Finds a command in PATH. Fails with Unavailable, naming what was searched.
Result<std::string> find_command(const std::string& name, const Environment& environment);

/// Returns VIRTUAL_ENV's Python, else python3 on PATH, else python.
Result<std::string> active_python(const Environment& environment);

/// An entry of the table [run]: its contents and its line. The set of valid keys is not known here.
struct ConfigEntry {
  std::string key;
  /// One text; for a list each element; for a table "NAME=value" for each entry. Numbers and truth values are written
  /// as in TOML.
  std::vector<std::string> values;
  bool is_list = false;
  int line = 0;
};

/// Returns the entries of [run], in the order of their lines. Fails with InvalidArgument, naming `name` and the line,
/// on text that is not TOML, on anything outside [run], and on values that are neither texts, numbers, truth values nor
/// lists of these.
Result<std::vector<ConfigEntry>> parse_config(std::string_view text, const std::string& name);

/// Parses the file. Fails with Io if it cannot be read.
Result<std::vector<ConfigEntry>> read_config(const std::string& path);

/// Returns the text as TOML writes it: "a\"b".
std::string toml_text(std::string_view text);

}  // namespace cohort::launch
