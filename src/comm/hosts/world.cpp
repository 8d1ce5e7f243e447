#include "comm/hosts/world.h"

#include "base/env.h"
#include "base/log.h"
#include "base/parse.h"
#include "base/records.h"
#include "base/result.h"
#include "comm/engine/agreement.h"
#include "comm/engine/pending_work.h"
#include "comm/transport/mpi/endpoint.h"
#include "comm/transport/mpi/mpi_transport.h"
#include "net/secret.h"

#include <algorithm>
#include <map>
#include <thread>
#include <utility>

namespace cohort::comm::hosts {
namespace {

std::shared_ptr<mpi::Endpoint> endpoint_for(const FormOptions& options) {
  return value_or_throw(mpi::Runtime::of_process().endpoint(net::deadline_in(options.init_timeout), options.timeout));
}

/// Returns each rank's MPI process number.
std::vector<int> processes_of(const std::vector<transport::tcp::PeerInfo>& infos, const mpi::Endpoint& endpoint) {
  std::vector<int> processes;
  std::map<int, int> rank_of;
  for (std::size_t rank = 0; rank < infos.size(); ++rank) {
    const transport::tcp::PeerInfo& info = infos[rank];
    if (info.mpi_job != infos.front().mpi_job || info.mpi_process < 0 || info.mpi_process >= endpoint.size()) {
      raise(ErrorCode::Mismatch,
            "MPI as transport: rank {} ({}) and rank 0 ({}) are not processes of one start of mpirun or srun, so MPI "
            "does not connect them -- start all ranks by one mpirun, of the MPI that the plug-in is made for ({})",
            rank, info.host, infos.front().host, endpoint.library());
    }
    const auto [entry, is_new] = rank_of.emplace(info.mpi_process, static_cast<int>(rank));
    if (!is_new) {
      raise(ErrorCode::Mismatch,
            "MPI as transport: ranks {} and {} are in one process, and MPI connects processes -- give each rank a "
            "process, or use the transport tcp",
            entry->second, rank);
    }
    processes.push_back(info.mpi_process);
  }
  return processes;
}

}  // namespace

void complete_info(transport::tcp::PeerInfo& info, const FormOptions& options) {
  if (options.transport != rendezvous::TransportKind::Mpi) return;
  const std::shared_ptr<mpi::Endpoint> endpoint = endpoint_for(options);
  info.mpi_process = endpoint->rank();
  info.mpi_job = endpoint->job();
}

std::unique_ptr<transport::Transport> make_transport(const FormOptions& options,
                                                     transport::tcp::TcpTransport::Options tcp,
                                                     transport::tcp::Listeners listeners,
                                                     transport::TransportEvents& events) {
  if (options.transport != rendezvous::TransportKind::Mpi) {
    if (tcp.rank == 0) log::info("plan", "{} ranks, between hosts over TCP", tcp.infos.size());
    return std::make_unique<transport::tcp::TcpTransport>(std::move(tcp), std::move(listeners), events);
  }
  if (tcp.infos.front().protection == transport::tcp::Protection::Encrypted) {
    raise(
        ErrorCode::InvalidArgument,
        "COHORT_ENCRYPT=1 with MPI as transport -- what goes through MPI cannot be encrypted here -- use the transport "
        "tcp, or a network that nobody else is on");
  }
  mpi::MpiTransport::Options own;
  own.endpoint = endpoint_for(options);
  own.processes = processes_of(tcp.infos, *own.endpoint);
  own.world = transport::tcp::world_number(*tcp.secret);
  if (tcp.rank == 0)
    log::info("plan", "{} ranks, between hosts over MPI ({})", tcp.infos.size(), own.endpoint->library());
  return std::make_unique<mpi::MpiTransport>(std::move(own), std::move(tcp), std::move(listeners), events);
}

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kLongestCause = 4096;
// Leaders wait longer for each other by this time, so that a leader that knows which rank is missing reports it first.
constexpr auto kGrace = 1s;
constexpr std::uint32_t kWaits = 1;  // tag of messages in which a rank reports that it waits; those of send have 0

/// Returns an ID that is the same on all ranks, is not 0, and does not reveal the token.
std::uint64_t status_id(std::string_view token) {
  return std::stoull(net::sha256_hex(fmt::format("status {}", token)).substr(0, 16), nullptr, 16) | 1;
}

transport::tcp::Protection wanted_protection() {
  const bool encrypt = value_or_throw(env::flag(env::kEncrypt));
  const bool integrity = value_or_throw(env::flag(env::kIntegrity));
  if (encrypt && !integrity) {
    raise(
        ErrorCode::InvalidArgument,
        "COHORT_ENCRYPT=1 and COHORT_INTEGRITY=0 -- what is encrypted is authenticated, too -- leave one of them out");
  }
  return encrypt     ? transport::tcp::Protection::Encrypted
         : integrity ? transport::tcp::Protection::Authenticated
                     : transport::tcp::Protection::Least;
}

std::string_view described(transport::tcp::Protection protection) {
  switch (protection) {
    case transport::tcp::Protection::Least: return "not authenticated";
    case transport::tcp::Protection::Authenticated: return "authenticated";
    case transport::tcp::Protection::Encrypted: break;
  }
  return "encrypted";
}

std::string encode_ending(const local::AbortRecord& abort) {
  codec::Writer out;
  out.number(static_cast<std::uint8_t>(abort.code)).number(abort.reporter).number(abort.peer).number(abort.sequence);
  return out.text(abort.text).take();
}

}  // namespace

