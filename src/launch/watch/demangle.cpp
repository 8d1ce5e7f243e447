#include "launch/watch/demangle.h"

#include <cxxabi.h>

#include <cctype>
#include <cstddef>
#include <cstdlib>
#include <memory>

namespace cohort::launch {
namespace {

/// The text comes from another process, and the library goes down one level per character at worst.
constexpr std::size_t kLongestName = 1024;

bool belongs_to_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '.';
}

std::string readable(const std::string& name) {
  struct Free {
    void operator()(char* text) const { std::free(text); }
  };
  int status = -1;
  const std::unique_ptr<char, Free> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status));
  return status == 0 && text ? std::string(text.get()) : name;
}

}  // namespace

std::string demangled(std::string_view text) {
  std::string out;
  std::size_t at = 0;
  while (at < text.size()) {
    if (!belongs_to_name(text[at])) {
      out += text[at++];
      continue;
    }
    std::size_t end = at;
    while (end < text.size() && belongs_to_name(text[end])) ++end;
    const std::string name(text.substr(at, end - at));
    out += name.starts_with("_Z") && name.size() <= kLongestName ? readable(name) : name;
    at = end;
  }
  return out;
}

}  // namespace cohort::launch
