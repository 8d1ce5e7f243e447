// The agents of one job, one per host: starts them, admits only them, and knows how far each has come. Other hosts are
// reached by a command; a limited number of such commands run at the same time. If a job whose hosts do not change has
// more than 16 such agents, some of them are routers, to which the others connect. The messages to and from agents are
// the supervisor's business. One thread.
#pragma once

#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/plan/plan.h"
#include "launch/start/agent_line.h"
#include "launch/start/starter.h"
#include "net/acceptor.h"
#include "net/secret.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace cohort::launch {

/// An agent, from its start to its end.
struct AgentHandle {
  PlannedHost host;
  AgentProcess process;
  std::unique_ptr<RemoteStart> remote;  ///< set if a command is in between
  std::uint16_t free_port = 0;          ///< port that the agent holds for the whole job
  std::vector<std::int32_t> ports;      ///< ports that it holds for its ranks and servers, if asked for
  Watch ended;                          ///< for the end of its process
  Timer parting;                        ///< limit for the command in between to end
  AgentHandle* router = nullptr;        ///< the agent to which this one is to connect; nullptr: to the supervisor
  std::vector<net::Endpoint> routes;    ///< addresses at which a router awaits its children
  Timer invited;                        ///< limit of waiting for the router before this agent is invited
  std::unique_ptr<AgentLine> line;      ///< for a child, exists before its greeting
  AgentLine* channel = nullptr;         ///< the line, once the agent has joined
  bool given_up = false;                ///< the line is closed
  bool closed = false;                  ///< the event ChannelClosed has been taken
  bool started = false;                 ///< its ranks run; set by the supervisor
  bool all_gone = false;                ///< its ranks and their descendants have ended; set by the supervisor
  bool process_gone = false;            ///< its process, or the guard around it, has ended, and has been reaped
  std::optional<sys::ExitStatus> exit_status;  ///< of that process, if known
  bool lost = false;  ///< the job goes on without the agent, whatever it sends; set by the supervisor
  int starts = 0;     ///< how often the command in between was started
};

/// Events of an agent, also of one that failed to come.
namespace agent_event {
struct Joined {};  ///< the agent can be sent messages
struct Said {
  Message message;
};
/// No error: the other end has closed in good order.
struct ChannelClosed {
  std::optional<Error> error;
};
struct ProcessEnded {};
/// An agent came that the job cannot take, or an agent did not come; `why` says the reason.
struct Unfit {
  std::string why;
};
/// A line of a remote agent's stderr, or of the command in between.
struct Complaint {
  std::string line;
};
}  // namespace agent_event
struct AgentEvent {
  AgentHandle* agent = nullptr;  ///< nullptr: not known
  std::variant<agent_event::Joined, agent_event::Said, agent_event::ChannelClosed, agent_event::ProcessEnded,
               agent_event::Unfit, agent_event::Complaint>
      what;
};

class AgentPool {
 public:
  /// `spec` outlives this; `plan` only says where its hosts are and how they are reached. `input_fd`: stdin of rank 0,
  /// if rank 0 is on this host; -1: none. Throws cohort::Error.
  AgentPool(Loop& loop, const net::Secret& secret, const JobSpec& spec, const Plan& plan, int input_fd);
  AgentPool(const AgentPool&) = delete;
  AgentPool& operator=(const AgentPool&) = delete;

  /// Agents that start on this host from now on keep `fd` open, and so keep a lock on it, until their workers are gone.
  void keep_open(int fd) noexcept { held_fd_ = fd; }

  /// Returns the next event; to be called after each step of the loop until there is none.
  std::optional<AgentEvent> next_event();
  bool has_events() const noexcept { return !events_.empty(); }

  /// Starts agents. Throws if a local one cannot be started; earlier ones then run until `drop_lifelines`.
  void start(const std::vector<PlannedHost>& hosts);
  /// Adds an agent while the job runs. Its index is its position among the members, and may differ from the position in
  /// `plan`. Throws if it is local and cannot be started.
  AgentHandle& add(PlannedHost host);
  /// Lets an agent that comes by itself come again if it is lost before any orders. Returns false if none is admitted.
  bool await_again(AgentHandle& member);
  void start_no_more() noexcept { over_ = true; }
  /// Returns true if some host has been silent for longer than anything should take.
  bool somebody_is_silent() const;
  /// Ends the lifelines: agents and their processes end by themselves.
  void drop_lifelines();
  /// Sends the message to all agents that have joined, or only to those that are `wanted`. The children of one router
  /// get it through a single message.
  void broadcast(const Message& message, bool (*wanted)(const AgentHandle&) = nullptr);
  /// Called when nothing of the job is left on any host, and nothing more comes. Agents end; a command in between that
  /// does not end is killed. The launchers of other nodes wait for `send_exit_status`.
  void finish();
  /// Tells the launchers of other nodes how the job has ended.
  void send_exit_status(int status);
  /// Prepares for another start: agents whose hosts have ranks count as not started.
  void begin_again();
  static bool is_connected(const AgentHandle& member) { return member.channel != nullptr && !member.closed; }
  /// Returns true if the agent is connected, and the job does not go on without it.
  static bool is_usable(const AgentHandle& member);

