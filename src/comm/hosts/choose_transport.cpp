#include "comm/hosts/choose_transport.h"

#include "base/log.h"
#include "base/result.h"
#include "ext/mpi/mpi_transport.h"
#include "ext/mpi/runtime.h"

#include <map>
#include <utility>

namespace cohort::comm::hosts {
namespace {

std::shared_ptr<mpi::Endpoint> endpoint_for(const FormOptions& options) {
  return value_or_throw(mpi::Runtime::of_process().endpoint(net::deadline_in(options.join_timeout), options.timeout));
}

/// MPI's number of each rank.
std::vector<int> processes_of(const std::vector<transport::tcp::WireCard>& cards, const mpi::Endpoint& endpoint) {
  std::vector<int> processes;
  std::map<int, int> rank_of;
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    const transport::tcp::WireCard& card = cards[rank];
    if (card.mpi_job != cards.front().mpi_job || card.mpi_process < 0 || card.mpi_process >= endpoint.size()) {
      raise(ErrorCode::Mismatch,
            "MPI as transport: rank {} ({}) and rank 0 ({}) are not processes of one start of mpirun or srun, so MPI "
            "does not connect them -- start all ranks by one mpirun, of the MPI that the plug-in is made for ({})",
            rank, card.host, cards.front().host, endpoint.library());
    }
    const auto [entry, is_new] = rank_of.emplace(card.mpi_process, static_cast<int>(rank));
    if (!is_new) {
      raise(ErrorCode::Mismatch,
            "MPI as transport: ranks {} and {} are in one process, and MPI connects processes -- give each rank a "
            "process, or use the transport tcp",
            entry->second, rank);
    }
    processes.push_back(card.mpi_process);
  }
  return processes;
}

}  // namespace

void complete_card(transport::tcp::WireCard& card, const FormOptions& options) {
  if (options.transport != transport::TransportKind::Mpi) return;
  const std::shared_ptr<mpi::Endpoint> endpoint = endpoint_for(options);
  card.mpi_process = endpoint->rank();
  card.mpi_job = endpoint->job();
}

std::unique_ptr<transport::Transport> make_transport(const FormOptions& options,
                                                     transport::tcp::TcpTransport::Options tcp,
                                                     transport::tcp::Listeners listeners,
                                                     transport::TransportEvents& events) {
  if (options.transport != transport::TransportKind::Mpi) {
    if (tcp.rank == 0) log::info("plan", "{} ranks, between hosts over TCP", tcp.cards.size());
    return std::make_unique<transport::tcp::TcpTransport>(std::move(tcp), std::move(listeners), events);
  }
  if (tcp.cards.front().protection == transport::tcp::Protection::Encrypted) {
    raise(
        ErrorCode::InvalidArgument,
        "COHORT_ENCRYPT=1 with MPI as transport -- what goes through MPI cannot be encrypted here -- use the transport "
        "tcp, or a network that nobody else is on");
  }
  mpi::MpiTransport::Options own;
  own.endpoint = endpoint_for(options);
  own.processes = processes_of(tcp.cards, *own.endpoint);
  own.world = transport::tcp::world_number(*tcp.secret);
  if (tcp.rank == 0)
    log::info("plan", "{} ranks, between hosts over MPI ({})", tcp.cards.size(), own.endpoint->library());
  return std::make_unique<mpi::MpiTransport>(std::move(own), std::move(tcp), std::move(listeners), events);
}

}  // namespace cohort::comm::hosts
