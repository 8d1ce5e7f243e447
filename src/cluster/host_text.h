// What the parsers of hosts share: which characters a name may have, and errors that name the place in the text. Pure.
// Used within this folder only. Characters are counted from 1, as editors do.
#pragma once

#include "base/result.h"

#include <string_view>

namespace cohort::cluster {

/// A text, what it is called in messages, and how it ought to be written.
struct NamedText {
  std::string_view text;
  std::string_view what;
  std::string_view advice;
};

/// "WHAT 'text': WHY at character N -- ADVICE"; long texts are shown around the place.
tl::unexpected<Error> text_error(const NamedText& text, std::size_t offset, std::string_view why);

/// Letters, digits, '.', '-', '_'.
bool is_host_character(char c) noexcept;

/// What is wrong with a host name or numeric address (IPv6 without brackets); empty if nothing is.
std::string_view fault_of_host(std::string_view host);

}  // namespace cohort::cluster
