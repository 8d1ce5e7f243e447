// Short texts from many places: ranges of numbers, addresses, whole numbers, a line of /proc. Accepted text parses to
// the same when it is written again.
#include "base/parse.h"
#include "base/process.h"
#include "net/address.h"

#include <cstdint>
#include <cstdlib>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cohort;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto numbers = parse_ranges(text, 5000)) {
    for (std::size_t i = 0; i < numbers->size(); ++i) {
      if ((*numbers)[i] < 0 || (*numbers)[i] >= 5000 || (i > 0 && (*numbers)[i] <= (*numbers)[i - 1])) std::abort();
    }
    if (!numbers->empty() && parse_ranges(to_ranges(*numbers), 5000).value() != *numbers) std::abort();
  }
  if (const auto address = net::parse_address(text)) {
    if (address->host.empty() || net::parse_address(net::to_string(*address)) != *address) std::abort();
  }
  if (const auto number = parse_integer<std::int32_t>(text)) {
    if (parse_integer<std::int64_t>(text) != *number) std::abort();
  }
  (void)sys::parse_process_stat(text);
  return 0;
}
