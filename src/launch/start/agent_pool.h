// The agents of one job, one per host: starts them, lets them in (and nobody else), and knows how far each has come.
// Hosts other than this one are reached by a command, so many at a time. What is said to agents and what follows from
// what they say is the supervisor's. One thread.
#pragma once

#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/plan/plan.h"
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

/// One agent, from its start to its end.
struct AgentHandle {
  PlannedHost host;
  AgentProcess process;
  std::unique_ptr<RemoteStart> remote;  ///< where a command is in between
  std::uint16_t free_port = 0;          ///< that the agent holds for the job, on its host
  std::vector<std::int32_t> ports;      ///< likewise, one for each of its ranks and servers, if asked for
  Watch ended;                          ///< its process has
  Timer parting;                        ///< until which the command in between has to end
  std::unique_ptr<Channel> channel;
  bool closed = false;        ///< and that is closed, as its event has said
  bool started = false;       ///< its ranks run; the supervisor sets it
  bool all_gone = false;      ///< its ranks and all below them have ended; the supervisor sets it
  bool process_gone = false;  ///< and so has it, or the guard around it
  bool lost = false;          ///< the job goes on without it, whatever it still says; the supervisor sets it
  int starts = 0;             ///< of the command in between
};

/// Events of an agent, or of one that should have come.
namespace agent_event {
struct Joined {};  ///< it can be talked to
struct Said {
  Message message;
};
/// No error: the other end has closed in good order.
struct ChannelClosed {
  std::optional<Error> error;
};
struct ProcessEnded {};
/// Why one that came, or did not come, cannot be taken.
struct Unfit {
  std::string why;
};
/// A line of a remote agent's stderr, or of the command in between.
struct Complaint {
  std::string line;
};
}  // namespace agent_event
struct AgentEvent {
  AgentHandle* agent = nullptr;  ///< nullptr: which one is not known
  std::variant<agent_event::Joined, agent_event::Said, agent_event::ChannelClosed, agent_event::ProcessEnded,
               agent_event::Unfit, agent_event::Complaint>
      what;
};

class AgentPool {
 public:
  /// `spec` outlives this; of `plan` only how it is reached and where its hosts are is of interest. `input_fd`: what
  /// rank 0 has as stdin, where it is on this host; -1: nothing. Throws cohort::Error.
  AgentPool(Loop& loop, const net::Secret& secret, const JobSpec& spec, const Plan& plan, int input_fd);
  AgentPool(const AgentPool&) = delete;
  AgentPool& operator=(const AgentPool&) = delete;

  /// Returns the events in order; to be called after each step of the loop, until there are no more.
  std::optional<AgentEvent> next_event();
  bool has_events() const noexcept { return !events_.empty(); }

  /// Throws where a local one cannot be started; those before it run, until `drop_lifelines`.
  void start(const std::vector<PlannedHost>& hosts);
  /// Another one, while the job runs: its index is its place among the members, which is not theirs of `plan`. Throws
  /// where it is here and cannot be started.
  AgentHandle& add(PlannedHost host);
  /// One that comes by itself is lost before it was told anything: it may come once more. False: nobody is let in.
  bool await_again(AgentHandle& member);
  void start_no_more() noexcept { over_ = true; }
  /// Nothing has come from a host for longer than anything should take.
  bool somebody_is_silent() const;
  /// Ends the lifelines: agents, and what they own, end by themselves.
  void drop_lifelines();
  /// To all that have joined.
  void broadcast(const Message& message);
  /// Nothing of the job is left on any host, and nothing more comes: agents end, and a command in between that does not
  /// is ended. The launchers of other nodes wait for `send_exit_status`.
  void finish();
  /// To the launchers of other nodes: how the job has ended.
  void send_exit_status(int status);
  /// Those whose hosts have ranks are told another start of them.
  void begin_again();
  static bool is_connected(const AgentHandle& member) { return member.channel != nullptr && !member.closed; }
  /// It is, and the job does not go on without it.
  static bool is_usable(const AgentHandle& member);

  /// Agents that come by themselves and have not come are not waited for any more, and not let in.
  void drop_missing();
  /// The job has begun: launchers of other nodes that come now join it, where it may grow.
  void take_late_ones() noexcept { late_ones_come_ = may_grow_; }

  /// In the order of the hosts.
  const std::vector<std::unique_ptr<AgentHandle>>& members() const noexcept { return members_; }
  bool all_joined() const;
  bool all_started() const;
  /// No ranks, nor what they have started, run on any host.
  bool nothing_runs() const;
  /// And all agents are there to start others.
  bool can_go_on() const;
  /// No agent's process is left, and nothing that it said is on its way.
  bool all_ended() const;
  /// The hosts whose ranks do not run yet: "a, b", and what is known of those whose agents have not come.
  std::string missing() const;
  /// Describes what is known of a remote agent that has not come.
  FailedStart failed_start(const AgentHandle& member) const;
  /// Why a remote agent whose command has ended did not come.
  std::string why_not(const AgentHandle& member) const;
  /// For the agents that the job's owner has started: where to come, and the secret. The index is theirs to set.
  Invitation invitation_for_owner() const;
  /// Once all have come that say themselves where they are: those of one host beside each other.
  void sort_by_host();
  /// By hand: who is waited for, and what to type there; empty: nobody.
  std::string invitation() const;
  /// "ssh: exit code 255: Connection reset": of a remote agent whose command has ended.
  std::string how_ended(const AgentHandle& member) const;
  /// For another server of the job, at a port of the system's choice: where this one listens.
  net::Endpoint open_endpoint() const;
  /// Ends the lifeline and the command in between, which may be waiting for a host that is not there.
  static void kill(AgentHandle& member);
  /// The address of this host by which an agent has come; loopback for one that is here.
  static net::Address own_address(const AgentHandle& member);
  /// And the agent's.
  static net::Address agent_address(const AgentHandle& member);

 private:
  template <class What>
  void note(AgentHandle* member, What what) {
    events_.push_back({member, std::move(what)});
  }
  void on_accepted(net::Acceptor::Accepted accepted);
  void close_entrance();
  /// Handles an undecodable message of a peer that has proved the secret.
  void on_nonsense(const std::string& peer);
  /// Names of the wanted hosts: "a, b".
  std::string names_of(bool (*wanted)(const AgentHandle&)) const;
  void start_local(AgentHandle& member);
  /// For the end of its process.
  void watch(AgentHandle& member);
  void start_remote();
  Result<void> start_remote(AgentHandle& member);
  Invitation invitation_for(int index) const;
  /// One whose command failed by bad luck. False: it did not, or no more are started.
  bool start_again(AgentHandle& member);
  void end_command(AgentHandle& member, int signal);
  void on_process_ended(AgentHandle& member);
  void on_hello(net::SecureConnection connection, const Hello& hello);
  /// Says why the launcher of another node cannot be taken; empty: it can.
  std::string objection(const Hello& hello) const;
  std::string name_for(const Hello& hello, int index) const;

  Loop& loop_;
  const net::Secret& secret_;
  const JobSpec& spec_;
  const StartMethod method_;
  const std::optional<NodeRole> node_;
  const bool may_grow_;
  const int input_fd_;
  std::deque<AgentEvent> events_;
  net::Endpoint here_;  ///< where it listens
  std::optional<net::Acceptor> acceptor_;
  Watch entrance_;
  std::vector<std::unique_ptr<AgentHandle>> members_;
  std::size_t next_remote_ = 0;  ///< in members_
  std::size_t starting_ = 0;     ///< remote ones on their way
  bool over_ = false;            ///< no more are started
  bool late_ones_come_ = false;
};

}  // namespace cohort::launch
