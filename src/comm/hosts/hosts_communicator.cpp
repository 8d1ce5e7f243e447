#include "comm/hosts/hosts_communicator.h"

#include "base/result.h"
#include "comm/control/group_infos.h"
#include "comm/hosts/choose_transport.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace cohort::comm::hosts {
namespace {

/// Who forms the world speaks of all hosts; a rank is told of those that have its local rank.
cluster::Placement as_told(const FormOptions& options) {
  const Layout layout(options.hosts, options.placement.rank);
  cluster::Placement placement = options.placement;
  placement.cross_rank = layout.hosts_with(layout.local, layout.host);
  placement.cross_size = layout.hosts_with(layout.local, layout.hosts);
  return placement;
}

}  // namespace

HostsCommunicator::HostsCommunicator(const FormOptions& options, std::unique_ptr<Place> place)
    : QueueCommunicator(as_told(options), options.timeout, std::make_shared<Core>(options, std::move(place)),
                        options.hosts) {
  core().begin();
}

std::shared_ptr<MemoryBlock> HostsCommunicator::allocate(std::size_t bytes) {
  check_home();
  return core().world().local().allocate(bytes);
}

// --- groups ---

namespace {

/// What ranks have to know of each other to form groups.
struct GroupInfo : GroupInfoHead {
  std::uint32_t info_length = 0;
  transport::tcp::Bytes32 token{};
  char info[1036] = {};  // where ranks of other hosts meet it
};

template <std::size_t N>
std::uint32_t put(char (&to)[N], const std::string& text) {
  const std::size_t length = std::min(text.size(), N);
  std::memcpy(to, text.data(), length);
  return static_cast<std::uint32_t>(length);
}

}  // namespace

std::shared_ptr<CommunicatorImpl> HostsCommunicator::form_group(int color, int key, std::span<const int> listed,
                                                                std::chrono::milliseconds timeout, bool background) {
  World& world = core().world();
  const Layout& layout = world.layout();
  auto place = std::make_unique<Place>();
  GroupInfo own;
  own.color = color;
  own.key = key;
  prepare(own, [&] {
    if (color == kNoColor) return;
    place->point = std::make_unique<local::Rendezvous>(placement_.size);
    place->listeners = std::make_unique<transport::tcp::Listeners>(world.listening());
    own.token = transport::tcp::random_bytes();
    own.set_entry(place->point->entry());
    transport::tcp::PeerInfo wire = place->listeners->info();
    complete_info(wire, world.options());
    while (transport::tcp::encode(wire).size() > sizeof own.info && !wire.addresses.empty()) wire.addresses.pop_back();
    own.info_length = put(own.info, transport::tcp::encode(wire));
  });
  std::vector<GroupInfo> infos(static_cast<std::size_t>(placement_.size));
  queue_->submit(exchange_of(own, infos, listed, timeout)).wait();
  check_prepared(infos, [](int rank) { return rank; });
  if (color == kNoColor) return nullptr;

  const std::vector<int> members = members_of(infos, color);
  FormOptions form;
  form.placement = placement_;
  form.placement.size = static_cast<int>(members.size());
  form.join_timeout = timeout;
  form.timeout = timeout_;
  form.background = background;
  form.one_machine = world.options().one_machine;
  form.secret = world.options().secret;
  form.transport = world.options().transport;
  std::map<int, int> hosts;  // by the world's number; numbered anew by their lowest rank
  for (std::size_t i = 0; i < members.size(); ++i) {
    const int member = members[i];
    const int host = layout.host_of(member);
    const int number = hosts.emplace(host, static_cast<int>(hosts.size())).first->second;
    form.hosts.push_back(number);
    if (member == placement_.rank) {
      form.placement.rank = static_cast<int>(i);
      form.placement.local_rank = static_cast<int>(place->entries.size());
      form.placement.cross_rank = number;
    }
    if (host == layout.host) place->entries.emplace_back(infos[static_cast<std::size_t>(member)].entry_text());
    const GroupInfo& info = infos[static_cast<std::size_t>(member)];
    place->infos.push_back(value_or_throw(transport::tcp::decode_peer_info(
        std::string_view(info.info, std::min<std::size_t>(info.info_length, sizeof info.info)))));
  }
  form.placement.local_size = static_cast<int>(place->entries.size());
  form.placement.cross_size = static_cast<int>(hosts.size());
  const GroupInfo& first = infos[static_cast<std::size_t>(members.front())];
  place->token.assign(reinterpret_cast<const char*>(first.token.data()), first.token.size());
  if (hosts.size() > 1) return std::make_shared<HostsCommunicator>(form, std::move(place));

  form.hosts.clear();
  form.store = local::store_of(place->entries);
  return std::make_shared<local::LocalCommunicator>(form, std::move(place->point));
}

}  // namespace cohort::comm::hosts
