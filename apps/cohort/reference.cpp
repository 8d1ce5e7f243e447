// The tables of docs/reference/run.md and environment.md, from the rows that the command goes by.
#include "base/env.h"

#include "commands.h"
#include "run_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::app {
namespace {

/// Options that a text names stand as code there, and nothing in it is markup but what is code already.
std::string cell(std::string_view plain) {
  static const std::regex special("`[^`]*`|\"[^\"]*\"|--?[a-z]+(-[a-z]+)*|[|<*]");
  const std::string text(plain);
  std::string out;
  std::size_t done = 0;
  for (std::sregex_iterator found(text.begin(), text.end(), special), end; found != end; ++found) {
    const auto at = static_cast<std::size_t>(found->position());
    out += text.substr(done, at - done);
    const std::string what = found->str();
    const bool within_word = at > 0 && std::isalnum(static_cast<unsigned char>(text[at - 1])) != 0;
    if (what.front() == '"')
      out += "`" + what.substr(1, what.size() - 2) + "`";
    else if (what.front() == '-' && !within_word)
      out += "`" + what + "`";
    else
      out += (what.size() == 1 ? "\\" : "") + what;
    done = at + what.size();
  }
  return out + text.substr(done);
}

std::string code(std::string_view text) { return text.empty() ? std::string() : fmt::format("`{}`", text); }

std::string row_of(const RunOption& option) {
  std::vector<std::string> names = option.all_names();
  if (!option.type.empty()) names.back() += fmt::format(" {}", option.type);
  for (std::string& name : names) name = code(name);
  // A default that is no value stands behind the help.
  std::string_view help = option.help, standard;
  if (const auto bracket = help.rfind(" ["); bracket != std::string_view::npos && help.ends_with(']')) {
    standard = help.substr(bracket + 2, help.size() - bracket - 3);
    help = help.substr(0, bracket);
  }
  return fmt::format("| {} | {} | {} |\n", fmt::join(names, ", "),
                     option.standard.empty() ? cell(standard) : code(option.standard), cell(help));
}

}  // namespace

std::string run_reference() {
  std::string text;
  for (const RunPart& part : run_parts()) {
    text += fmt::format("{}### {}\n\n| option | default | meaning |\n|---|---|---|\n", text.empty() ? "" : "\n",
                        part.title.empty() ? "For programs that start the command" : part.title);
    for (const RunOption* option : part.options) text += row_of(*option);
  }
  return text;
}

std::string environment_reference() {
  std::string text;
  for (const auto& [use, title] : {std::pair(env::Variable::Use::Read, "Read by the library and the command"),
                                   std::pair(env::Variable::Use::SetForRanks, "Set by `cohort run` for its ranks")}) {
    text += fmt::format("{}## {}\n\n| variable | value | default | meaning |\n|---|---|---|---|\n",
                        text.empty() ? "" : "\n", title);
    for (const env::Variable& row : env::variables()) {
      if (row.use != use) continue;
      const bool described = row.type.kind == env::Type::Kind::Text || row.default_value.starts_with("as ");
      text += fmt::format("| `{}` | {} | {} | {} |\n", row.name, cell(row.value()),
                          described ? cell(row.default_value) : code(row.default_value), cell(row.meaning));
    }
  }
  return text;
}

}  // namespace cohort::app