  /// Stops waiting for agents that were to come by themselves, and no longer admits them.
  void drop_missing();
  /// Called when the job has begun: launchers of other nodes that come now join the job if it may grow.
  void take_late_ones() noexcept { late_ones_come_ = may_grow_; }

  /// Returns the agents in the order of the hosts.
  const std::vector<std::unique_ptr<AgentHandle>>& members() const noexcept { return members_; }
  bool all_joined() const;
  bool all_started() const;
  /// Returns true if no rank, nor any process that ranks have started, runs on any host.
  bool nothing_runs() const;
  /// Returns true if nothing runs, and all agents are there to start other ranks.
  bool can_go_on() const;
  /// Returns true if no process of an agent is left, and no message of an agent is under way.
  bool all_ended() const;
  /// Names the hosts whose ranks do not run yet: "a, b", with what is known of agents that have not come.
  std::string missing() const;
  /// Returns the known facts about a remote agent that has not come.
  FailedStart failed_start(const AgentHandle& member) const;
  /// Says why a remote agent whose command has ended did not come.
  std::string why_not(const AgentHandle& member) const;
  /// Returns the secret and addresses for agents that the job's owner starts. The agents set the index themselves.
  Invitation invitation_for_owner() const;
  /// Called when all agents that report their host have come: makes the agents of one host adjacent.
  void sort_by_host();
  /// For agents started by hand: names the missing hosts, and the command to type there; empty if none is missing.
  std::string invitation() const;
  /// Describes the end of a remote agent's command: "ssh: exit code 255: Connection reset".
  std::string how_ended(const AgentHandle& member) const;
  /// Returns this endpoint with a port that the system chooses, for another server of the job.
  net::Endpoint open_endpoint() const;
  /// Ends the lifeline and the command in between, which may be waiting for a host that is down.
  static void kill(AgentHandle& member);
  /// Returns the address of this host over which an agent has come; loopback for a local agent.
  static net::Address own_address(const AgentHandle& member);
  /// Returns the agent's address.
  static net::Address agent_address(const AgentHandle& member);

 private:
  template <class What>
  void note(AgentHandle* member, What what) {
    events_.push_back({member, std::move(what)});
  }
  void on_accepted(net::Acceptor::Accepted accepted);
  void close_entrance();
  /// Handles an undecodable message from a peer that has proved that it has the secret.
  void on_nonsense(const std::string& peer);
  /// Returns the names of the wanted hosts: "a, b".
  std::string names_of(bool (*wanted)(const AgentHandle&)) const;
  void start_local(AgentHandle& member);
  /// Watches for the end of the agent's process.
  void watch(AgentHandle& member);
  void start_remote();
  Result<void> start_remote(AgentHandle& member);
  /// Invites an agent that has announced itself, as soon as its router is there.
  void invite(AgentHandle& member);
  Invitation invitation_for(int index) const;
  /// Restarts a command after a transient failure. Returns false after other failures, and when it gives up.
  bool start_again(AgentHandle& member);
  void end_command(AgentHandle& member, int signal);
  void on_process_ended(AgentHandle& member);
  /// `child`: the agent that said this through its router; null: it said this over `connection`.
  void on_hello(AgentHandle* child, std::optional<net::SecureConnection> connection, Hello hello);
  std::unique_ptr<Channel> make_channel(AgentHandle& member, net::SecureConnection connection);
  void on_message(AgentHandle& member, Message message);
  void on_closed(AgentHandle& member, std::optional<Error> error);
  /// Takes a message of a tree's child, which has come over the connection of `through`.
  void on_relayed(AgentHandle& through, const Relayed& relayed);
  void on_child_link(AgentHandle& router, const ChildLink& link);
  /// A child has lost its router, or its router has lost it, so it is expected to come by itself.
  void await(AgentHandle& child, std::chrono::milliseconds limit, const std::string& why);
  /// Returns the agent of this host if it has a router, and is not given up.
  AgentHandle* child_of(int host) const;
  /// Says why the launcher of another node cannot take part; empty: it can.
  std::string objection(const Hello& hello) const;
  std::string name_for(const Hello& hello, int index) const;

  Loop& loop_;
  const net::Secret& secret_;
  const JobSpec& spec_;
  const StartMethod method_;
  const std::optional<NodeRole> node_;
  const bool may_grow_;
  const int input_fd_;
  int held_fd_ = -1;
  std::deque<AgentEvent> events_;
  net::Endpoint here_;  ///< the listening endpoint
  std::optional<net::Acceptor> acceptor_;
  Watch entrance_;
  std::vector<std::unique_ptr<AgentHandle>> members_;
  std::deque<AgentHandle*> to_start_;  ///< remote agents, routers first
  std::size_t starting_ = 0;           ///< number of remote agents that are being started
  bool over_ = false;                  ///< no more agents are started
  bool late_ones_come_ = false;
};

}  // namespace cohort::launch