// --- HostsOperationLabel ---

void HostsOperationLabel::begin(std::uint64_t number, const Descriptor& what) {
  const std::lock_guard lock(mutex_);
  what_ = what;
  number_.store(number, std::memory_order_relaxed);
}

std::string HostsOperationLabel::doing() const {
  const std::lock_guard lock(mutex_);
  return number() == 0 ? "forming the world" : to_string(what_);
}

// --- forming ---

World::World(const FormOptions& options, std::unique_ptr<Place> place)
    : options_(options),
      layout_(options.hosts, options.placement.rank),
      levels_(layout_.hosts, layout_.host),
      label_(std::make_shared<HostsOperationLabel>(layout_.here())),
      waits_(static_cast<std::size_t>(layout_.size)) {
  if (place) {
    form_from(*place);
    return;
  }
  try {
    form_from_store();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::Aborted) local::raise_if_recorded(options_);  // a leader's reason
    local::record_failure(options_, error);
    throw;
  }
  options_.store.reset();  // no longer needed
}

World::~World() {
  if (transport_) transport_->leave();
  status::StatusPage::own().close(*status_);
}

void World::make_local(std::unique_ptr<local::Rendezvous> point, std::vector<std::string> entries) {
  FormOptions own;
  own.store = options_.store;
  own.entries = std::move(entries);
  own.placement = options_.placement;
  own.placement.rank = own.placement.local_rank = layout_.local;
  own.placement.size = own.placement.local_size = layout_.locals;
  own.init_timeout = options_.init_timeout;
  own.timeout = options_.timeout;
  own.label = label_;
  own.lost = options_.lost;
  local_ = std::make_unique<local::LocalCommunicator>(own, std::move(point));
}

void World::make_transport(transport::tcp::Listeners listeners, std::string_view token) {
  if (layout_.hosts > Levels::kMostHosts) {
    raise(ErrorCode::InvalidArgument, "cannot form the world -- {} hosts -- at most {} are supported", layout_.hosts,
          Levels::kMostHosts);
  }
  transport::tcp::TcpTransport::Options options;
  options.rank = layout_.rank;
  options.infos = infos_;
  for (int rank = 1; rank < layout_.size; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    if (infos_[r].protection == infos_[0].protection) continue;
    raise(ErrorCode::Mismatch,
          "cannot form the world -- what rank {} ({}) sends to other hosts is {}, and what rank 0 ({}) sends is {} -- "
          "give all ranks the same COHORT_ENCRYPT and COHORT_INTEGRITY",
          rank, host_name(rank), described(infos_[r].protection), host_name(0), described(infos_[0].protection));
  }
  options.secret = transport::tcp::world_secret(
      options_.secret ? std::span<const std::uint8_t>(options_.secret->bytes()) : std::span<const std::uint8_t>(),
      token, infos_[0].protection);
  options.silence = std::chrono::ceil<std::chrono::seconds>(value_or_throw(env::seconds(env::kHostTimeout)));
  transport_ = hosts::make_transport(options_, std::move(options), std::move(listeners), *this);
  status_ = &local::open_status(status_id(token), layout_.rank, layout_.size, options_.background);
}

