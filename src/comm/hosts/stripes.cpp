// Large sums, by stripes. Each host reduces a block, so that each stripe has its slice of the host's sum. Slices are
// exchanged in pieces, a few of them in transit; finished blocks are gathered on the host. While the ranks of a host
// reduce or gather a block together, pieces of other blocks are on the wire.
#include "comm/hosts/context.h"
#include "comm/kernels/codecs.h"

#include <algorithm>
#include <utility>

namespace cohort::comm::hosts {
namespace {

// Bytes of a block of a rank alone on its host.
constexpr std::size_t kAlone = std::size_t{1} << 20;
// Number of blocks behind the one on the wire that are reduced and begun.
constexpr std::int64_t kBlocksAhead = 2;

/// Progress of one reduction. Pieces are numbered through all blocks of a stripe, with equal numbers on all hosts.
struct StripedSum {
  Context& context;
  const Layout& layout;
  const Request& request;
  const Contributors& contributors;
  std::size_t element = 0;
  WireFormat format = WireFormat::None;
  bool coded = false;          // a wire format is used between hosts
  std::size_t unit = 0;        // bytes that are not divided: a cache line, or a group with one scale
  bool carries = false;        // this rank has a stripe
  std::int64_t per_block = 0;  // elements
  std::int64_t per_piece = 0;
  std::int64_t blocks = 0;
  std::int64_t reduced = 0;     // blocks whose sum on this host is complete
  std::int64_t next_block = 0;  // block of the next piece to begin
  std::int64_t next_first = 0;  // position of that piece in the block's slice
  std::int64_t begun = 0;       // number of pieces begun
  std::int64_t folded = 0;
  std::int64_t finished = 0;
  std::int64_t ahead = 1;  // pieces that may be in transit together
  bool by_levels = false;
  std::vector<std::int64_t> completed = {};  // by levels: number of pieces that have completed each stage
  std::vector<const void*> partials = {};

  StripedSum(Context& in, const Request& asked, const Contributors& who);
  void run();

