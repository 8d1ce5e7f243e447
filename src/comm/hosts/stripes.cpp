// Large sums, by stripes. A block is reduced on each host, so that each stripe has its slice of the host's sum; slices
// go over the wire in pieces, a few of them ahead of what has come; finished blocks are gathered on the host. While
// the ranks of a host are busy with each other, pieces of other blocks are on the wire.
#include "comm/hosts/sums.h"
#include "comm/kernels/bfloat16.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::comm::hosts {
namespace {

// A rank that has nobody to meet on its host has long blocks.
constexpr std::size_t kAlone = std::size_t{1} << 20;
// While a block is on the wire, so many behind it are reduced and have begun.
constexpr std::int64_t kBlocksAhead = 2;

/// How far one reduction has come. Pieces are numbered through all blocks of a stripe, alike on all hosts.
struct StripedSum {
  Context& context;
  const Layout& layout;
  const Request& request;
  const Contributors& contributors;
  std::size_t element = 0;
  bool narrow = false;         // bfloat16 between hosts
  std::size_t on_wire = 0;     // bytes of an element there
  bool carries = false;        // this rank has a stripe
  std::int64_t per_block = 0;  // elements
  std::int64_t per_piece = 0;
  std::int64_t blocks = 0;
  std::int64_t reduced = 0;     // blocks of which this host's sum is there
  std::int64_t next_block = 0;  // of the next piece that begins
  std::int64_t next_first = 0;  // and where it begins in that block's slice
  std::int64_t begun = 0;       // pieces
  std::int64_t folded = 0;
  std::int64_t finished = 0;
  std::int64_t ahead = 1;  // pieces that may be on the wire at once
  std::vector<const void*> partials = {};

