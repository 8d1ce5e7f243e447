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
  if (options.transport != transport::TransportKind::Mpi) return;
  const std::shared_ptr<mpi::Endpoint> endpoint = endpoint_for(options);
  info.mpi_process = endpoint->rank();
  info.mpi_job = endpoint->job();
}

std::unique_ptr<transport::Transport> make_transport(const FormOptions& options,
                                                     transport::tcp::TcpTransport::Options tcp,
                                                     transport::tcp::Listeners listeners,
                                                     transport::TransportEvents& events) {
  if (options.transport != transport::TransportKind::Mpi) {
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

}  // namespace cohort::comm::hosts
