#include "comm/hosts/level_sums.h"

#include "comm/hosts/context.h"
#include "comm/kernels/codecs.h"

#include <algorithm>

namespace cohort::comm::hosts {

/// Two frames in transit between two ranks at once never have the same tag. One rank has begun at most kMostRanges more
/// ranges than another has completed, and the other at most kMostRanges more than it has completed.
std::uint32_t LevelSum::tag_of(std::int64_t number, int stage, int level, int slot, int source) noexcept {
  const std::int64_t place = static_cast<std::int64_t>(slot) * Levels::kRadix + source % Levels::kRadix;
  const std::int64_t range = number % (2 * kMostRanges);  // lowest, so that the connections of a pair take turns
  return tag(stage == level ? Step::Up : Step::Down, place << 8 | static_cast<std::int64_t>(level) << 6 | range);
}

/// The elements of a slot of a level: each level below takes a part of what the previous one has left.
Slice LevelSum::range(const Context& context, int level, int slot) const noexcept {
  const Levels& levels = context.levels;
  Slice all{0, options_.count};
  for (int below = 0; below < level; ++below) {
    const Slice part =
        slice_of(all.count(), element_, levels.digit(below, slot), levels.radix(below), 0, options_.unit);
    all = {all.begin + part.begin, all.begin + part.end};
  }
  return all;
}

std::size_t LevelSum::on_wire(std::int64_t elements, bool coded) const noexcept {
  const auto number = static_cast<std::size_t>(elements);
  return coded ? encoded_bytes(options_.request->wire_format, number) : number * element_;
}

/// True if a host of the member brings a sum.
bool LevelSum::has(const Context& context, int level, int member) const noexcept {
  if (options_.brings == nullptr) return true;
  const auto stride = static_cast<std::size_t>(context.levels.stride(level));
  const auto first = static_cast<std::size_t>(member) * stride;
  const auto begin = options_.brings->begin();
  const auto last = std::min(first + stride, options_.brings->size());
  return std::find(begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(last), true) !=
         begin + static_cast<std::ptrdiff_t>(last);
}

void LevelSum::send(Context& context, int host, int level, int slot, int source, const std::byte* data,
                    std::size_t bytes) {
  if (bytes == 0) return;
  const int peer = context.layout.on(host)[static_cast<std::size_t>(options_.local)];
  context.send(out_[sent_++], peer, tag_of(options_.number, stage_, level, slot, source), data, bytes);
}

void LevelSum::receive(Context& context, int host, int level, int slot, int source, std::byte* to, std::size_t bytes) {
  if (bytes == 0) return;
  const int peer = context.layout.on(host)[static_cast<std::size_t>(options_.local)];
  context.receive(in_[received_++], peer, tag_of(options_.number, stage_, level, slot, source), to, bytes);
}

void LevelSum::begin(Context& context, const Options& options) {
  options_ = options;
  element_ = size_of(options.request->dtype);
  stage_ = 0;
  sums_.assign(1, options.partial);
  if (options.coded) {
    coded_.resize(on_wire(options.count, true));
    encode_sum(*options.request, reinterpret_cast<const float*>(options.partial), coded_.data(), options.index,
               static_cast<std::size_t>(options.count), options.divisor);
  }
  const Levels& levels = context.levels;
  std::size_t most = 0;
  for (int level = 0; level <= levels.count(); ++level)
    most = std::max(most, levels.held(level).size() * static_cast<std::size_t>(Levels::kRadix));
  if (out_.size() < most) {
    out_ = std::vector<transport::Outgoing>(most);
    in_ = std::vector<transport::Incoming>(most);
  }
  begin_up(context, 0);
}

void LevelSum::advance(Context& context) {
  for (std::size_t i = 0; i < received_; ++i) context.wait_for(in_[i]);
  for (std::size_t i = 0; i < sent_; ++i) context.wait_for(out_[i]);
  const int levels = context.levels.count();
  if (stage_ < levels) fold_up(context, stage_);
  ++stage_;
  if (stage_ < levels) return begin_up(context, stage_);
  if (stage_ < 2 * levels) return begin_down(context, 2 * levels - 1 - stage_);
  if (options_.coded) {
    decode(options_.request->wire_format, coded_.data(), reinterpret_cast<float*>(options_.result),
           static_cast<std::size_t>(options_.count));
  }
}

/// Sends each slot's parts to the slots of the next level. Each host begins with the host after it, so that not all
/// send to the same host.
void LevelSum::begin_up(Context& context, int level) {
  const Levels& levels = context.levels;
  const int self = context.layout.host;
  const bool coded = options_.coded && level == 0;
  sent_ = received_ = 0;
  std::size_t room = 0;
  for (const int next : levels.held(level + 1)) {
    const auto [first, last] = levels.sources(level, next);
    room += on_wire(range(context, level + 1, next).count(), coded) * static_cast<std::size_t>(last - first);
  }
  raw_.resize(room);
  std::byte* to = raw_.data();
  for (const int next : levels.held(level + 1)) {
    const auto [first, last] = levels.sources(level, next);
    const std::size_t bytes = on_wire(range(context, level + 1, next).count(), coded);
    for (int source = first; source < last; ++source, to += bytes) {
      const int from = levels.holder(level, levels.source_slot(level, next, source));
      if (from != self && has(context, level, source)) receive(context, from, level, next, source, to, bytes);
    }
  }
  const std::vector<int>& held = levels.held(level);
  for (std::size_t i = 0; i < held.size(); ++i) {
    const int member = levels.member(level, held[i]);
    if (!has(context, level, member)) continue;
    const Slice all = range(context, level, held[i]);
    for (int step = 1; step < levels.radix(level); ++step) {
      const int next = levels.next(level, held[i], (member + step) % levels.radix(level));
      const int peer = levels.holder(level + 1, next);
      if (peer == self) continue;
      const Slice part = range(context, level + 1, next);
      const std::byte* const data =
          coded ? coded_.data() + on_wire(part.begin, true) : at(sums_[i], part.begin - all.begin, element_);
      send(context, peer, level, next, member, data, on_wire(part.count(), coded));
    }
  }
}

/// Folds what has come for the slots of the next level.
void LevelSum::fold_up(Context& context, int level) {
  const Levels& levels = context.levels;
  const bool last = level + 1 == levels.count();
  const bool coded = options_.coded && level == 0;
  std::vector<std::byte>& memory = memory_[level % 2];
  std::size_t room = 0;
  for (const int next : levels.held(level + 1))
    room += static_cast<std::size_t>(range(context, level + 1, next).count()) * element_;
  if (!last) memory.resize(room);
  std::vector<const std::byte*> folded;
  const std::byte* raw = raw_.data();
  std::byte* to = memory.data();
  for (const int next : levels.held(level + 1)) {
    const Slice part = range(context, level + 1, next);
    const auto [first, end] = levels.sources(level, next);
    if (last) to = at(options_.result, part.begin, element_);
    if (part.count() > 0) fold_slot(context, level, next, raw, to);
    folded.push_back(to);
    to += static_cast<std::size_t>(part.count()) * element_;
    raw += on_wire(part.count(), coded) * static_cast<std::size_t>(end - first);
  }
  sums_ = std::move(folded);
}

void LevelSum::fold_slot(Context& context, int level, int slot, const std::byte* raw, std::byte* to) {
  const Levels& levels = context.levels;
  const bool last = level + 1 == levels.count();
  const bool coded = options_.coded && level == 0;
  const Slice part = range(context, level + 1, slot);
  const auto count = static_cast<std::size_t>(part.count());
  const auto [first, end] = levels.sources(level, slot);
  if (coded) wide_.resize(count * static_cast<std::size_t>(end - first));
  inputs_.clear();
  for (int source = first; source < end; ++source, raw += on_wire(part.count(), coded)) {
    if (!has(context, level, source)) continue;
    const int from = levels.source_slot(level, slot, source);
    const std::byte* input = raw;
    if (levels.holder(level, from) == context.layout.host) {
      const std::vector<int>& held = levels.held(level);
      const auto i = static_cast<std::size_t>(std::lower_bound(held.begin(), held.end(), from) - held.begin());
      input = coded ? coded_.data() + on_wire(part.begin, true)
                    : at(sums_[i], part.begin - range(context, level, from).begin, element_);
    }
    if (coded) {  // decode this host's own too, so that every rank folds the same values
      float* const values = wide_.data() + static_cast<std::size_t>(source - first) * count;
      decode(options_.request->wire_format, input, values, count);
      input = reinterpret_cast<const std::byte*>(values);
    }
    inputs_.push_back(input);
  }
  if (inputs_.empty() && !last) return;
  fold_hosts(*options_.request, inputs_, to, part.count(), last ? options_.divisor : 0, FoldOrder::Tree);
  if (!last || !options_.coded) return;
  encode_result(*options_.request, reinterpret_cast<float*>(to), coded_.data() + on_wire(part.begin, true),
                options_.index + part.begin, count);
}

/// Sends each slot's result to the members whose data it contains.
void LevelSum::begin_down(Context& context, int level) {
  const Levels& levels = context.levels;
  const int self = context.layout.host;
  sent_ = received_ = 0;
  const auto place = [&](const Slice& part) {
    return options_.coded ? coded_.data() + on_wire(part.begin, true) : at(options_.result, part.begin, element_);
  };
  for (const int slot : levels.held(level)) {
    if (!levels.first_of_part(level, slot)) continue;
    for (int digit = 0; digit < levels.radix(level); ++digit) {
      const int next = levels.next(level, slot, digit);
      const int from = levels.holder(level + 1, next);
      if (from == self) continue;
      const Slice part = range(context, level + 1, next);
      receive(context, from, level, next, levels.member(level, slot), place(part),
              on_wire(part.count(), options_.coded));
    }
  }
  for (const int next : levels.held(level + 1)) {
    const Slice part = range(context, level + 1, next);
    const auto [first, last] = levels.sources(level, next);
    const int size = last - first;
    for (int step = 1; step <= size; ++step) {
      const int source = first + (levels.digit(level, next) + step) % size;
      const int slot = levels.source_slot(level, next, source);
      const int peer = levels.holder(level, slot);
      if (peer == self || !levels.first_of_part(level, slot)) continue;
      send(context, peer, level, next, source, place(part), on_wire(part.count(), options_.coded));
    }
  }
}

}  // namespace cohort::comm::hosts
