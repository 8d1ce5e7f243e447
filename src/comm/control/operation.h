// How operations are described in announcements and messages. Pure.
#pragma once

#include "comm/control/descriptor.h"
#include "comm/request.h"

#include <cstdint>
#include <span>
#include <string>

namespace cohort::comm {

/// What a rank that has joined does in the operation of the others.
Request request_to_serve(const Descriptor& agreed) noexcept;
/// What all ranks have to bring alike for this request, without where its memory lies.
Descriptor describe(const Request& request) noexcept;
/// Of everything that has to agree. Equal fingerprints of different descriptors are as likely as 2^-64.
std::uint64_t fingerprint_of(const Descriptor& descriptor) noexcept;
/// What makes operations one group: with it in each of them, ranks whose groups differ anywhere differ in the first.
std::uint64_t group_digest(std::span<const Request> requests) noexcept;
/// True if two ranks may bring these to the same operation. (A rank that has joined goes with everything.)
bool agree(const Descriptor& a, const Descriptor& b) noexcept;
/// "all_reduce(float32[10], sum)".
std::string to_string(const Descriptor& descriptor);
/// Bytes that each rank brings inline, with its descriptor, if the operation is small (the most of any rank).
std::size_t inline_bytes(const Request& request, int ranks) noexcept;

}  // namespace cohort::comm