transport::tcp::Listeners::Options World::listening() const {
  transport::tcp::Listeners::Options options;
  options.host = options_.placement.host;
  options.loopback_only = options_.one_machine;
  options.protection = wanted_protection();
  options.lanes = value_or_throw(env::number(env::kConnections));
  return options;
}

void World::form_from(Place& place) {
  infos_ = std::move(place.infos);
  make_local(std::move(place.point), std::move(place.entries));
  options_.lost = nullptr;  // the larger world may end before this one
  make_transport(std::move(*place.listeners), place.token);
}

// Ranks of a host exchange how they are reached, then leaders exchange the answers of their hosts.
void World::form_from_store() {
  const Clock::time_point deadline = Clock::now() + options_.init_timeout;
  transport::tcp::Listeners listeners(listening());
  transport::tcp::PeerInfo info = listeners.info();
  complete_info(info, options_);
  std::unique_ptr<local::Rendezvous> point;
  if (layout_.locals > 1) point = std::make_unique<local::Rendezvous>(layout_.locals);
  const local::Exchange here{fmt::format("host/{}", layout_.host), layout_.here(), layout_.local, deadline};
  std::vector<std::string> entries;
  std::vector<std::string> known = {""};  // the world's token, then the ranks of this host
  const std::string mine = local::encode_values({point ? point->entry() : "", transport::tcp::encode(info)});
  for (const std::string& value : local::exchange(options_, here, mine)) {
    auto texts = value_or_throw(local::decode_values(value));
    if (texts.size() != 2)
      raise(ErrorCode::Corrupt, "cannot form the world -- a rank of this host says {} things", texts.size());
    entries.push_back(std::move(texts[0]));
    known.push_back(std::move(texts[1]));
  }
  make_local(std::move(point), std::move(entries));

  std::string all;
  if (layout_.leads()) {
    if (layout_.rank == 0) {
      const transport::tcp::Bytes32 token = transport::tcp::random_bytes();
      known[0].assign(token.begin(), token.end());
    }
    local::Exchange leaders{"hosts", {}, layout_.host, deadline + (layout_.size > layout_.hosts ? kGrace : 0s)};
    for (int host = 0; host < layout_.hosts; ++host) leaders.ranks.push_back(layout_.leader(host));
    try {
      all = local::encode_values(local::exchange(options_, leaders, local::encode_values(known)));
    } catch (const Error& error) {
      local_->abort(error.what());  // ends the wait of this host's other ranks
      throw;
    }
  }
  if (layout_.locals > 1) all = tell_locals(std::move(all));
  std::string token;
  infos_.resize(static_cast<std::size_t>(layout_.size));
  const auto hosts = value_or_throw(local::decode_values(all));
  for (int host = 0; host < layout_.hosts; ++host) {
    const auto texts = value_or_throw(local::decode_values(hosts.at(static_cast<std::size_t>(host))));
    const std::vector<int>& ranks = layout_.on(host);
    if (texts.size() != ranks.size() + 1) {
      raise(ErrorCode::Corrupt, "cannot form the world -- rank {} describes {} ranks of its host, which has {}",
            ranks.front(), texts.size() - 1, ranks.size());
    }
    if (host == 0) token = texts[0];
    for (std::size_t i = 0; i < ranks.size(); ++i)
      infos_[static_cast<std::size_t>(ranks[i])] = value_or_throw(transport::tcp::decode_peer_info(texts[i + 1]));
  }
  make_transport(std::move(listeners), token);
}

/// Returns the text of this host's leader.
std::string World::tell_locals(std::string text) {
  std::uint64_t length = text.size();
  Request send;
  send.kind = Kind::Broadcast;
  send.dtype = DType::UInt8;
  send.timeout = options_.init_timeout + 3 * kGrace;  // the leader knows which rank is missing, so it gives up first
  send.input = send.output = &length;
  send.input_count = send.output_count = sizeof length;
  run_local(*this, send);
  text.resize(length);
  send.input = send.output = text.data();
  send.input_count = send.output_count = static_cast<std::int64_t>(length);
  run_local(*this, send);
  return text;
}

