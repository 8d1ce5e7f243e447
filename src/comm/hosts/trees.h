// Pure functions: which hosts meet in the operations that only move data between more than kMostFlat hosts. Positions
// count hosts from the root's on, so every root has the same trees. Whatever the root, a host meets only hosts at
// distances of 2^k (broadcast, all_gather) and of d * 16^k with d below 16 (gather, scatter).
#pragma once

#include "comm/hosts/levels.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace cohort::comm::hosts {

/// Up to this many hosts, a host may meet all others.
inline constexpr int kMostFlat = Levels::kRadix;

/// Neighbours of a position in a tree.
struct Neighbours {
  int parent = -1;  ///< -1 for the root
  std::vector<int> children = {};
};

/// Tree over 0 to `last` in which odd positions have no children: 0 has one child, every other position at most two.
inline Neighbours in_order_tree(int at, int last) {
  if (at == 0) return {-1, {static_cast<int>(std::bit_floor(static_cast<unsigned>(last)))}};
  const int lowest = at & -at;
  const int up = (at - lowest) | lowest << 1;
  Neighbours found{up <= last ? up : at - lowest};
  int right = lowest / 2;
  if (right > 0) found.children.push_back(at - right);
  while (at + right > last) right /= 2;
  if (right > 0) found.children.push_back(at + right);
  return found;
}

/// One of two trees (0 or 1) in which no position except the root has children in both. If each carries half of the
/// data, no host sends more than all of it. (Sanders, Speck, Traeff: Two-tree algorithms for full bandwidth broadcast.)
inline Neighbours one_of_two_trees(int tree, int at, int hosts) {
  const int last = hosts - 1;
  if (tree == 0) return in_order_tree(at, last);
  // The second tree is the mirrored first one. If `last` is odd it is shifted, since mirroring keeps odd positions odd.
  const auto to_first = [&](int position) {
    return position <= 0 ? position : last % 2 == 0 ? hosts - position : position % last + 1;
  };
  const auto from_first = [&](int position) {
    return position <= 0 ? position : last % 2 == 0 ? hosts - position : (position + last - 2) % last + 1;
  };
  Neighbours found = in_order_tree(to_first(at), last);
  found.parent = from_first(found.parent);
  for (int& child : found.children) child = from_first(child);
  return found;
}

/// Tree of depth log16(hosts), with at most 15 children of each depth. The positions below a position follow it.
inline Neighbours radix_tree(int at, int hosts) {
  Neighbours found;
  for (std::int64_t stride = 1; stride < hosts; stride *= kMostFlat) {
    const std::int64_t digit = at / stride % kMostFlat;
    if (digit > 0) {
      found.parent = static_cast<int>(at - digit * stride);
      break;
    }
    for (std::int64_t child = at + stride; child < std::min<std::int64_t>(at + kMostFlat * stride, hosts);
         child += stride)
      found.children.push_back(static_cast<int>(child));
  }
  return found;
}

/// The first position behind `at` and those below it in radix_tree.
inline int radix_end(int at, int hosts) {
  std::int64_t size = 1;
  while (at % (size * kMostFlat) == 0 && size < hosts) size *= kMostFlat;
  return static_cast<int>(std::min<std::int64_t>(at + size, hosts));
}

}  // namespace cohort::comm::hosts
