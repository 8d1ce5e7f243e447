#include "run_config.h"

#include "base/parse.h"
#include "base/result.h"
#include "launch/environment.h"
#include "launch/plan/config_file.h"

#include "commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <string_view>
#include <utility>

namespace cohort::app {
namespace {

constexpr std::string_view kPrefix = "COHORT_RUN_";
/// They speak of this one command, and mean nothing to the next.
constexpr std::array<std::string_view, 5> kCommandLineOnly = {"help", "show-config", "check-build", "owner",
                                                              "owner-folder"};
/// Set for the ranks; looks like an option's.
constexpr std::string_view kNoOption = "COHORT_RUN_DIR";
constexpr const char* kCommandLine = "command line";
constexpr const char* kDefault = "default";

std::string dashed(const CLI::Option& option) { return "--" + option.get_lnames().front(); }
bool is_flag(const CLI::Option& option) { return option.get_items_expected_min() == 0; }
bool repeatable(const CLI::Option& option) {
  return option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll && !is_flag(option);
}

std::vector<const CLI::Option*> options_of(const CLI::App& run) {
  std::vector<const CLI::Option*> options;
  for (const CLI::Option* option : run.get_options()) {
    if (variable_of(*option)) options.push_back(option);
  }
  return options;
}

using Given = std::map<const CLI::Option*, std::vector<std::string>>;

/// What stands on the command line, before the program.
Given given_on(const CLI::App& run, const std::vector<std::string>& words) {
  Given given;
  for (std::size_t i = 0; i < words.size() && words[i] != "--"; ++i) {
    const std::string& word = words[i];
    const bool is_long = word.starts_with("--");
    const auto equals = word.find('=');
    // "-qm" is two flags, "-n4" one option and its value.
    for (std::size_t at = 1; at < (is_long ? 2 : word.size()); ++at) {
      const std::string name = is_long ? word.substr(0, equals) : std::string("-") + word[at];
      const CLI::Option* option = run.get_option_no_throw(name);
      if (option == nullptr) break;
      auto& values = given[option];
      if (is_flag(*option)) {
        values.push_back(is_long && equals != std::string::npos ? word.substr(equals + 1) : "true");
        continue;
      }
      if (is_long && equals != std::string::npos)
        values.push_back(word.substr(equals + 1));
      else if (!is_long && at + 1 < word.size())
        values.push_back(word.substr(at + 1));
      else if (i + 1 < words.size())
        values.push_back(words[++i]);
      break;
    }
  }
  return given;
}

std::string truth(const std::string& value, const std::string& origin) {
  if (const auto said = parse_truth(value)) return *said ? "true" : "false";
  raise(ErrorCode::InvalidArgument, "{}: true or false is wanted, not '{}'", origin, value);
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(at, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

struct Source {
  std::vector<std::string> values;
  std::string origin;
};

std::map<const CLI::Option*, Source> from_file(const CLI::App& run, const std::string& path) {
  std::map<const CLI::Option*, Source> out;
  const auto known = options_of(run);
  for (const launch::ConfigEntry& entry : value_or_throw(launch::read_config(path))) {
    const std::string origin = fmt::format("{}:{}", path, entry.line);
    std::string key = entry.key;
    std::replace(key.begin(), key.end(), '_', '-');
    const auto found = std::find_if(known.begin(), known.end(), [&key](const CLI::Option* option) {
      const auto& names = option->get_lnames();
      return std::find(names.begin(), names.end(), key) != names.end();
    });
    if (found == known.end() || key == "config") {
      std::vector<std::string> names;
      for (const CLI::Option* option : known) names.push_back(option->get_lnames().front());
      const std::string meant = key == "config" ? "" : closest(key, names);
      raise(ErrorCode::InvalidArgument, "{}: `cohort run` has no option '{}'{}{}", origin, entry.key,
            key == "config" ? " in a file" : "", meant.empty() ? "" : "; did you mean " + meant + "?");
    }
    const CLI::Option& option = **found;
    if (entry.is_list && !repeatable(option) && key != "ranks") {
      raise(ErrorCode::InvalidArgument, "{}: {} takes one value, not a list", origin, entry.key);
    }
    if (out.count(&option) != 0) {
      raise(ErrorCode::InvalidArgument, "{}: {} is the option that {} has set already", origin, entry.key,
            out[&option].origin);
    }
    Source source{entry.values, origin};
    if (is_flag(option)) source.values = {truth(entry.values.front(), origin + ": " + entry.key)};
    if (entry.is_list && !repeatable(option)) source.values = {fmt::format("{}", fmt::join(entry.values, ","))};
    out[&option] = std::move(source);
  }
  return out;
}

}  // namespace

std::optional<std::string> variable_of(const CLI::Option& option) {
  if (option.get_lnames().empty()) return std::nullopt;  // the program
  const std::string& name = option.get_lnames().front();
  if (std::find(kCommandLineOnly.begin(), kCommandLineOnly.end(), name) != kCommandLineOnly.end()) return std::nullopt;
  std::string variable(kPrefix);
  for (const char c : name) variable += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return variable;
}

RunWords add_configuration(const CLI::App& run_command, std::vector<std::string> words) {
  RunWords out;
  const Given given = given_on(run_command, words);
  const launch::Environment environment = launch::Environment::current();
  const auto variable = [&environment](const CLI::Option& option) {
    const auto value = environment.find(*variable_of(option));
    return value && !value->empty() ? value : std::nullopt;
  };
  const CLI::Option& config = *run_command.get_option("--config");
  std::optional<std::string> path = variable(config);
  if (const auto found = given.find(&config); found != given.end() && !found->second.empty()) {
    path = found->second.back();
  }
  const auto file = path ? from_file(run_command, *path) : std::map<const CLI::Option*, Source>();

  std::vector<std::string> more;
  std::vector<std::string> variables;
  for (const CLI::Option* option : options_of(run_command)) {
    const std::string name = *variable_of(*option);
    variables.push_back(name);
    RunSetting setting{dashed(*option), {}, kDefault};
    std::vector<Source> sources;  // the weakest first
    if (const auto found = file.find(option); found != file.end()) sources.push_back(found->second);
    if (const auto value = variable(*option)) {
      if (repeatable(*option))
        sources.push_back({split(*value, ';'), name});
      else
        sources.push_back({{is_flag(*option) ? truth(*value, name) : *value}, name});
    }
    const auto found = given.find(option);
    if (found != given.end()) sources.push_back({found->second, kCommandLine});
    if (!sources.empty()) {
      // What may be repeated adds up, and the strongest comes last, which counts.
      if (!repeatable(*option)) sources.erase(sources.begin(), sources.end() - 1);
      setting.origin.clear();
      for (const Source& source : sources) {
        setting.values.insert(setting.values.end(), source.values.begin(), source.values.end());
        setting.origin += (setting.origin.empty() ? "" : ", ") + source.origin;
        if (source.origin == kCommandLine) continue;
        for (const std::string& value : source.values) more.push_back(setting.option + "=" + value);
      }
    } else if (is_flag(*option)) {
      setting.values = {"false"};
    } else if (!option->get_default_str().empty()) {
      setting.values = {option->get_default_str()};
    }
    out.settings.push_back(std::move(setting));
  }
  for (const std::string& assignment : environment.assignments()) {
    const std::string name = assignment.substr(0, assignment.find('='));
    if (!name.starts_with(kPrefix) || name == kNoOption) continue;
    if (std::find(variables.begin(), variables.end(), name) != variables.end()) continue;
    const std::string meant = closest(name, variables);
    out.remarks.push_back(fmt::format("the environment variable {} is no option's{}", name,
                                      meant.empty() ? "" : "; did you mean " + meant + "?"));
  }
  out.words = std::move(more);
  out.words.insert(out.words.end(), words.begin(), words.end());
  return out;
}

std::string show_config(const CLI::App& run_command, const RunWords& configured) {
  std::vector<std::pair<std::string, std::string>> lines;
  std::size_t width = 0;
  for (const RunSetting& setting : configured.settings) {
    const CLI::Option& option = *run_command.get_option(setting.option);
    const std::string key = setting.option.substr(2);
    std::string value;
    if (repeatable(option)) {
      for (const std::string& each : setting.values) value += (value.empty() ? "" : ", ") + launch::toml_text(each);
      value = "[" + value + "]";
    } else if (!setting.values.empty()) {
      value = is_flag(option) ? setting.values.back() : launch::toml_text(setting.values.back());
    }
    // An option without a value is shown too, and --config does not belong into a file.
    const bool comment = value.empty() || key == "config";
    lines.emplace_back((comment ? "# " : "") + key + (value.empty() ? "" : " = " + value), setting.origin);
    width = std::max(width, lines.back().first.size());
  }
  std::string text = "[run]\n";
  for (const auto& [line, origin] : lines)
    text += fmt::format("{:<{}}  # {}\n", line, std::min<std::size_t>(width, 48), origin);
  return text;
}

std::string origin_hint(const std::string& message, const std::vector<RunSetting>& settings) {
  for (const RunSetting& setting : settings) {
    if (setting.origin == kCommandLine || setting.origin == kDefault) continue;
    const auto at = message.find(setting.option);
    const std::size_t end = at == std::string::npos ? at : at + setting.option.size();
    const bool whole =
        at != std::string::npos &&
        (end == message.size() || (message[end] != '-' && !std::isalpha(static_cast<unsigned char>(message[end]))));
    const bool number = setting.option == "--np" && message.find("-np ") != std::string::npos;
    if (whole || number) return fmt::format("; {} is from {}", setting.option, setting.origin);
  }
  return {};
}

}  // namespace cohort::app
