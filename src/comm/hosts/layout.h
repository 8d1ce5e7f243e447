// Which rank is where: hosts, the ranks on each, and stripes (ranks with one local number, one on each host). Plain
// data, made once; any thread may read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace cohort::comm::hosts {

struct Layout {
  /// `host_of[r]` is the number of rank r's host; hosts are numbered from 0 without gaps.
  Layout(std::vector<int> host_of, int own) : host_of_rank(std::move(host_of)), rank(own) {
    size = static_cast<int>(host_of_rank.size());
    for (int r = 0; r < size; ++r) {
      const auto h = static_cast<std::size_t>(host_of_rank[static_cast<std::size_t>(r)]);
      if (ranks.size() <= h) ranks.resize(h + 1);
      local_of_rank.push_back(static_cast<int>(ranks[h].size()));
      ranks[h].push_back(r);
    }
    hosts = static_cast<int>(ranks.size());
    host = host_of_rank[static_cast<std::size_t>(rank)];
    local = local_of_rank[static_cast<std::size_t>(rank)];
    locals = static_cast<int>(here().size());
    stripes = size;
    for (const std::vector<int>& there : ranks) {
      stripes = std::min(stripes, static_cast<int>(there.size()));
      contiguous = contiguous && there.back() - there.front() + 1 == static_cast<int>(there.size());
    }
  }

  const std::vector<int>& here() const noexcept { return ranks[static_cast<std::size_t>(host)]; }
  const std::vector<int>& on(int which) const noexcept { return ranks[static_cast<std::size_t>(which)]; }
  int leader(int which) const noexcept { return on(which).front(); }
  bool leads() const noexcept { return local == 0; }
  int host_of(int which) const noexcept { return host_of_rank[static_cast<std::size_t>(which)]; }
  int local_of(int which) const noexcept { return local_of_rank[static_cast<std::size_t>(which)]; }

  /// How many of the first `count` hosts have this local number.
  int hosts_with(int local_number, int count) const noexcept {
    return static_cast<int>(std::count_if(ranks.begin(), ranks.begin() + count, [&](const auto& there) {
      return static_cast<int>(there.size()) > local_number;
    }));
  }

  std::vector<int> host_of_rank;
  std::vector<int> local_of_rank;
  std::vector<std::vector<int>> ranks;  ///< by host, ascending
  int rank = 0;
  int size = 1;
  int hosts = 1;
  int host = 0;    ///< own
  int local = 0;   ///< own number on it
  int locals = 1;  ///< ranks on it
  int stripes = 1;
  bool contiguous = true;  ///< the ranks of each host are numbered one after the other
};

}  // namespace cohort::comm::hosts
