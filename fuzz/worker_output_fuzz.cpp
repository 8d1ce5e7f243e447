// Output of workers, in pieces of any size: no byte is lost or made up, escape sequences stay whole, and names of
// functions in stacks are made readable.
#include "launch/health/verdict.h"
#include "launch/output/text.h"

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

namespace {

/// Text after line ends have become one kind: "\r\n" is "\n", and so is "\r\r\n", once its end is.
std::string one_kind(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (auto end = text.find('\n'); end != text.npos; end = text.find('\n')) {
    out += text.substr(0, end);
    while (!out.empty() && out.back() == '\r') out.pop_back();
    out += '\n';
    text.remove_prefix(end + 1);
  }
  out += text;
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort::launch;
  FuzzedDataProvider input(data, size);
  const auto escape = input.ConsumeRandomLengthString(64);
  if (!escape.empty() && escape.front() == '\x1b' && escape_length(escape) > escape.size()) std::abort();
  // Lines that are too long come as short ones here, so that all their ends are tried.
  const auto longest = input.ConsumeIntegralInRange<std::size_t>(4, 300);
  LineSplitter splitter(longest);
  std::string fed, seen;
  while (input.remaining_bytes() > 0) {
    const std::string piece = input.ConsumeRandomLengthString(200);
    fed += piece;
    for (const Line& line : splitter.feed(piece)) {
      if (line.text.size() > longest) std::abort();
      seen += line.text;
      if (line.end == Line::End::Newline) seen += '\n';
      if (line.end == Line::End::Return) seen += '\r';
    }
    if (splitter.partial().size() > longest || whole_text(piece) > piece.size()) std::abort();
  }
  seen += splitter.take_partial();
  // A carriage return at the very end may be half of a line end, or have been given already.
  std::string expected = one_kind(fed);
  if (!fed.empty() && fed.back() == '\r' && one_kind(seen + '\r') == expected) seen += '\r';
  if (one_kind(seen) != expected) std::abort();
  (void)demangled(fed.substr(0, 4096));
  return 0;
}
