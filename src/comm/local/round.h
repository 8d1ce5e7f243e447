// Rounds: every operation begins with all ranks publishing what they bring, each in a slot of its own, and reading what
// all others bring, so that all come to the same decision before any result is delivered. Small payloads go along. The
// functions run on all ranks, on the thread that runs operations.
#pragma once

#include "comm/control/agreement.h"
#include "comm/local/context.h"
#include "comm/request.h"

#include <chrono>
#include <optional>

namespace cohort::comm::local {

/// Publishes what this rank brings to the next operation. Throws what ended the world.
void announce(Context& context, const Request& request);
/// The same of a rank that has joined, and so serves the others.
void announce_joined(Context& context, std::int64_t ticket);
/// True once all ranks have announced; false if that takes longer than about `patience`, for all of which the caller
/// keeps its core.
bool await_peers(Context& context, std::chrono::microseconds patience);
/// The same until `limit`, sleeping when it takes long. Throws what ends the world meanwhile.
bool await_peers(Context& context, std::chrono::steady_clock::time_point limit);
/// What all have announced becomes the context's `agreement`. Throws what ends the world while it waits for them.
void gather(Context& context);
/// What the ranks disagree about, as this one sees it.
std::optional<Disagreement> disagreement(const Context& context);

/// Whether payloads of the request go inline: all ranks decide alike.
void choose_inline(Context& context, const Request& request) noexcept;
/// Where the request's memory lies, so that peers can reach it.
void note_memory(const Context& context, const Request& request, Descriptor& own);
/// The descriptor is in this rank's slot already. `with`: whose input goes inline, if any.
void publish_descriptor(Context& context, const Request* with);
/// Of an all_to_all_v: what `from` sends to each rank, and behind that what it expects of each.
const std::int64_t* counts_of(const Context& context, int from) noexcept;
void check_room_for_counts(const Context& context);

}  // namespace cohort::comm::local