  Block& block_at(std::int64_t block) const {
    return *context.memory.blocks[static_cast<std::size_t>(block % (kBlocksAhead + 1))];
  }
  Piece& piece_at(std::int64_t piece) const { return *context.memory.pieces[static_cast<std::size_t>(piece % ahead)]; }
};

/// Until those beside this rank have read its result of a block, its memory is not used again.
void wait_until_returned(Context& context, Block& block) {
  const std::uint64_t borrowed = std::exchange(block.borrowed, 0);
  if (borrowed > 0) context.with_neighbours([&] { local::wait_until_read(context.local, borrowed); });
}

/// Until the system has all that was sent of a piece, its memory is not used again.
void finish_sending(Context& context, Piece& piece) {
  if (!piece.sending) return;
  for (std::size_t h = 0; h < piece.raw_out.size(); ++h) {
    if (static_cast<int>(h) == context.layout.host) continue;
    context.wait_for(piece.raw_out[h]);
  }
  piece.sending = false;
}

/// Which part of a piece a host folds: with two hosts both fold all.
Slice part_of_piece(const Context& context, const Piece& piece, std::size_t element, int host) noexcept {
  const Layout& layout = context.layout;
  return layout.hosts == 2 ? Slice{0, piece.count} : slice_of(piece.count, element, host, layout.hosts, 0);
}

void begin_piece(StripedSum& way) {
  Piece& piece = way.piece_at(way.begun);
  finish_sending(way.context, piece);
  const Block& block = way.block_at(way.next_block);
  piece.number = way.begun++;
  piece.block = way.next_block;
  piece.first = way.next_first;
  piece.count = std::min(way.per_piece, block.slice.count() - piece.first);
  way.next_first += piece.count;
  const std::byte* const partial = at(block.partial, piece.first, way.element);
  const std::byte* from = partial;
  if (way.narrow) {
    piece.narrow_bytes.resize(static_cast<std::size_t>(piece.count) * way.on_wire);
    narrow_to_bfloat16(reinterpret_cast<const float*>(partial),
                       reinterpret_cast<std::uint16_t*>(piece.narrow_bytes.data()),
                       static_cast<std::size_t>(piece.count));
    from = piece.narrow_bytes.data();
  }
  const auto hosts = static_cast<std::size_t>(way.layout.hosts);
  if (piece.raw_out.size() != hosts) {
    piece.raw_out = std::vector<transport::Outgoing>(hosts);
    piece.raw_in = std::vector<transport::Incoming>(hosts);
    piece.folded_out = std::vector<transport::Outgoing>(hosts);
    piece.folded_in = std::vector<transport::Incoming>(hosts);
  }
  piece.sending = true;
  const std::size_t own_bytes =
      static_cast<std::size_t>(part_of_piece(way.context, piece, way.element, way.layout.host).count()) * way.on_wire;
  piece.raw_bytes.resize(own_bytes * hosts);
  // Each begins with the host after its own, so that not all send to the same one.
  for (int step = 1; step < way.layout.hosts; ++step) {
    const int host = (way.layout.host + step) % way.layout.hosts;
    const auto h = static_cast<std::size_t>(host);
    const int peer = way.layout.on(host)[static_cast<std::size_t>(way.layout.local)];
    const Slice theirs = part_of_piece(way.context, piece, way.element, host);
    way.context.receive(piece.raw_in[h], peer, tag(Step::Raw, piece.number), piece.raw_bytes.data() + h * own_bytes,
                        own_bytes);
    way.context.send(piece.raw_out[h], peer, tag(Step::Raw, piece.number), at(from, theirs.begin, way.on_wire),
                     static_cast<std::size_t>(theirs.count()) * way.on_wire);
  }
}

void begin_pieces(StripedSum& way) {
  if (!way.carries) return;
  while (way.begun - way.finished < way.ahead) {
    while (way.next_block < way.reduced && way.next_first >= way.block_at(way.next_block).slice.count()) {
      ++way.next_block;
      way.next_first = 0;
    }
    if (way.next_block >= way.reduced) return;
    begin_piece(way);
  }
}

/// Folds what came of the hosts; with more than two, to the others with it.
void fold_piece(StripedSum& way) {
  Piece& piece = way.piece_at(way.folded++);
  const Block& block = way.block_at(piece.block);
  const auto hosts = static_cast<std::size_t>(way.layout.hosts);
  const Slice own = part_of_piece(way.context, piece, way.element, way.layout.host);
  const auto count = static_cast<std::size_t>(own.count());
  std::byte* const result = at(block.result, piece.first, way.element);
  if (way.narrow) piece.wide.resize(count * hosts);
  way.partials.clear();
  for (std::size_t h = 0; h < hosts; ++h) {
    const bool other = static_cast<int>(h) != way.layout.host;
    if (other) {
      way.context.wait_for(piece.raw_in[h]);
      way.context.wait_for(piece.raw_out[h]);  // the result may go where the input lies
    }
    const std::byte* const brought = other        ? piece.raw_bytes.data() + h * count * way.on_wire
                                     : way.narrow ? at(piece.narrow_bytes.data(), own.begin, way.on_wire)
                                                  : at(block.partial, piece.first + own.begin, way.element);
    if (way.narrow) {  // this host's own, too: whoever folds an element has the same values
      widen_from_bfloat16(reinterpret_cast<const std::uint16_t*>(brought), piece.wide.data() + h * count, count);
      way.partials.push_back(piece.wide.data() + h * count);
    } else {
      way.partials.push_back(brought);
    }
  }
  fold_hosts(way.request, way.partials, at(result, own.begin, way.element), own.count(), way.contributors.divisor());
  if (way.layout.hosts == 2) return;
  const std::byte* from = at(result, own.begin, way.element);
  if (way.narrow) {
    // What is sent has room where the piece's own part was; theirs comes in where theirs was.
    auto* const narrow = reinterpret_cast<std::uint16_t*>(piece.narrow_bytes.data());
    auto* const values = reinterpret_cast<float*>(result);
    narrow_to_bfloat16(values + own.begin, narrow + own.begin, count);
    widen_from_bfloat16(narrow + own.begin, values + own.begin, count);
    from = at(piece.narrow_bytes.data(), own.begin, way.on_wire);
  }
  for (int step = 1; step < way.layout.hosts; ++step) {
    const int host = (way.layout.host + step) % way.layout.hosts;
    const auto h = static_cast<std::size_t>(host);
    const int peer = way.layout.on(host)[static_cast<std::size_t>(way.layout.local)];
    const Slice theirs = part_of_piece(way.context, piece, way.element, host);
    std::byte* const to =
        way.narrow ? at(piece.narrow_bytes.data(), theirs.begin, way.on_wire) : at(result, theirs.begin, way.element);
    way.context.receive(piece.folded_in[h], peer, tag(Step::Folded, piece.number), to,
                        static_cast<std::size_t>(theirs.count()) * way.on_wire);
    way.context.send(piece.folded_out[h], peer, tag(Step::Folded, piece.number), from, count * way.on_wire);
  }
}

/// The oldest piece: all of its result is there.
void finish_piece(StripedSum& way) {
  Piece& piece = way.piece_at(way.finished++);
  Block& block = way.block_at(piece.block);
  for (int host = 0; way.layout.hosts > 2 && host < way.layout.hosts; ++host) {
    if (host == way.layout.host) continue;
    way.context.wait_for(piece.folded_in[static_cast<std::size_t>(host)]);
    way.context.wait_for(
        piece.folded_out[static_cast<std::size_t>(host)]);  // another block's result may go where it lies
    if (!way.narrow) continue;
    const Slice theirs = part_of_piece(way.context, piece, way.element, host);
    widen_from_bfloat16(reinterpret_cast<const std::uint16_t*>(piece.narrow_bytes.data()) + theirs.begin,
                        reinterpret_cast<float*>(block.result) + piece.first + theirs.begin,
                        static_cast<std::size_t>(theirs.count()));
  }
  block.left -= piece.count;
}

/// This host's sum of the stripe's slice.
void reduce_block(StripedSum& way, std::int64_t number) {
  Block& block = way.block_at(number);
  wait_until_returned(way.context, block);
  const Request& request = way.request;
  block.begin = number * way.per_block;
  block.count = std::min(way.per_block, request.input_count - block.begin);
  const auto share_of = [&](int local) {
    return local < way.layout.stripes ? slice_of(block.count, way.element, local, way.layout.stripes, 0) : Slice{};
  };
  block.slice = share_of(way.layout.local);
  block.left = block.slice.count();
  const std::byte* input = at(request.input, block.begin, way.element);
  // Factors that differ by rank come first; one for all is the local world's, but where there is none.
  const bool own_factor = way.context.agreement.agreed.weighted != 0 || way.layout.locals == 1;
  const double scale = way.contributors.scale(static_cast<std::size_t>(way.layout.rank));
  if (own_factor && scale != 1) {
    block.whole_bytes.resize(static_cast<std::size_t>(block.count) * way.element);
    scale_by(scale, request.dtype, input, block.whole_bytes.data(), block.count);
    input = block.whole_bytes.data();
  }
  block.partial = input;
  if (way.layout.locals > 1) {
    block.partial_bytes.resize(static_cast<std::size_t>(block.left) * way.element);
    block.partial = block.partial_bytes.data();
    Counts shares;
    for (int local = 0; local < way.layout.locals; ++local) shares.input.push_back(share_of(local).count());
    block.shares = std::make_shared<const Counts>(std::move(shares));
    Request here = local_request(Kind::ReduceScatterV, request.dtype);
    here.op = within_host(request.op);
    here.prescale = own_factor ? 1 : way.context.agreement.agreed.prescale;
    here.input = input;
    here.input_count = block.count;
    here.output = block.partial_bytes.data();
    here.output_count = block.slice.count();
    here.counts = block.shares;
    way.context.with_neighbours([&] {
      local::reduce_scatter_part(way.context.local, here,
                                 own_factor ? std::nullopt : std::optional<std::int64_t>(block.begin));
    });
  }
  block.result = way.layout.locals == 1 ? destination(way.context, request, block.begin) : nullptr;
  if (block.result == nullptr) {
    block.result_bytes.resize(static_cast<std::size_t>(block.left) * way.element);
    block.result = block.result_bytes.data();
  }
  way.reduced = number + 1;
}

/// Goes on until the block has been through the wire; pieces of the next one follow as far as they may.
void exchange_block(StripedSum& way, std::int64_t number) {
  if (!way.carries) return;
  const Block& block = way.block_at(number);
  while (block.left > 0) {
    begin_pieces(way);
    // What has been folded is on its way back while the next is folded.
    if (way.folded < way.begun && way.folded - way.finished <= way.ahead / 2) {
      fold_piece(way);
      if (way.layout.hosts == 2) finish_piece(way);
    } else {
      finish_piece(way);
    }
  }
}

/// The finished slices of all stripes to all ranks of the host.
void deliver_block(StripedSum& way, std::int64_t number) {
  Block& block = way.block_at(number);
  const Request& request = way.request;
  std::byte* whole = destination(way.context, request, block.begin);
  if (way.layout.locals > 1) {
    if (whole == nullptr) {
      block.whole_bytes.resize(static_cast<std::size_t>(block.count) * way.element);
      whole = block.whole_bytes.data();
    }
    Request here = local_request(Kind::AllGatherV, request.dtype);
    here.input = block.result;
    here.input_count = block.slice.count();
    here.output = whole;
    here.output_count = block.count;
    here.counts = block.shares;
    way.context.with_neighbours([&] { block.borrowed = local::all_gather_part(way.context.local, here); });
  } else if (whole == nullptr) {
    whole = block.result;
  }
  place(way.context, request, block.begin, block.count, whole);
}

}  // namespace