  Block& block_at(std::int64_t block) const {
    return *context.memory.blocks[static_cast<std::size_t>(block % (kBlocksAhead + 1))];
  }
  Piece& piece_at(std::int64_t piece) const { return *context.memory.pieces[static_cast<std::size_t>(piece % ahead)]; }
  /// The part of a piece that a host folds; with two hosts, both fold all of it.
  Slice part_of_piece(const Piece& piece, int host) const noexcept {
    return layout.hosts == 2 ? Slice{0, piece.count} : slice_of(piece.count, element, host, layout.hosts, 0, unit);
  }
  /// Bytes on the wire of this many elements of a piece; also the position there of the element with this number.
  std::size_t on_wire(std::int64_t elements) const noexcept {
    const auto number = static_cast<std::size_t>(elements);
    return coded ? encoded_bytes(format, number) : number * element;
  }
  std::int64_t index_of(const Piece& piece, std::int64_t first) const noexcept {
    const Block& block = block_at(piece.block);
    return block.begin + block.slice.begin + piece.first + first;
  }
  void wait_until_returned(Block& block);
  void finish_sending(Piece& piece);
  void begin_piece();
  void begin_pieces();
  void fold_piece();
  void finish_piece();
  void begin_by_levels(Piece& piece, const Block& block);
  void advance_by_levels();
  void reduce_block(std::int64_t number);
  void exchange_block(std::int64_t number);
  void deliver_block(std::int64_t number);
};

/// Waits until the other ranks of this host have read the block's result, before its memory is reused.
void StripedSum::wait_until_returned(Block& block) {
  const std::uint64_t borrowed = std::exchange(block.borrowed, 0);
  if (borrowed > 0) context.with_neighbours([&] { local::wait_until_read(context.local, borrowed); });
}

/// Waits until the system has taken all sent frames of the piece, before its memory is reused.
void StripedSum::finish_sending(Piece& piece) {
  if (!piece.sending) return;
  for (std::size_t h = 0; h < piece.raw_out.size(); ++h) {
    if (static_cast<int>(h) == context.layout.host) continue;
    context.wait_for(piece.raw_out[h]);
  }
  piece.sending = false;
}

void StripedSum::begin_piece() {
  Piece& piece = piece_at(begun);
  finish_sending(piece);
  const Block& block = block_at(next_block);
  piece.number = begun++;
  piece.block = next_block;
  piece.first = next_first;
  piece.count = std::min(per_piece, block.slice.count() - piece.first);
  next_first += piece.count;
  if (by_levels) return begin_by_levels(piece, block);
  const std::byte* const partial = at(block.partial, piece.first, element);
  const std::byte* from = partial;
  if (coded) {
    piece.coded_bytes.resize(on_wire(piece.count));
    encode_sum(request, reinterpret_cast<const float*>(partial), piece.coded_bytes.data(), index_of(piece, 0),
               static_cast<std::size_t>(piece.count), contributors.divisor());
    from = piece.coded_bytes.data();
  }
  const auto hosts = static_cast<std::size_t>(layout.hosts);
  if (piece.raw_out.size() != hosts) {
    piece.raw_out = std::vector<transport::Outgoing>(hosts);
    piece.raw_in = std::vector<transport::Incoming>(hosts);
    piece.folded_out = std::vector<transport::Outgoing>(hosts);
    piece.folded_in = std::vector<transport::Incoming>(hosts);
  }
  piece.sending = true;
  const std::size_t own_bytes = on_wire(part_of_piece(piece, layout.host).count());
  piece.raw_bytes.resize(own_bytes * hosts);
  // Each host begins with the host after it, so that not all send to the same host.
  for (int step = 1; step < layout.hosts; ++step) {
    const int host = (layout.host + step) % layout.hosts;
    const auto h = static_cast<std::size_t>(host);
    const int peer = layout.on(host)[static_cast<std::size_t>(layout.local)];
    const Slice theirs = part_of_piece(piece, host);
    context.receive(piece.raw_in[h], peer, tag(Step::Raw, piece.number), piece.raw_bytes.data() + h * own_bytes,
                    own_bytes);
    context.send(piece.raw_out[h], peer, tag(Step::Raw, piece.number), from + on_wire(theirs.begin),
                 on_wire(theirs.count()));
  }
}

void StripedSum::begin_pieces() {
  if (!carries) return;
  while (begun - finished < ahead) {
    while (next_block < reduced && next_first >= block_at(next_block).slice.count()) {
      ++next_block;
      next_first = 0;
    }
    if (next_block >= reduced) return;
    begin_piece();
  }
}

/// Folds the hosts' inputs to a piece; with more than two hosts, sends the result to the others.
void StripedSum::fold_piece() {
  Piece& piece = piece_at(folded++);
  const Block& block = block_at(piece.block);
  const auto hosts = static_cast<std::size_t>(layout.hosts);
  const Slice own = part_of_piece(piece, layout.host);
  const auto count = static_cast<std::size_t>(own.count());
  std::byte* const result = at(block.result, piece.first, element);
  if (coded) piece.wide.resize(count * hosts);
  partials.clear();
  for (std::size_t h = 0; h < hosts; ++h) {
    const bool other = static_cast<int>(h) != layout.host;
    if (other) {
      context.wait_for(piece.raw_in[h]);
      context.wait_for(piece.raw_out[h]);  // the result may overwrite the input
    }
    const std::byte* const brought = other   ? piece.raw_bytes.data() + h * on_wire(own.count())
                                     : coded ? piece.coded_bytes.data() + on_wire(own.begin)
                                             : at(block.partial, piece.first + own.begin, element);
    if (coded) {  // decode this host's own too, so that every rank folds the same values
      decode(format, brought, piece.wide.data() + h * count, count);
      partials.push_back(piece.wide.data() + h * count);
    } else {
      partials.push_back(brought);
    }
  }
  fold_hosts(request, partials, at(result, own.begin, element), own.count(), contributors.divisor());
  if (layout.hosts == 2) return;
  const std::byte* from = at(result, own.begin, element);
  if (coded) {
    // The result to send replaces this host's own part; the other hosts' results are received over their parts.
    std::byte* const bytes = piece.coded_bytes.data() + on_wire(own.begin);
    encode_result(request, reinterpret_cast<float*>(result) + own.begin, bytes, index_of(piece, own.begin), count);
    from = bytes;
  }
  for (int step = 1; step < layout.hosts; ++step) {
    const int host = (layout.host + step) % layout.hosts;
    const auto h = static_cast<std::size_t>(host);
    const int peer = layout.on(host)[static_cast<std::size_t>(layout.local)];
    const Slice theirs = part_of_piece(piece, host);
    std::byte* const to = coded ? piece.coded_bytes.data() + on_wire(theirs.begin) : at(result, theirs.begin, element);
    context.receive(piece.folded_in[h], peer, tag(Step::Folded, piece.number), to, on_wire(theirs.count()));
    context.send(piece.folded_out[h], peer, tag(Step::Folded, piece.number), from, on_wire(own.count()));
  }
}

/// Finishes the oldest piece: waits for its whole result.
void StripedSum::finish_piece() {
  Piece& piece = piece_at(finished++);
  Block& block = block_at(piece.block);
  for (int host = 0; layout.hosts > 2 && host < layout.hosts; ++host) {
    if (host == layout.host) continue;
    context.wait_for(piece.folded_in[static_cast<std::size_t>(host)]);
    context.wait_for(piece.folded_out[static_cast<std::size_t>(host)]);  // another block's result may overwrite it
    if (!coded) continue;
    const Slice theirs = part_of_piece(piece, host);
    decode(format, piece.coded_bytes.data() + on_wire(theirs.begin),
           reinterpret_cast<float*>(block.result) + piece.first + theirs.begin,
           static_cast<std::size_t>(theirs.count()));
  }
  block.left -= piece.count;
}

void StripedSum::begin_by_levels(Piece& piece, const Block& block) {
  LevelSum::Options options;
  options.request = &request;
  options.partial = at(block.partial, piece.first, element);
  options.result = at(block.result, piece.first, element);
  options.count = piece.count;
  options.index = index_of(piece, 0);
  options.number = piece.number;
  options.divisor = contributors.divisor();
  options.unit = unit;
  options.local = layout.local;
  options.coded = coded;
  piece.by_levels.begin(context, options);
}

/// Completes a stage of a piece. Stages of several pieces are under way together; all hosts proceed in the same order.
void StripedSum::advance_by_levels() {
  const std::size_t stages = completed.size();
  for (std::size_t stage = 0; stage < stages; ++stage) {
    const std::int64_t before = stage == 0 ? begun : completed[stage - 1];
    const auto left = static_cast<std::int64_t>(stages - 1 - stage);
    if (completed[stage] == before || (completed[stage] - finished) * static_cast<std::int64_t>(stages) > ahead * left)
      continue;
    Piece& piece = piece_at(completed[stage]++);
    piece.by_levels.advance(context);
    if (left > 0) return;
    ++finished;
    block_at(piece.block).left -= piece.count;
    return;
  }
}

/// Computes this host's sum of the stripe's slice of a block.
void StripedSum::reduce_block(std::int64_t number) {
  Block& block = block_at(number);
  wait_until_returned(block);
  block.begin = number * per_block;
  block.count = std::min(per_block, request.input_count - block.begin);
  const auto share_of = [&](int local) {
    return local < layout.stripes ? slice_of(block.count, element, local, layout.stripes, 0, unit) : Slice{};
  };
  block.slice = share_of(layout.local);
  block.left = block.slice.count();
  const std::byte* input = at(request.input, block.begin, element);
  // Factors that differ by rank are applied here first. A common factor is left to the local world, if there is one.
  const bool own_factor = context.agreement.agreed.weighted != 0 || layout.locals == 1;
  const double scale = contributors.scale(static_cast<std::size_t>(layout.rank));
  if (own_factor && scale != 1) {
    block.whole_bytes.resize(static_cast<std::size_t>(block.count) * element);
    scale_by(scale, request.dtype, input, block.whole_bytes.data(), block.count);
    input = block.whole_bytes.data();
  }
  block.partial = input;
  if (layout.locals > 1) {
    block.partial_bytes.resize(static_cast<std::size_t>(block.left) * element);
    block.partial = block.partial_bytes.data();
    Counts shares;
    for (int local = 0; local < layout.locals; ++local) shares.input.push_back(share_of(local).count());
    block.shares = std::make_shared<const Counts>(std::move(shares));
    Request here = local_request(Kind::ReduceScatterV, request.dtype);
    here.op = within_host(request.op);
    here.prescale = own_factor ? 1 : context.agreement.agreed.prescale;
    here.input = input;
    here.input_count = block.count;
    here.output = block.partial_bytes.data();
    here.output_count = block.slice.count();
    here.counts = block.shares;
    context.with_neighbours([&] {
      local::reduce_scatter_part(context.local, here,
                                 own_factor ? std::nullopt : std::optional<std::int64_t>(block.begin));
    });
  }
  block.result = layout.locals == 1 ? destination(context, request, block.begin) : nullptr;
  if (block.result == nullptr) {
    block.result_bytes.resize(static_cast<std::size_t>(block.left) * element);
    block.result = block.result_bytes.data();
  }
  reduced = number + 1;
}

/// Exchanges pieces until the block is complete; pieces of the next blocks follow as far as allowed.
void StripedSum::exchange_block(std::int64_t number) {
  if (!carries) return;
  const Block& block = block_at(number);
  while (block.left > 0) {
    begin_pieces();
    // Folded pieces are returned while the next one is folded.
    if (by_levels) {
      advance_by_levels();
    } else if (folded < begun && folded - finished <= ahead / 2) {
      fold_piece();
      if (layout.hosts == 2) finish_piece();
    } else {
      finish_piece();
    }
  }
}

/// Gathers the finished slices of all stripes to all ranks of the host.
void StripedSum::deliver_block(std::int64_t number) {
  Block& block = block_at(number);
  std::byte* whole = destination(context, request, block.begin);
  if (layout.locals > 1) {
    if (whole == nullptr) {
      block.whole_bytes.resize(static_cast<std::size_t>(block.count) * element);
      whole = block.whole_bytes.data();
    }
    Request here = local_request(Kind::AllGatherV, request.dtype);
    here.input = block.result;
    here.input_count = block.slice.count();
    here.output = whole;
    here.output_count = block.count;
    here.counts = block.shares;
    context.with_neighbours([&] { block.borrowed = local::all_gather_part(context.local, here); });
  } else if (whole == nullptr) {
    whole = block.result;
  }
  place(context, request, block.begin, block.count, whole);
}

StripedSum::StripedSum(Context& in, const Request& asked, const Contributors& who)
    : context(in), layout(in.layout), request(asked), contributors(who) {
  element = size_of(request.dtype);
  format = request.wire_format;
  coded = format != WireFormat::None;
  const std::size_t scaled = block_of(format);
  unit = std::max(local::kLine, scaled * element);
  carries = layout.local < layout.stripes;
  // Sizes are the same on all hosts. If a host has several ranks, a block has one piece of each stripe, since stripes
  // that drift apart fill the two directions of a link unevenly. If elements share scales, sizes do not follow the
  // wire's speed: a rank has to encode the same elements in each step, since it keeps their residual. Blocks are then
  // longer by the factor by which the format shrinks them.
  const bool alone = layout.size == layout.hosts;
  const std::size_t fewer = scaled > 1 ? scaled * element / encoded_bytes(format, scaled) + 1 : 1;
  const int doublings = scaled > 1 ? 0 : context.tuner.doublings_of(request.input_bytes(), context.pieces_doubled);
  const std::size_t block =
      alone ? kAlone : context.tuner.block_bytes(request.input_bytes() / fewer, doublings) * fewer;
  per_block = static_cast<std::int64_t>(block / element);
  const auto stripes = static_cast<std::size_t>(layout.stripes);
  const std::size_t piece =
      alone ? context.tuner.piece_bytes(doublings) / on_wire(static_cast<std::int64_t>(scaled)) * scaled
            : (block / element + stripes - 1) / stripes + unit / element;
  per_piece = static_cast<std::int64_t>(piece * element / unit * unit / element);
  blocks = (request.input_count + per_block - 1) / per_block;
  while (context.memory.blocks.size() < static_cast<std::size_t>(kBlocksAhead + 1))
    context.memory.blocks.push_back(std::make_unique<Block>());
  while (context.memory.pieces.size() < static_cast<std::size_t>(ChunkTuner::kMostAhead))
    context.memory.pieces.push_back(std::make_unique<Piece>());
  ahead = context.tuner.ahead(doublings, context.on_the_way);
  by_levels = layout.hosts > Levels::kRadix;
  if (by_levels) {  // a piece takes as many trips as there are stages
    ahead = std::min(ahead * context.levels.count(), ChunkTuner::kMostAhead);
    completed.assign(2 * static_cast<std::size_t>(context.levels.count()), 0);
  }
}

void StripedSum::run() {
  const auto since = Context::Clock::now();
  for (std::int64_t step = -kBlocksAhead; step < blocks; ++step) {
    if (step + kBlocksAhead < blocks) reduce_block(step + kBlocksAhead);
    begin_pieces();
    if (step < 0) continue;
    exchange_block(step);
    begin_pieces();
    deliver_block(step);
  }
  if (carries) {
    const auto stripe_bytes = on_wire(request.input_count) / static_cast<std::size_t>(layout.stripes);
    const auto hosts = static_cast<std::size_t>(layout.hosts);
    context.tuner.learn(stripe_bytes / hosts * 2 * (hosts - 1), Context::Clock::now() - since);
  }
  for (const auto& piece_sent : context.memory.pieces) finish_sending(*piece_sent);
  // Other ranks of this host may still read the blocks.
  for (const auto& block_read : context.memory.blocks) wait_until_returned(*block_read);
}

}  // namespace

void reduce_striped(Context& context, const Request& request, const Contributors& contributors) {
  StripedSum(context, request, contributors).run();
}

}  // namespace cohort::comm::hosts
