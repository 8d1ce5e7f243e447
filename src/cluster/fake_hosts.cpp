#include "cluster/fake_hosts.h"

#include "base/env.h"
#include "base/parse.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace cohort::cluster {

Result<std::vector<int>> divide_into_hosts(std::string_view text, int size) {
  std::vector<int> hosts;
  if (text.empty()) return hosts;
  const auto wrong = [&](std::string_view why) {
    return fail(ErrorCode::InvalidArgument,
                "COHORT_PRETEND_HOSTS='{}': {} -- give a number of hosts, or how many ranks "
                "each has (as 2,2)",
                text, why);
  };
  std::vector<int> numbers;
  for (std::string_view rest = text;;) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    const auto number = parse_integer<int>(entry);
    if (!number || *number < 1) return wrong("not a list of numbers from 1");
    numbers.push_back(*number);
    if (entry.size() == rest.size()) break;
    rest.remove_prefix(entry.size() + 1);
  }
  if (numbers.size() == 1) {  // the first hosts have one more if it does not come out even
    const int count = std::clamp(size, 1, numbers[0]);
    numbers.assign(static_cast<std::size_t>(count), size / count);
    for (int host = 0; host < size % count; ++host) ++numbers[static_cast<std::size_t>(host)];
  } else if (std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0}) != size) {
    return wrong(fmt::format("these are not the {} ranks of the world", size));
  }
  for (std::size_t host = 0; host < numbers.size(); ++host) {
    hosts.insert(hosts.end(), static_cast<std::size_t>(numbers[host]), static_cast<int>(host));
  }
  return hosts;
}

std::vector<int> fake_hosts(int size) { return value_or_throw(divide_into_hosts(env::text(env::kPretendHosts), size)); }

}  // namespace cohort::cluster