void reduce_striped(Context& context, const Request& request, const Contributors& contributors) {
  const Layout& layout = context.layout;
  StripedSum way{.context = context, .layout = layout, .request = request, .contributors = contributors};
  way.element = size_of(request.dtype);
  way.narrow = request.bf16_wire;
  way.on_wire = way.narrow ? sizeof(std::uint16_t) : way.element;
  way.carries = layout.local < layout.stripes;
  // Sizes are the same on all hosts. Where ranks of a host have to meet, a block has one piece of each stripe: stripes
  // that run apart from each other fill the two directions of a link unevenly.
  const bool alone = layout.size == layout.hosts;
  const std::size_t block = alone ? kAlone : context.tuner.block_bytes(request.input_bytes(), context.pieces_doubled);
  way.per_block = static_cast<std::int64_t>(block / way.element);
  const auto stripes = static_cast<std::size_t>(layout.stripes);
  const std::size_t piece = alone ? context.tuner.piece_bytes(context.pieces_doubled) / way.on_wire
                                  : (block / way.element + stripes - 1) / stripes;
  way.per_piece =
      static_cast<std::int64_t>(piece) + (alone ? 0 : static_cast<std::int64_t>(local::kLine / way.element));
  way.blocks = (request.input_count + way.per_block - 1) / way.per_block;
  while (context.memory.blocks.size() < static_cast<std::size_t>(kBlocksAhead + 1))
    context.memory.blocks.push_back(std::make_unique<Block>());
  while (context.memory.pieces.size() < static_cast<std::size_t>(ChunkTuner::kMostAhead))
    context.memory.pieces.push_back(std::make_unique<Piece>());
  way.ahead = context.tuner.ahead(context.pieces_doubled);
  const auto begun = Context::Clock::now();
  for (std::int64_t step = -kBlocksAhead; step < way.blocks; ++step) {
    if (step + kBlocksAhead < way.blocks) reduce_block(way, step + kBlocksAhead);
    begin_pieces(way);
    if (step < 0) continue;
    exchange_block(way, step);
    begin_pieces(way);
    deliver_block(way, step);
  }
  if (way.carries) {
    const auto stripe_bytes = static_cast<std::size_t>(request.input_count) * way.on_wire / stripes;
    const auto hosts = static_cast<std::size_t>(layout.hosts);
    context.tuner.learn(stripe_bytes / hosts * 2 * (hosts - 1), Context::Clock::now() - begun);
  }
  for (const auto& piece_sent : context.memory.pieces) finish_sending(context, *piece_sent);
  // Blocks are read by those beside this rank, who may be late, and it may go.
  for (const auto& block_read : context.memory.blocks) wait_until_returned(context, *block_read);
}

}  // namespace cohort::comm::hosts