void run_local(World& world, const Request& request) { world.local().start(request).wait(); }

// --- the end of the world ---

void World::end(ErrorCode code, int peer, std::uint64_t sequence, std::string_view text) {
  local_world().record(code, peer, sequence, text);
  tell_if_ended();
}

void World::tell_if_ended() {
  if (!ended() || told_.load()) return;
  const local::AbortRecord& abort = local_world().header().abort;
  for (int i = 0; i < 100 && abort.state.load() != local::AbortRecord::kSet; ++i) std::this_thread::sleep_for(1ms);
  if (!transport_) return;
  // Hosts without a connection to this one get the report too. With many hosts, each passes it on to the hosts with
  // which it exchanges data, so that it reaches all.
  if (layout_.leads() || abort.reporter == layout_.rank) {
    for (const int host : levels_.peers(layout_.host)) transport_->connect(layout_.leader(host));
  }
  transport_->end(abort.state.load() == local::AbortRecord::kSet ? encode_ending(abort) : std::string());
  told_.store(true);  // from here on the memory of frames is not touched
}

void World::throw_ended() {
  tell_if_ended();
  throw recorded(label_->doing(), label_->number());
}

void World::throw_if_ended_before(const std::string& what, std::uint64_t sequence) {
  if (!ended()) return;
  tell_if_ended();
  throw recorded(what, sequence);
}

void World::end_and_throw(ErrorCode code, int peer, std::uint64_t sequence, const std::string& text) {
  end(code, peer, sequence, text);
  throw_ended();
}

std::string World::pid_text(int rank) const {
  const transport::tcp::PeerInfo& own = infos_[static_cast<std::size_t>(layout_.rank)];
  const transport::tcp::PeerInfo& info = infos_[static_cast<std::size_t>(rank)];
  return info.machine == own.machine && info.pid == own.pid ? "" : fmt::format("pid {}", info.pid);
}

void World::end_lost(int peer, const std::string& how) {
  const RunningOperation running{label_->doing(), label_->number(), layout_.rank, options_.placement.host};
  end_and_throw(ErrorCode::PeerLost, peer, running.number,
                lost_text(running, peer, host_name(peer), pid_text(peer), how));
}

void World::tell_waiting(std::uint64_t sequence) {
  const std::string bytes = codec::Writer().number(sequence).take();
  for (const int peer : transport_->connected()) transport_->message(peer, kWaits, bytes);
}

void World::on_message(int peer, std::uint32_t tag, std::string_view bytes) {
  if (tag == kWaits) {
    const auto sequence = codec::Reader(bytes).number<std::uint64_t>();
    if (sequence) waits_[static_cast<std::size_t>(peer)].store(*sequence, std::memory_order_relaxed);
    return;
  }
  if (message_handler) message_handler(peer, tag, bytes);
}

void World::on_ended(int from, std::string_view bytes) {
  codec::Reader in(bytes);
  const auto code = in.number<std::uint8_t>();
  const auto reporter = in.number<std::int32_t>();
  const auto peer = in.number<std::int32_t>();
  const auto sequence = in.number<std::uint64_t>();
  const auto text = in.text(kLongestCause);
  if (!code || !reporter || !peer || !sequence || !text || *code > static_cast<std::uint8_t>(ErrorCode::Internal)) {
    local_world().record(ErrorCode::Aborted, from, label_->number(),
                         fmt::format("rank {} ({}) has ended the world and could not say why -- see the output of the "
                                     "ranks on that host",
                                     from, host_name(from)));
    return;
  }
  local_world().record(static_cast<ErrorCode>(*code), *peer, *sequence, *text, *reporter);
}

void World::on_broken(int peer, std::string_view why) {
  local_world().record(
      ErrorCode::Corrupt, peer, label_->number(),
      fmt::format("the connection between rank {} ({}) and rank {} ({}) broke -- {} -- do all hosts run "
                  "the same build, and is nobody between them?",
                  layout_.rank, options_.placement.host, peer, host_name(peer), why));
}

}  // namespace cohort::comm::hosts
