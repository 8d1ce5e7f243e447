#include "launch/config_file.h"

#include "sys/unique_fd.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <sstream>
#include <utility>

#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>

namespace cohort::launch {
namespace {

/// Nobody writes more options by hand; a device or a mistyped path must not fill the memory.
constexpr std::size_t kLongestFile = std::size_t{1} << 20;

template <class T>
std::string as_toml(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

std::optional<std::string> scalar(const toml::node& node) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return std::to_string(number->get());
  if (const auto* number = node.as_floating_point()) return as_toml(*number);
  if (const auto* truth = node.as_boolean()) return std::string(truth->get() ? "true" : "false");
  return std::nullopt;
}

int line_of(const toml::node& node) { return static_cast<int>(node.source().begin.line); }

}  // namespace

Result<std::vector<ConfigEntry>> parse_config(std::string_view text, const std::string& name) {
  const toml::parse_result parsed = toml::parse(text, name);
  if (!parsed) {
    return fail(ErrorCode::InvalidArgument, "{}:{}: {}", name, parsed.error().source().begin.line,
                parsed.error().description());
  }
  std::vector<ConfigEntry> entries;
  for (const auto& [section, node] : parsed.table()) {
    const toml::table* run = node.as_table();
    if (section.str() != "run" || run == nullptr) {
      return fail(ErrorCode::InvalidArgument, "{}:{}: '{}' is not known here; options stand in the table [run]", name,
                  line_of(node), section.str());
    }
    for (const auto& [key, value] : *run) {
      ConfigEntry entry;
      entry.key = std::string(key.str());
      entry.line = static_cast<int>(key.source().begin.line);
      const auto refuse = [&] {
        return fail(ErrorCode::InvalidArgument,
                    "{}:{}: {}: a text, a number, true, false or a list of those is wanted, not {}", name, entry.line,
                    entry.key, as_toml(value.type()));
      };
      if (const auto one = scalar(value)) {
        entry.values.push_back(*one);
      } else if (const toml::array* list = value.as_array()) {
        entry.is_list = true;
        for (const toml::node& element : *list) {
          const auto item = scalar(element);
          if (!item) return refuse();
          entry.values.push_back(*item);
        }
      } else if (const toml::table* table = value.as_table()) {
        entry.is_list = true;
        for (const auto& [item_name, item] : *table) {
          const auto content = scalar(item);
          if (!content) return refuse();
          entry.values.push_back(std::string(item_name.str()) + "=" + *content);
        }
      } else {
        return refuse();
      }
      entries.push_back(std::move(entry));
    }
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const ConfigEntry& a, const ConfigEntry& b) { return a.line < b.line; });
  return entries;
}

Result<std::vector<ConfigEntry>> read_config(const std::string& path) {
  const auto failed = [&path](const std::string& why) {
    return fail(ErrorCode::Io, "cannot read the configuration {}: {}", path, why);
  };
  // Not to be held by a pipe that nobody writes.
  const sys::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) return failed(errno_text(errno));
  std::string text;
  char buffer[16384];
  while (true) {
    const ssize_t got = ::read(fd.get(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failed(errno_text(errno));
    if (got == 0) break;
    text.append(buffer, static_cast<std::size_t>(got));
    if (text.size() > kLongestFile) return failed("it is longer than 1 MiB");
  }
  return parse_config(text, path);
}

std::string toml_text(std::string_view text) { return as_toml(toml::value<std::string>(std::string(text))); }

}  // namespace cohort::launch
