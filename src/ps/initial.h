// What a row is before its first step. A function of seed, key and position: the same on every server, at every time,
// and after the row has gone and come back. (Normal ones go through the C library's log and cos; their last bit may
// differ from one C library to another.) Pure; any thread.
#pragma once

#include <cohort/ps_options.h>

#include <cstdint>
#include <span>

namespace cohort::ps {

void fill_initial(std::span<float> row, const Initializer& initializer, std::uint64_t seed, std::uint64_t key) noexcept;

}  // namespace cohort::ps
